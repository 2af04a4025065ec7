"""Checkpoints on disk: whole or not there, verified when read, never unpickled."""

from stretto.checkpoint.folder import (
    Checkpoint,
    checkpoint_path,
    checkpoints,
    keep_newest,
    read_checkpoint,
    write_checkpoint,
)
from stretto.checkpoint.optimizer import pack_optimizer, unpack_optimizer

__all__ = [
    "Checkpoint",
    "checkpoint_path",
    "checkpoints",
    "keep_newest",
    "pack_optimizer",
    "read_checkpoint",
    "unpack_optimizer",
    "write_checkpoint",
]
