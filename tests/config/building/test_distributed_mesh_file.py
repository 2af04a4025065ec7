"""Run files with a mesh: they train like one process, or say what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("distributed_mesh_file.py")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]
TRAINED = ("hsdp", "fsdp", "ddp", "tp", "no mesh")
REFUSED = {
    "other ranks": "torchrun",
    "parts and then copies": "copies",
    "no idle ranks": "idle_ranks",
}


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, launch_ranks: Callable[..., Any]
) -> list[dict[str, Any]]:
    """What each of four ranks came to; the last entry is of one process."""
    seen = []
    for ranks, names in ((4, (*TRAINED, *REFUSED)), (1, ())):
        out = tmp_path_factory.mktemp("files")
        launch_ranks(SCRIPT, out, *names, ranks=ranks)
        seen += [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
    return seen


@pytest.mark.parametrize("name", TRAINED)
def test_trains_like_one_process(found: list[dict[str, Any]], name: str) -> None:
    *ranks, one = found
    for number, rank in enumerate(ranks):
        ours = rank[name]
        assert ours["weights"] == pytest.approx(one["one"]["weights"], rel=0, abs=1e-12)
        assert ours["group"] == ours["seed"] == (number // 2 if name == "tp" else number)


@pytest.mark.parametrize(("name", "word"), REFUSED.items())
def test_what_does_not_fit_is_refused(found: list[dict[str, Any]], name: str, word: str) -> None:
    for rank in found[:-1]:
        assert "Error: cannot" in rank[name]
        assert word in rank[name]
