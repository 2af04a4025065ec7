"""Two ranks with a loop of their own, gloo between them."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("distributed_loop.py")

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


def seen_in(out: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


def ids_of(found: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of each step, over all ranks."""
    steps = zip(*(rank["seen"] for rank in found), strict=True)
    return [sorted(i for one in step for i in one["ids"]) for step in steps]


@pytest.fixture
def launch(tmp_path: Path, launch_ranks: Callable[..., Any]) -> Callable[..., Any]:
    def start(ranks: int, name: str, **settings: Any) -> list[dict[str, Any]]:
        out = tmp_path / name
        out.mkdir()
        settings = {"micro_batch_size": 3, "stop": None, "resume": None} | settings
        if settings["resume"] is not None:
            settings["resume"] = str(tmp_path / settings["resume"])
        if ranks == 1:
            resume = settings.pop("resume")
            train = runpy.run_path(str(SCRIPT))["train"]
            train(out, None if resume is None else Path(resume), **settings)
        else:
            launch_ranks(SCRIPT, json.dumps(settings), out, ranks=ranks)
        return seen_in(out, ranks)

    return start


def test_two_ranks_take_one_batch_and_resume_as_one(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    (alone,) = one = launch(1, "alone", micro_batch_size=64)
    two = launch(2, "two")
    weights = torch.tensor(alone["weights"], dtype=torch.float64)
    assert ids_of(two) == ids_of(one)
    assert [step["units"] for step in two[0]["seen"]] == [step["units"] for step in alone["seen"]]
    for rank in two:
        assert torch.allclose(
            torch.tensor(rank["weights"], dtype=torch.float64), weights, rtol=0, atol=1e-12
        )
        assert [step["noise"] for step in rank["seen"]] == [s["noise"] for s in two[0]["seen"]]
        assert all(step["noise"] is not None for step in rank["seen"])
    first = launch(2, "first", stop=4)
    (rest,) = launch(1, "rest", resume="first", micro_batch_size=2)
    assert ids_of(first) + ids_of([rest]) == ids_of(one)
    assert torch.allclose(
        torch.tensor(rest["weights"], dtype=torch.float64), weights, rtol=0, atol=1e-12
    )
    shards = [json.loads((tmp_path / "two" / f"shard{rank}.json").read_text()) for rank in (0, 1)]
    assert sorted(shards[0][0] + shards[1][0]) == list(range(41))
    for pair in zip(shards[0][1], shards[1][1], strict=True):
        assert sum(pair) == pytest.approx(2)
