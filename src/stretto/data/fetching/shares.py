"""What a loader reads for one step, and how a batch is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from stretto.batching import Split
from stretto.data.containers import mapped
from stretto.data.spec import DataSpec
from stretto.planning import StepPlan

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


Steps: TypeAlias = Callable[[Plans], Iterator[FetchedStep]]
"""Yields this rank's part of each batch, in order.

It takes a plan only when it needs it. If sizes follow measurements, that is when the loop asks for
the batch.
"""


class Part(NamedTuple):
    """The rank whose samples are read, and how many are read at once."""

    rank: int
    world_size: int
    micro_batch_size: int | None


def share_sizes(part: Part, size: int, start: int) -> tuple[int, ...]:
    """Return this rank's micro-batches of the batch `[start, start + size)`; 0 for a dummy.

    >>> share_sizes(Part(rank=1, world_size=2, micro_batch_size=2), 7, start=1)
    (2, 2)
    """
    return _share_sizes(part, size, start % part.world_size)


@lru_cache(maxsize=4096)  # sizes repeat
def _share_sizes(part: Part, size: int, start: int) -> tuple[int, ...]:
    split = Split(size, part.world_size, part.micro_batch_size, start)
    return split.micro_batch_sizes(part.rank)


def pinned(batch: Any) -> Any:
    """Return a batch with its tensors in pinned memory."""
    return mapped(lambda tensor: tensor.pin_memory(), batch)


def first_sample(spec: DataSpec, batch: Any, num_samples: int) -> CountedBatch:
    """Return a dummy: one sample of a batch, with weight 0."""
    return spec.take_samples(batch, slice(0, 1), num_samples), 0
