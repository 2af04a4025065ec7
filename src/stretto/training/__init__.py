"""The Trainer: one readable loop, events, callbacks, metrics."""

from stretto.training.callback import Callback
from stretto.training.critical import Branch, CriticalBatchSize
from stretto.training.loggers import (
    JsonLinesLogger,
    MetricLogger,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from stretto.training.settings import Checkpointing, Evaluation, Loading, Logging, Stepping
from stretto.training.sharding import shard_blocks
from stretto.training.trainer import Trainer

__all__ = [
    "Branch",
    "Callback",
    "Checkpointing",
    "CriticalBatchSize",
    "Evaluation",
    "JsonLinesLogger",
    "Loading",
    "Logging",
    "MLflowLogger",
    "MetricLogger",
    "Stepping",
    "TensorBoardLogger",
    "Trainer",
    "WandbLogger",
    "shard_blocks",
]
