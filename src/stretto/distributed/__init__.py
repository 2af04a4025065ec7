"""The processes of a run: who they are, what they agree on, and how a model trains on them."""

from stretto.distributed.ranks import Ranks
from stretto.distributed.strategy import Ddp, FullyShard, Single, Strategy, shard_blocks

__all__ = ["Ddp", "FullyShard", "Ranks", "Single", "Strategy", "shard_blocks"]
