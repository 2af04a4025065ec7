"""`Feed`: reads one rank's samples of each decided batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias, final

from stretto.batching import Split
from stretto.data.containers import mapped
from stretto.data.spec import DataSpec
from stretto.planning import StepPlan

_MOST_SHARES = 4096


Plans: TypeAlias = Iterator[tuple[StepPlan, int]]
"""What is decided for each batch, and the position at which it starts."""
CountedBatch: TypeAlias = tuple[Any, int]
"""A collated batch and its number of samples; 0 for a dummy, which holds one sample."""


class FetchedStep(NamedTuple):
    """What one step reads. Under `drop`: the rest of an epoch that is too small for a batch."""

    plan: StepPlan
    """What was decided."""
    micro_batches: list[CountedBatch]
    """This rank's micro-batches; empty if the batch is dropped."""
    size: int
    """Samples over all ranks; fewer than planned if data of unknown size have ended."""
    crossings: tuple[int, ...] = ()
    """The batch's samples after each epoch end inside it; only for data of unknown size."""


class Feed(ABC):
    """Reads the data for decided batches, in order."""

    @abstractmethod
    def steps(self, plans: Plans) -> Iterator[FetchedStep]:
        """Yield this rank's part of each batch.

        It takes a plan from `plans` only when it needs it. If sizes follow measurements, that is
        when the loop asks for the batch.
        """


class Part(NamedTuple):
    """The rank whose samples are read, and how many are read at once."""

    rank: int
    world_size: int
    micro_batch_size: int | None


@final
class Shares:
    """The sizes of one rank's micro-batches in each batch; remembers them for repeated sizes.

    >>> Shares(Part(rank=1, world_size=2, micro_batch_size=2)).sizes(7, start=1)
    (2, 2)
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}

    def sizes(self, size: int, start: int) -> tuple[int, ...]:
        """Return this rank's micro-batches of the batch `[start, start + size)`; 0 for a dummy."""
        part = self._part
        key = size, start % part.world_size
        found = self._known.get(key)
        if found is None:
            split = Split(size, part.world_size, part.micro_batch_size, key[1])
            found = split.micro_batch_sizes(part.rank)
            if len(self._known) >= _MOST_SHARES:
                self._known.clear()
            self._known[key] = found
        return found


def pinned(batch: Any) -> Any:
    """Return a batch with its tensors in pinned memory."""
    return mapped(lambda tensor: tensor.pin_memory(), batch)


def first_sample(spec: DataSpec, batch: Any, num_samples: int) -> CountedBatch:
    """Return a dummy: one sample of a batch, with weight 0."""
    return spec.take_samples(batch, slice(0, 1), num_samples), 0


def evenly(count: int, most: int | None) -> tuple[int, ...]:
    """Return sizes of at most `most` that add up to `count` and differ by at most one.

    >>> evenly(7, 3), evenly(7, None)
    ((3, 2, 2), (7,))
    """
    parts = 1 if most is None else -(-count // most)
    each, larger = divmod(count, parts)
    return (each + 1,) * larger + (each,) * (parts - larger)
