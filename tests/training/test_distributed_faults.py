"""A rank that fails ends the job with its own error, whatever the others wait for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("distributed_faults.py")

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


# The other rank waits for the sum of measurements; for the sum of gradients.
@pytest.mark.parametrize(
    ("fault", "parallel"),
    [("metric", "ddp"), ("callback", "ddp"), ("callback", "fsdp"), ("callback", "tp")],
)
def test_a_rank_that_raises_ends_the_job(
    fault: str, parallel: str, launch_ranks: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = launch_ranks(SCRIPT, fault, parallel, fails=True)
    assert done.returncode == 1
    assert f"ValueError: a {fault} of rank 1 is broken" in done.stderr
    assert "cannot go on with the other ranks: one of them has ended" in done.stderr
