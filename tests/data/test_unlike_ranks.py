"""Loops of your own on ranks that were given different things: none hangs, and each says what."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from stretto.data import StepLoader
from stretto.training import prepare

SCRIPT = Path(__file__).with_name("unlike_ranks.py")


@pytest.mark.distributed
def test_ranks_of_a_loop_of_your_own_compare_what_they_were_given(
    launch_ranks: Callable[..., CompletedProcess[str]],
) -> None:
    first, second = json.loads(launch_ranks(SCRIPT).stdout)
    for name in runpy.run_path(str(SCRIPT))["SETTINGS"]:
        assert first[name] == second[name], name
        assert f"on 2 ranks with different settings: {name} is " in first[name], name
    assert "different settings: seed is 0 on rank 0 and 1 on rank 1" in first["StepLoader"]
    assert first["right"] == first["workers"] == first["own experts"] == "12"
    assert "the weights of the ranks differ after 1ba" in first["not wrapped"]
    assert "differ before the first step" in first["not wrapped and not seeded"]
    assert second["not wrapped"] == "12"  # the first rank says it for all
    assert "every gradient was zero" in first["nothing is trained"]


def test_ranks_that_are_not_connected_compare_nothing() -> None:
    """They may be threads, or somebody looks at what one of many would read."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    run = prepare(range(16), 4, max_duration="1ep")
    run.bind(optimizer, rank=1, world_size=2)
    assert sum(1 for step in run if run.finish() is not None and step) == 4
    assert sum(1 for _ in StepLoader(range(16), 4, max_duration="1ep", rank=1, world_size=2)) == 4


def test_a_fake_process_group_compares_nothing() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        run = prepare(range(16), 4, max_duration="1ep", optimizer=optimizer)
        step = next(iter(run))
        assert step.local_num_samples == 2
    finally:
        torch.distributed.destroy_process_group()
