"""A pipeline trains, saves and resumes as one process does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("pipeline_run.py")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, launch_ranks: Callable[..., Any]
) -> dict[str, list[dict[str, Any]]]:
    """What the ranks came to: on one, on two stages, and on two stages of two data ranks each."""
    out = tmp_path_factory.mktemp("pipeline")
    seen = {}
    for ranks, resumed in ((1, ()), (4, ()), (1, ("4",)), (2, ("1", "4")), (4, ("1", "4"))):
        launch_ranks(SCRIPT, out, *resumed, ranks=ranks)
        end = "-resumed" if resumed else ""
        files = [out / f"{ranks}-{rank}{end}.json" for rank in range(ranks)]
        seen[f"{ranks}{end}"] = [json.loads(file.read_text()) for file in files]
    return seen


@pytest.mark.parametrize(
    ("ranks", "run"),
    [
        ("4", "whole"),
        ("2-resumed", "whole"),
        *((f"{ranks}-resumed", saved) for ranks in (2, 4) for saved in ("1", "4")),
        ("1-resumed", "4"),
    ],
)
def test_a_pipeline_is_like_one_process(found: Found, ranks: str, run: str) -> None:
    expected = found["1"][0]["whole"]
    names: set[str] = set()
    for rank in found[ranks]:
        ours = rank[run]
        names |= ours["weights"].keys()
        for name, values in ours["weights"].items():
            assert values == pytest.approx(expected["weights"][name], rel=0, abs=1e-12)
        lines = expected["lines"][-len(ours["lines"]) :]
        assert len(ours["lines"]) > 5
        for line, other in zip(ours["lines"], lines, strict=True):
            assert line == pytest.approx(other, rel=1e-10)
    assert names == expected["weights"].keys()


def test_each_rank_has_one_stage(found: Found) -> None:
    for number, rank in enumerate(found["4"]):
        assert {name[0] for name in rank["whole"]["weights"]} == {str(number % 2)}


def test_noise_of_one_stage_is_not_taken_for_that_of_all(found: Found) -> None:
    assert all(rank["noise"].startswith("TrainingError") for rank in found["4"])
