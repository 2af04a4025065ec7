"""The processes of a run: who they are, what they agree on, and how a model trains on them."""

from stretto.distributed.mesh import Mesh
from stretto.distributed.strategy import (
    Ddp,
    FullyShard,
    ModelParallel,
    Single,
    Strategy,
    shard_blocks,
)

__all__ = [
    "Ddp",
    "FullyShard",
    "Mesh",
    "ModelParallel",
    "Single",
    "Strategy",
    "shard_blocks",
]
