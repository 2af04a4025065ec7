"""The price of a step on real processes, with gloo between them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("distributed_cost.py")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, launch_ranks: Callable[..., Any]) -> Path:
    """What two ranks saw: starting them takes longer than the runs."""
    found = tmp_path_factory.mktemp("cost")
    launch_ranks(SCRIPT, found)
    return found


@pytest.mark.parametrize("kind", ["copied", "sharded"])
def test_ranks_measure_the_price_together_and_agree(out: Path, kind: str) -> None:
    """A sample of the batch costs half of one of a rank; the clock of rank 0 counts."""
    first, other = (json.loads((out / f"{kind}{rank}.json").read_text()) for rank in range(2))
    measured, again = first
    assert measured["c"] == pytest.approx(math.sqrt(2 * 32), rel=0.02)
    assert len(set(measured["sizes"])) > 1
    for name in ("weights", "sizes", "samples"):
        assert measured[name] == again[name], "measuring leaves no trace, and c= repeats the run"
    for mine, theirs in zip(first, other, strict=True):
        assert mine["weights"] == theirs["weights"]
        assert (mine["samples"], mine["c"]) == (theirs["samples"], theirs["c"])
    assert measured["clock"] != other[0]["clock"], "ranks have clocks of their own"
