"""One of two ranks runs out of memory: both end, and none waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.distributed_memory import CASES

SCRIPT = Path(__file__).with_name("distributed_memory.py")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_ranks_end_with_errors(tmp_path: Path, launch_ranks: Callable[..., Any]) -> None:
    said = json.loads(launch_ranks(SCRIPT, tmp_path, ranks=1).stdout.splitlines()[-1])
    for case in CASES:
        short, other = said[case.name][case.rank], said[case.name][1 - case.rank]
        assert short.startswith("TrainingError: ")
        assert f"memory ran out on rank {case.rank}" in short
        assert short.endswith("with micro_batch_size=2")
        assert other.startswith("TrainingError: ")
        assert "one of them has ended" in other
