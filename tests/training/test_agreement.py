"""Ranks that are set up unlike, broken or stuck: none of them hangs, and each says why."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from stretto.runtime.agreement import first_difference

SCRIPT = Path(__file__).with_name("forked_ranks.py")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_rank_waits_for_one_that_is_set_up_unlike_or_is_stuck(
    tmp_path: Path, launch_ranks: Callable[..., CompletedProcess[str]]
) -> None:
    """Every rank names the first setting that differs, or the rank that does not come."""
    said: dict[str, list[str]] = json.loads(launch_ranks(SCRIPT, tmp_path, ranks=1).stdout)
    script = runpy.run_path(str(SCRIPT))
    for name, (_, expected) in script["UNLIKE"].items():
        first, second = said[name]
        assert first == second, name
        assert first.startswith("TrainingError: cannot train on 2 ranks with different settings: ")
        assert expected in first, name
    first, second = said["stream"]
    assert first == second
    assert "samples after the end of the epoch in batch 5 is (0,) on rank 0" in first
    assert said["no difference"] == ["None", "None"]  # workers may differ
    first, second = said["exchange"]
    assert first == second
    exchanged = json.loads(first)
    assert exchanged.pop("lines") == [[pytest.approx(2 / 3), 24, 3], [pytest.approx(2 / 3), 24, 6]]
    assert exchanged == {
        "sum": [3.0, [1, 10]],
        "mean": [1.5, [0.5, 5.0]],
        "max": [2.0, [1, 5]],
        "min": [1.0, [0, 5]],
        "gather": ["(0, tensor([0, 5]))", "(1, tensor([1, 5]))"],
        "broadcast": {"from": 0},
    }
    for rank in range(2):
        first, second = said[f"resumed {rank}"]
        assert first == second
        assert f"rank {rank} has called resume()" in first
        assert f"rank {1 - rank} has called fit()" in first
    assert said["stopped"] == ["4", "4"]
    for last in ("3ba", "6ba"):
        first, second = said[f"skip {last}"]
        assert first == second
        assert "SKIPPED on rank 1 alone" in first
    first, second = said["evaluated"]
    assert first == second
    assert "end after 40, 60 samples" in first
    for fault, parallel in script["FAULTS"]:
        waiting, failed = said[f"{fault} {parallel}"]
        assert failed == f"ValueError: a {fault} is broken"
        assert "cannot go on with the other ranks: one of them has ended" in waiting, parallel
    for reads in said["reads"]:
        short, long = json.loads(reads)
        assert short == long, "a step reads nothing"
    for place in ("callback", "metric", "sharded"):
        first, silent, third = said[f"stuck {place}"]
        assert silent == "no answer"
        assert "rank 1 did not come within 8 s" in first, place
        assert "rank 1 did not come within 8 s" in third, place

    for alone in range(2):
        seconds = [*map(float, said[f"one more {alone}"])]
        assert all(0 < one < 12 for one in seconds), "each ends within the limit of 8 s"


def test_a_difference_deep_in_a_long_setting_is_shown() -> None:
    long = "PiecewiseConstant('" + " ".join(f"{at}ep:{at + 1}" for at in range(100))
    said = first_difference(
        [{"batch_size": f"{long} 100ep:7')"}, {"batch_size": f"{long} 100ep:8')"}]
    )
    assert said is not None
    assert "100ep:7')... on rank 0 and" in said
    assert "100ep:8')... on rank 1" in said
    assert len(said) < 300


def test_of_many_ranks_the_first_are_listed() -> None:
    records = [{"seed": "1"}] * 20 + [{"seed": "2"}]
    assert (
        first_difference(records)
        == "seed is 1 on ranks 0, 1, 2, 3, 4, 5, 6, 7 ... and 2 on rank 20"
    )
