"""Megatron Core's own GPT, as rank 0 of 8, follows a plan: `examples/megatron_ramp.py`.

Tensor and pipeline parallelism, its optimizer and its parameter scheduler. Skipped without the
packages: `make test-adapters ARGS=megatron`.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.phantomgpu.test_runs import reason

import phantomgpu
from stretto.planning import plan
from stretto.schedules import WSD
from stretto.timing import Horizon

missing = [name for name in ("megatron", "triton") if util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(reason is not None, reason=str(reason)),
    pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_ramp.py"
RAMP, STEPS = "0ba:2 10ba:4 30ba:8", 50


@cache
def ran(*arguments: str) -> tuple[list[dict[str, Any]], phantomgpu.Report]:
    """Return what each step had, and the report."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "steps.json")
        command = [sys.executable, "-W", "ignore", str(EXAMPLE), "--model", "tiny"]
        command += ["--micro-batch-size", "1", "--json", str(file), *arguments]
        report = phantomgpu.run(command, gpu="h100", ranks=8, steps=None)
        assert report.fits, report.problem
        return json.loads(file.read_text()), report


def peaks(steps: list[dict[str, Any]]) -> list[int]:
    """Return the peak of allocated bytes of each number of micro-batches, as they grow."""
    numbers = sorted({one["micro_batches"] for one in steps})
    return [
        max(one["allocated"] for one in steps if one["micro_batches"] == number)
        for number in numbers
    ]


def test_sizes_rates_and_micro_batches_are_those_of_the_plan() -> None:
    steps, report = ran("--steps", str(STEPS), "--batch-size", RAMP)
    planned = plan(
        Horizon.endless(f"{STEPS}ba"),
        RAMP,
        schedules={"lr": WSD("20%", warmup="10%")},
    )
    assert [one["size"] for one in steps] == [2] * 10 + [4] * 20 + [8] * 20
    assert [one["micro_batches"] for one in steps] == [1] * 10 + [2] * 20 + [4] * 20
    assert [one["lr"] for one in steps] == [2e-4 * planned.values_at(at)["lr"] for at in range(50)]
    assert {one["weight_decay"] for one in steps} == {0.1}
    assert report.steps == STEPS


def test_the_peak_grows_until_the_pipeline_is_full() -> None:
    """One micro-batch, then two in flight, then as many, though there are four."""
    steps, _ = ran("--steps", str(STEPS), "--batch-size", RAMP)
    one, two, four = peaks(steps)
    assert one < two == four


def test_the_peak_of_a_stage_is_that_of_a_run_of_its_size() -> None:
    ramped, _ = ran("--steps", str(STEPS), "--batch-size", RAMP)
    constant, _ = ran("--steps", "10", "--batch-size", "2")
    memory = [
        [(one["allocated"], one["reserved"]) for one in run[:10]] for run in (ramped, constant)
    ]
    assert memory[0] == memory[1]


def test_the_report_has_these_peaks_by_step() -> None:
    steps, report = ran("--steps", str(STEPS), "--batch-size", RAMP)
    for (allocated, reserved), step in zip(report.peaks_by_step, steps, strict=True):
        assert reserved == step["reserved"]
        assert 0.99 * step["allocated"] < allocated <= step["allocated"]


def test_a_pipeline_that_interleaves() -> None:
    """Each stage has two parts; rank 0 has five of these passes in flight, of 4, 8 and 16."""
    steps, _ = ran("--virtual", "2", "--steps", "10", "--batch-size", "0ba:4 4ba:8 7ba:16")
    assert [one["micro_batches"] for one in steps] == [2] * 4 + [4] * 3 + [8] * 3
    two, four, eight = peaks(steps)
    assert two < four == eight
