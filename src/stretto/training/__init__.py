"""The Trainer: one readable loop, events, callbacks, metrics."""

from stretto.training.callback import Callback
from stretto.training.distributed.sharding import shard_blocks
from stretto.training.logs.loggers import (
    Logger,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from stretto.training.run import Run
from stretto.training.settings import Checkpointing, Evaluation, Loading, Logging, Stepping
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
    "shard_blocks",
]
