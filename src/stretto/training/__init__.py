"""The Trainer: one readable loop, events, callbacks, metrics."""

from stretto.run import Run, prepare
from stretto.settings import Checkpointing, Loading, Stepping
from stretto.training.callback import Callback
from stretto.training.logs.loggers import (
    Logger,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from stretto.training.settings import Evaluation, Logging
from stretto.training.trainer import Trainer

__all__ = [
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
    "prepare",
]
