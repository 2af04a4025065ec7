"""The base of all layers: the step, random state, out-of-memory handling, state as JSON."""

from stretto.runtime.out_of_memory import attempt, is_out_of_memory, release_memory
from stretto.runtime.packing import PackingError, pack, unpack
from stretto.runtime.random_state import RandomState
from stretto.runtime.ranks import Ranks
from stretto.runtime.step import SupervisedStep, TrainStep

__all__ = [
    "PackingError",
    "RandomState",
    "Ranks",
    "SupervisedStep",
    "TrainStep",
    "attempt",
    "is_out_of_memory",
    "pack",
    "release_memory",
    "unpack",
]
