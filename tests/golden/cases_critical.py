"""What branches off a checkpoint cannot tell about the critical batch size."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from stretto.checkpoint import checkpoint_path, write_checkpoint
from stretto.cli.critical import _rule, _sizes
from stretto.config.branching import Trunk, _check_not_stopped
from stretto.config.run import RunConfig
from stretto.training.critical import Branch, CriticalBatchSize, check_branches, check_yardstick

CONFIG = RunConfig.parse(
    {
        "max_duration": "2ep",
        "model": {"target": "torch.nn:Identity"},
        "data": {"target": "stretto.examples.text:PythonDocs"},
        "optimizer": {"target": "torch.optim:SGD", "lr": 0.1},
        "batch_size": 8,
    }
)


def trunk(ranks: int = 1) -> object:
    """Branch off a checkpoint that is none of a run."""
    folder = Path(tempfile.mkdtemp())
    path = checkpoint_path(folder, sample=8)
    write_checkpoint(path, {}, {"epoch": 1})
    before = Path.cwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, {"WORLD_SIZE": str(ranks)}):
            return Trunk.at(CONFIG, Path(path.name))
    finally:
        os.chdir(before)


CASES: list[tuple[str, Callable[[], object]]] = [
    ("critical-sizes-one", lambda: check_branches([8], 1024, tolerance=0.01)),
    ("critical-sizes-order", lambda: check_branches([16, 8], 1024, tolerance=0.01)),
    ("critical-steps", lambda: check_branches([8, 512], 1024, tolerance=0.01)),
    ("critical-tolerance", lambda: check_branches([8, 16], 1024, tolerance=-0.01)),
    ("critical-yardstick", lambda: check_yardstick(Branch(8, 0, 9, 0.1, float("nan")), 8)),
    (
        "critical-seeds",
        lambda: CriticalBatchSize.of([Branch(8, 0, 1, 0.1, 2.0)], samples=64, tolerance=0.01),
    ),
    ("critical-rule", lambda: _rule("cubic")),
    ("critical-sizes-text", lambda: _sizes("8,x")),
    ("critical-ranks", lambda: trunk(ranks=2)),
    ("critical-records", trunk),
    ("critical-stopped", lambda: _check_not_stopped(SimpleNamespace(stop_reason="enough"))),  # type: ignore[arg-type]
]
