"""Checkpoints on disk: atomic, verified when read, never unpickled."""

from stretto.checkpoint.folder import (
    Store,
    UrlStore,
    checkpoint_path,
    checkpoints,
    keep,
    latest_good,
)
from stretto.checkpoint.formats import export_weights, load_dcp_weights
from stretto.checkpoint.optimizer import pack_optimizer, unpack_optimizer
from stretto.checkpoint.reading import (
    Checkpoint,
    CheckpointReader,
    Description,
    TensorGroup,
    describe,
    load_weights,
    open_checkpoint,
    read_checkpoint,
)
from stretto.checkpoint.sharding import Box, HostCopies, LazyTensor, Shard, shard_like, to_shard
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
    "Box",
    "Shard",
    "LazyTensor",
    "TensorGroup",
    "Store",
    "UrlStore",
    "abandon_checkpoint",
    "begin_checkpoint",
    "checkpoint_path",
    "checkpoints",
    "describe",
    "encode_records",
    "export_weights",
    "finish_checkpoint",
    "keep",
    "load_dcp_weights",
    "load_weights",
    "latest_good",
    "open_checkpoint",
    "pack_optimizer",
    "read_checkpoint",
    "shard_like",
    "to_shard",
    "unpack_optimizer",
    "write_checkpoint",
    "write_part",
]
