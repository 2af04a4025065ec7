from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

SCRIPT = Path(__file__).with_name("distributed_steps.py")
CHECKS = ("exchanges", "backward", "local_sgd", "compiled")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_on_two_ranks(
    tmp_path: Path, launch_ranks: Callable[..., CompletedProcess[str]]
) -> None:
    """Compiled models, missing backward passes, groups and all-reduces, and local SGD."""
    said = launch_ranks(SCRIPT, tmp_path).stdout
    for rank in range(2):
        assert [f"rank {rank}: check_{name}" in said for name in CHECKS] == [True] * len(CHECKS)
