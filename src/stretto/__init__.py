"""Train PyTorch models with a batch size that changes, on one exact clock.

Here are the names that most programs need. All others are in submodules, such as
`stretto.schedules`. After `import stretto` you can use every submodule. A name or submodule is
imported when it is first used, so `import stretto` is quick and imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

# module -> its names that are here too. To add a name, write it here and run
# `STRETTO_UPDATE_GOLDEN=1 pytest tests/test_public_face.py`. That rewrites `__init__.pyi`, which
# type checkers and editors read.
_FACE = {
    "stretto.batching": (
        "AtMost",
        "BatchSizePolicy",
        "DoublingRamp",
        "LinearRamp",
        "LinearRule",
        "NoiseScale",
        "PiecewiseConstant",
        "Seesaw",
        "SquareRootRule",
    ),
    "stretto.data": (
        "DataSpec",
        "Step",
        "StepLoader",
        "count_lengths",
    ),
    "stretto.errors": ("StrettoError",),
    "stretto.memory": (
        "Answer",
        "find_batch_size",
    ),
    "stretto.optim": ("Hyperparameters",),
    "stretto.planning": (
        "Plan",
        "plan",
    ),
    "stretto.runtime": (
        "SupervisedStep",
        "TrainStep",
    ),
    "stretto.schedules": (
        "Cosine",
        "Linear",
        "Schedule",
        "WSD",
    ),
    "stretto.timing": (
        "At",
        "Every",
        "Horizon",
        "Time",
        "Timestamp",
        "Trigger",
        "convert",
    ),
    "stretto.training": (
        "Callback",
        "Checkpointing",
        "Evaluation",
        "Loading",
        "Logger",
        "Logging",
        "Run",
        "Stepping",
        "Trainer",
        "prepare",
    ),
}
_HOME = {name: module for module, names in _FACE.items() for name in names}

# submodules that users import from
_MODULES = (
    "batching",
    "checkpoint",
    "data",
    "distributed",
    "errors",
    "integrations",
    "memory",
    "noise",
    "optim",
    "ordering",
    "planning",
    "report",
    "runtime",
    "schedules",
    "timing",
    "training",
)

__all__ = sorted(_HOME)  # noqa: PLE0605 (ruff reads only literal lists; a test checks the rest)


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"stretto.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}", name=name)
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]
