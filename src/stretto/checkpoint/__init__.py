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
from stretto.checkpoint.sharding import Part, Shard, Stored, is_sharded, shard_like, to_shard

__all__ = [
    "Checkpoint",
    "Part",
    "Shard",
    "Stored",
    "checkpoint_path",
    "checkpoints",
    "is_sharded",
    "keep_newest",
    "pack_optimizer",
    "read_checkpoint",
    "shard_like",
    "to_shard",
    "unpack_optimizer",
    "write_checkpoint",
]
