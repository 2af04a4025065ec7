"""What branches off a checkpoint cannot tell about the critical batch size."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from stretto.checkpoint import checkpoint_path, write_checkpoint
from stretto.cli.critical import _rule, _sizes
from stretto.config.run import RunConfig
from stretto.config.values.fields import Target
from stretto.experiments.branches import BranchPoint
from stretto.experiments.critical_batch_size import (
    Branch,
    check_baseline,
    check_sizes,
    check_tolerance,
)
from stretto.timing import Timestamp

CONFIG = RunConfig.parse(
    {
        "max_duration": "2ep",
        "model": {"target": "torch.nn:Identity"},
        "data": {"target": "stretto.examples.text:PythonDocs"},
        "optimizer": {"target": "torch.optim:SGD", "lr": 0.1},
        "batch_size": 8,
    }
)


def branch_point(ranks: int = 1, **records: object) -> object:
    """Branch off a checkpoint with such records: without any, it is none of a run."""
    folder = Path(tempfile.mkdtemp())
    path = checkpoint_path(folder, sample=8)
    write_checkpoint(path, {}, {"epoch": 1, **records})
    before = Path.cwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, {"WORLD_SIZE": str(ranks)}):
            return BranchPoint(CONFIG, Path(path.name))
    finally:
        os.chdir(before)


def branch_of_own_step() -> object:
    """Branch off a run that has a training step of its own."""
    step = CONFIG.model_copy(update={"step": Target(target="my.steps:Step")})
    return BranchPoint(step, Path("checkpoint"))


CASES: list[tuple[str, Callable[[], object]]] = [
    ("critical-sizes-one", lambda: check_sizes([8], 1024)),
    ("critical-sizes-order", lambda: check_sizes([16, 8], 1024)),
    ("critical-steps", lambda: check_sizes([8, 512], 1024)),
    ("critical-tolerance", lambda: check_tolerance(-0.01)),
    ("critical-baseline", lambda: check_baseline(Branch(8, 0, 9, 0.1, float("nan")), 8)),
    ("critical-rule", lambda: _rule("cubic")),
    ("critical-sizes-text", lambda: _sizes("8,x")),
    ("critical-ranks", lambda: branch_point(ranks=2)),
    ("critical-records", branch_point),
    ("critical-step", branch_of_own_step),
    (
        "critical-first",
        lambda: branch_point(loader={"clock": Timestamp().to_state(), "size": None}),
    ),
]
