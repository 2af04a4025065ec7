"""Ranks that share their samples, as those of a model-parallel group do, count once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.distributed_pairs import run

SCRIPT = Path(__file__).with_name("distributed_pairs.py")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


def test_pairs_of_ranks_train_like_one(tmp_path: Path, launch_ranks: Callable[..., Any]) -> None:
    for ranks in (2, 4):
        launch_ranks(SCRIPT, tmp_path / str(ranks), ranks=ranks)
    two, pairs = (json.loads((tmp_path / n / "pairs.json").read_text()) for n in ("2", "4"))
    alone = run(tmp_path / "alone")
    assert pairs["noise"] == pytest.approx(two["noise"], rel=1e-10)
    assert pairs["ledger"] == two["ledger"]
    assert pairs["weights"] == pytest.approx(alone["weights"], rel=1e-12)
    assert [line["sp"] for line in pairs["metrics"]] == [line["sp"] for line in alone["metrics"]]
    for ours, theirs in zip(pairs["metrics"], alone["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
