"""`Feed`: from batches that have been decided to the samples of one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

from stretto.batching import Split
from stretto.data.containers import mapped
from stretto.data.spec import DataSpec
from stretto.planning import StepPlan

_MOST_SHARES = 4096


Plans: TypeAlias = Iterator[tuple[StepPlan, int]]
"""What is decided for each batch, and the position at which it starts."""
Piece: TypeAlias = tuple[Any, int]
"""A micro-batch and its samples; 0 for a dummy, whose batch is one sample that does not count."""


class Draw(NamedTuple):
    """One batch, or, under `drop`, the rest of an epoch that was too small for one."""

    plan: StepPlan
    """What was decided."""
    pieces: list[Piece]
    """This rank's micro-batches; none where the batch is dropped."""
    size: int
    """Samples over all ranks; fewer than planned where data without a known size have ended."""
    crossings: tuple[int, ...] = ()
    """For data without a known size: how many of the batch's samples come after each end of an
    epoch in it."""


class Feed(ABC):
    """Reads the data for decided batches, in order."""

    @abstractmethod
    def draws(self, plans: Plans) -> Iterator[Draw]:
        """Yield this rank's part of each batch.

        A plan is taken from `plans` only when it is needed: where sizes are decided from
        measurements, that is when the batch is asked for.
        """


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Whose samples are read, and how many at once."""

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


def first_sample(spec: DataSpec, batch: Any, num_samples: int) -> Piece:
    """Return a dummy: one sample of a batch, that does not count."""
    return spec.take_samples(batch, slice(0, 1), num_samples), 0


def evenly(count: int, most: int | None) -> tuple[int, ...]:
    """Return sizes of at most `most` that add up to `count` and differ by at most one.

    >>> evenly(7, 3), evenly(7, None)
    ((3, 2, 2), (7,))
    """
    parts = 1 if most is None else -(-count // most)
    each, larger = divmod(count, parts)
    return (each + 1,) * larger + (each,) * (parts - larger)
