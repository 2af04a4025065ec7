"""Checkpoints on disk: atomic, verified when read, never unpickled."""

from stretto.checkpoint.folder import (
    Store,
    UrlStore,
    checkpoint_path,
    checkpoints,
    keep,
    latest_good,
)
from stretto.checkpoint.formats import export_weights
from stretto.checkpoint.optimizer import pack_optimizer, unpack_optimizer
from stretto.checkpoint.reading import (
    Checkpoint,
    CheckpointReader,
    Description,
    describe,
    load_weights,
    open_checkpoint,
    read_checkpoint,
)
from stretto.checkpoint.sharding import Shard
from stretto.checkpoint.writing import write_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointReader",
    "Description",
    "Shard",
    "Store",
    "UrlStore",
    "checkpoint_path",
    "checkpoints",
    "describe",
    "export_weights",
    "keep",
    "latest_good",
    "load_weights",
    "open_checkpoint",
    "pack_optimizer",
    "read_checkpoint",
    "unpack_optimizer",
    "write_checkpoint",
]
