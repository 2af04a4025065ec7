"""Checkpoints on disk: atomic, verified when read, never unpickled."""

from stretto.checkpoint.description import Description, TensorGroup, describe
from stretto.checkpoint.folder import (
    candidates,
    checkpoint_path,
    checkpoints,
    find_newest,
    keep,
    latest_good,
    position,
)
from stretto.checkpoint.optimizer import pack_optimizer, unpack_optimizer
from stretto.checkpoint.reading import (
    Checkpoint,
    CheckpointReader,
    open_checkpoint,
    read_checkpoint,
)
from stretto.checkpoint.sharding import (
    LazyTensor,
    Shard,
    TensorSlice,
    is_dtensor,
    is_sharded,
    shard_like,
    to_shard,
)
from stretto.checkpoint.staging import HostCopies, Staged, Tensors
from stretto.checkpoint.writing import (
    abandon_checkpoint,
    begin_checkpoint,
    encode_records,
    finish_checkpoint,
    write_checkpoint,
    write_part,
)

__all__ = [
    "Checkpoint",
    "CheckpointReader",
    "Description",
    "HostCopies",
    "TensorSlice",
    "Shard",
    "Staged",
    "LazyTensor",
    "TensorGroup",
    "Tensors",
    "abandon_checkpoint",
    "begin_checkpoint",
    "candidates",
    "checkpoint_path",
    "checkpoints",
    "describe",
    "encode_records",
    "find_newest",
    "finish_checkpoint",
    "is_sharded",
    "is_dtensor",
    "keep",
    "latest_good",
    "open_checkpoint",
    "pack_optimizer",
    "position",
    "read_checkpoint",
    "shard_like",
    "to_shard",
    "unpack_optimizer",
    "write_checkpoint",
    "write_part",
]
