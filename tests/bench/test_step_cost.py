"""The benchmark of a step's cost: which loops it times, and what each is compared with."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def test_the_cost_is_told_over_the_bare_loop_on_the_same_data_with_its_spread(bench: Any) -> None:
    cpu = {
        "bare": [100.0, 100.0, 100.0],
        "stretto": [150.0, 130.0, 140.0],
        "bare, TensorDataset": [200.0, 200.0, 200.0],
        "stretto, TensorDataset": [210.0, 250.0, 230.0],
    }
    times = {name: [{"cpu": one, "wall": one} for one in rounds] for name, rounds in cpu.items()}
    pair = {"name": "stretto", "version": "1", "microseconds": times, "load_average": [0.5, 2.5]}
    step_cost = bench("step_cost")
    rows = step_cost.compare(pair)
    own, tensors = rows["stretto"], rows["stretto, TensorDataset"]
    assert (own["over_bare"], own["over_bare_low"], own["over_bare_high"]) == (40, 35, 45)
    assert (own["ratio"], own["ratio_low"], own["ratio_high"]) == (1.4, 1.35, 1.45)
    assert (tensors["over_bare"], tensors["ratio"]) == (30, 1.15)
    text = step_cost.table([pair])
    assert "+30.0      20.0 .. 40.0    +10.0   1.150  1.100 .. 1.200    2.5" in text


def test_both_kinds_of_data_are_measured_and_take_the_steps_of_their_bare_loop(bench: Any) -> None:
    pair, setting = bench("step_cost_pair"), bench("step_cost_setting")
    yardstick_of = bench("step_cost").yardstick_of
    loops = pair.loops_of("stretto")
    assert {yardstick_of(label) for label in loops} == {"bare", "bare, TensorDataset"}
    samples = setting.Rows(201 * setting.BATCH)
    threads = torch.get_num_threads()
    for label in ("bare", "stretto", "bare, TensorDataset", "stretto, TensorDataset"):
        stopwatch = setting.Stopwatch(201)
        loops[label](samples, stopwatch)
        assert stopwatch.microseconds()["cpu"] > 0
    assert torch.get_num_threads() == threads
