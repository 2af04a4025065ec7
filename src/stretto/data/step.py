"""`Step` and `MicroBatch`: one optimizer step on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, final

from stretto.errors import DataError, cannot
from stretto.timing import Timestamp


# Not frozen, as `Step`.
@final
@dataclass(slots=True)
class MicroBatch:
    """What one forward and backward pass on one rank takes.

    >>> MicroBatch(batch=[7, 8, 9], num_samples=3, num_tokens=0, weight=0.375).weight
    0.375
    """

    batch: Any
    """The collated samples."""
    num_samples: int
    """How many samples it stands for; 0 for a dummy."""
    num_tokens: int
    """How many tokens it stands for; 0 where tokens are not counted."""
    weight: float
    """What its mean loss is multiplied by: `num_samples * world_size / size of the step`.

    Then gradients, summed over micro-batches and averaged over ranks, are those of the mean over
    the whole batch. 0 for a dummy, which only keeps the ranks in step.
    """

    def __iter__(self) -> NoReturn:
        """Refuse: a micro-batch has a weight, too, which must not be overlooked.

        Raises:
            DataError: always.
        """
        raise DataError(
            cannot(
                "unpack a micro-batch",
                why="the samples are one part of it, beside their weight",
                instead="write 'inputs, targets = micro.batch', and multiply the loss by "
                "micro.weight",
            )
        )


# Not frozen: that costs a microsecond for each step, a tenth of all that is spent on it here.
@final
@dataclass(slots=True, eq=False)
class Step:
    """One optimizer step on this rank; iterates over its micro-batches.

    All ranks have the same number of micro-batches.

    >>> step = Step(Timestamp(), 3, 4, [MicroBatch([7, 8, 9], 3, 0, 1.0)])
    >>> [micro.num_samples for micro in step]
    [3]
    """

    timestamp: Timestamp
    """The clock before the step: schedules are read at it."""
    size: int
    """Samples of the batch, over all ranks."""
    batch_size: int
    """The size that the policy decided; `size` is smaller where the epoch or the run ends inside
    the batch. Learning rate rules go by this one."""
    micro_batches: list[MicroBatch]
    """This rank's share."""

    @property
    def num_samples(self) -> int:
        """Samples of this rank."""
        return sum(micro.num_samples for micro in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank; 0 where they are not counted."""
        return sum(micro.num_tokens for micro in self.micro_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)
