"""Train PyTorch models with a batch size that changes, on one exact clock.

This module is the flat public face: names only. A name is imported from its own module when it is
first asked for, so `import stretto` is quick and imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

# module -> the names it lends to the public face. To add a name, write it here and run
# `STRETTO_UPDATE_GOLDEN=1 pytest tests/test_public_face.py`, which rewrites `__init__.pyi` (what
# type checkers and editors read). Only names whose module exists.
_FACE = {
    "stretto.batching": (
        "AtLeast",
        "AtMost",
        "BatchSizePolicy",
        "BoundPolicy",
        "DoublingRamp",
        "Fixed",
        "FunctionRule",
        "Hold",
        "Hysteresis",
        "IncreaseFunction",
        "IncreaseInsteadOfDecay",
        "LearningRateRule",
        "LinearRamp",
        "LinearRule",
        "Monotone",
        "MultipleOf",
        "NoRule",
        "NoiseScale",
        "NormTest",
        "PeriodSizes",
        "Plateau",
        "PowerOfTwo",
        "Seesaw",
        "Signals",
        "SizeFunction",
        "Split",
        "SquareRootRule",
        "StagedRamp",
        "Steps",
        "rampup",
        "split",
    ),
    "stretto.data": (
        "DataSpec",
        "MicroBatch",
        "StepLoader",
        "sample_seed",
    ),
    "stretto.errors": (
        "BatchSizeError",
        "CheckpointError",
        "ConfigError",
        "ConversionError",
        "DataError",
        "FitError",
        "MissingPackageError",
        "PlanError",
        "ScheduleError",
        "StrettoError",
        "TimeError",
        "TrainingError",
        "UnitError",
    ),
    "stretto.memory": ("find_batch_size", "is_out_of_memory"),
    "stretto.noise": ("NoiseEstimator", "NoiseSums", "NoiseTerms", "noise_terms"),
    "stretto.optim": ("Hyperparameters", "from_torch"),
    "stretto.ordering": ("SampleOrder",),
    "stretto.planning": ("Plan", "plan"),
    "stretto.runtime": ("SupervisedStep", "TrainStep"),
    "stretto.schedules": (
        "Constant",
        "Cosine",
        "CosineRestarts",
        "Curve",
        "Custom",
        "Exponential",
        "InverseSqrt",
        "Linear",
        "MultiStep",
        "Periods",
        "Polynomial",
        "Product",
        "Rest",
        "Schedule",
        "Step",
        "WSD",
    ),
    "stretto.timing": (
        "At",
        "Every",
        "Horizon",
        "Time",
        "TimeUnit",
        "Timer",
        "Timestamp",
        "convert",
    ),
    "stretto.training": (
        "Callback",
        "Checkpointing",
        "Evaluation",
        "Loading",
        "Logger",
        "Logging",
        "MLflowLogger",
        "Run",
        "Stepping",
        "TensorBoardLogger",
        "Trainer",
        "WandbLogger",
        "shard_blocks",
    ),
}
_HOME = {name: module for module, names in _FACE.items() for name in names}

__all__ = sorted(_HOME)  # noqa: PLE0605 (ruff reads only literal lists; a test holds the rest)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}", name=name)
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
