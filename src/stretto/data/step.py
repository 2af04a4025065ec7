"""`Step`: one optimizer step on this rank, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

from stretto.errors import DataError
from stretto.timing import Timestamp


# Not frozen, as `Step`.
@dataclass(slots=True)
class MicroBatch:
    """The input of one forward and backward pass on one rank.

    >>> MicroBatch(batch=[7, 8, 9], num_samples=3, num_tokens=0, weight=0.375).weight
    0.375
    """

    batch: Any
    """The collated samples."""
    num_samples: int
    """Its samples; 0 for a dummy."""
    num_tokens: int
    """Its tokens; 0 if tokens are not counted."""
    weight: float
    """The factor of its mean loss: `num_samples * world_size / step.num_samples`.

    Gradients summed over micro-batches and averaged over ranks are then those of the mean over the
    whole batch. 0 for a dummy, which keeps the ranks in step.
    """
    row: int = 1
    """How many samples are joined to each row of the batch."""

    @property
    def num_rows(self) -> int:
        """The first dimension of the batch: its samples, unless they are joined to rows."""
        return self.num_samples // self.row

    def __iter__(self) -> NoReturn:
        """Refuse: unpacking a micro-batch would lose its weight.

        Raises:
            DataError: always.
        """
        raise DataError.cannot(
            "unpack a micro-batch",
            why="its weight would be lost",
            instead="write 'inputs, targets = micro.batch', and multiply the loss by micro.weight",
        )


# Not frozen: that would cost 1 us per step, a tenth of the loader's time.
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
    """The clock before the step, at which schedules are read."""
    num_samples: int
    """Samples of the batch, over all ranks."""
    batch_size: int
    """The size that the policy decided; `num_samples` is smaller if the epoch or the run
    ends inside the batch. Learning rate rules use this one."""
    micro_batches: list[MicroBatch]
    """This rank's share."""
    around_dummy: Callable[[], AbstractContextManager[None]] | None = None
    """What iterating opens while a dummy is in use, so that it leaves the model's buffers alone."""
    values: Mapping[str, float] = field(default_factory=dict)
    """The values of your own at `timestamp`, by name: what `values` of the run says."""

    @property
    def local_num_samples(self) -> int:
        """Samples of this rank."""
        return sum(micro.num_samples for micro in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank; 0 if they are not counted."""
        return sum(micro.num_tokens for micro in self.micro_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches) if self.around_dummy is None else self._around()

    def _around(self) -> Iterator[MicroBatch]:
        assert self.around_dummy is not None, "checked"
        for micro in self.micro_batches:
            with nullcontext() if micro.weight else self.around_dummy():
                yield micro

    def __len__(self) -> int:
        return len(self.micro_batches)
