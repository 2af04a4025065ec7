"""Steps of your own on two ranks: the step of one big batch, as with the trainer's own."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("distributed_own_step.py")

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_ranks_take_the_step_of_one_big_batch(
    tmp_path: Path, launch_ranks: Callable[..., Any]
) -> None:
    """Second passes, weights by tokens, and two optimizers."""
    launch_ranks(SCRIPT, tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    alone = tmp_path / "one"
    alone.mkdir()
    runpy.run_path(str(SCRIPT))["main"](alone)
    one = json.loads((alone / "rank0.json").read_text())
    for name, weights in one.items():
        expected = torch.tensor(weights, dtype=torch.float64)
        for rank in ranks:
            found = torch.tensor(rank[name], dtype=torch.float64)
            # Muon computes in bfloat16, which turns the last bit of a gradient into more.
            atol = 1e-3 if name == "Muon" else 1e-12
            torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=name)
        assert ranks[0][name] == ranks[1][name]
