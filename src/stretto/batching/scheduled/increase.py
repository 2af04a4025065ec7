"""`IncreaseFunction`: growth once an epoch, by a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast, final

from stretto.batching.policy import (
    BatchSizePolicy,
    BoundPolicy,
    Hold,
    PolicyState,
    Size,
    checked_size,
)
from stretto.batching.scheduled.functions import check_callable
from stretto.batching.signals import Signals
from stretto.batching.written import WAYS, written
from stretto.errors import BatchSizeError, shown
from stretto.schedules.fields import Timed, check_fields, fill, name_of
from stretto.timing import Axis, Horizon, Timestamp, TimeUnit
from stretto.timing.number import whole

IncreaseCallable: TypeAlias = Callable[[int, int], int | None]
"""`(epoch, current_batch_size) -> increment`; 0 or None for no increase."""


@written(WAYS, "increase", "function")
@final
@dataclass(frozen=True, slots=True, repr=False)
class IncreaseFunction(BatchSizePolicy):
    """Asks a function of yours once an epoch by how much to grow.

    Before the first batch of each epoch, the first one included, in order:
    `increment = function(epoch, current_batch_size)`, and
    `if increment and current_batch_size + increment <= max_batch_size`, it is added. An increment
    that does not fit is not applied at all, and the next epoch asks again. (This is
    `batch_increase_function` of the adaptive batching RFC of torchtune, pytorch/torchtune#2199.)

    >>> policy = IncreaseFunction(lambda epoch, size: size if epoch in (1, 2) else 0, 8, 20)
    >>> bound = policy.bind(Horizon("3ep", dataset_num_samples=100))
    >>> size, state = bound.decide(Timestamp(epoch=1), bound.start(), Signals())
    >>> size, bound.decide(Timestamp(epoch=2), state, Signals())[0]
    (16, 16)

    Args:
        function: gives the increment; 0 or None for none. It must be pure.
        start: the size that the first call sees.
        max_batch_size: the largest size that an increment may lead to; `"auto"`: what fits into
            memory in a single pass on each rank, which a `Trainer` finds before the run.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, `start` is above
            `max_batch_size`, or `function` cannot be called.
    """

    function: IncreaseCallable
    start: Size
    max_batch_size: int | Literal["auto"]

    def __post_init__(self) -> None:
        check_callable(self.function, "(epoch, current_batch_size) -> increment")
        check_fields(self)
        if self.max_batch_size == "auto":
            return
        largest = checked_size(self.max_batch_size, "max_batch_size")
        fill(self, max_batch_size=largest)
        if self.start > largest:
            raise BatchSizeError.cannot(
                f"start with a batch size of {self.start}",
                why=f"it is above max_batch_size={largest}",
                instead="write a smaller start or a larger max_batch_size",
            )

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Return the policy on the epochs of one run.

        Raises:
            BatchSizeError: the largest size is still to be found.
        """
        if self.max_batch_size == "auto":
            raise BatchSizeError.cannot(
                "say the batch sizes of a run with max_batch_size='auto'",
                why="the largest one is found when a Trainer begins",
                instead="write a number, such as what 'stretto find-batch-size' answers",
            )
        return BoundIncrease(self, self.max_batch_size, horizon.axis(TimeUnit.EPOCH))


@final
@dataclass(frozen=True, slots=True)
class BoundIncrease(BoundPolicy):
    """An increase function on one run; remembers the size and how many epochs were asked about."""

    policy: IncreaseFunction
    max_batch_size: int
    epochs: Axis

    @property
    def is_static(self) -> bool:
        """True: sizes follow from the epoch alone."""
        return True

    @property
    def units(self) -> frozenset[TimeUnit]:
        """Epochs."""
        return frozenset({TimeUnit.EPOCH})

    def start(self) -> PolicyState:
        """Return the starting size, with no epoch asked about."""
        return {"size": self.policy.start, "epochs_asked": 0}

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Return the size, after asking about each epoch that has begun since the last call."""
        del signals
        # The maximum of this run; it may have been resumed with another.
        size = min(cast(int, state["size"]), self.max_batch_size)
        asked_before = cast(int, state["epochs_asked"])
        if timestamp.epoch < asked_before:
            return size, {**state, "size": size}
        # Under `carry` a batch may be longer than an epoch: none is left out.
        for epoch in range(asked_before, timestamp.epoch + 1):
            size = self._grown(epoch, size)
        return size, {"size": size, "epochs_asked": timestamp.epoch + 1}

    def holds_until(self, timestamp: Timestamp, state: PolicyState) -> Hold:
        """Return a hold until the next epoch."""
        del state
        return Hold(((self.epochs, int((timestamp.epoch + 1) * self.epochs.scale)),))

    def _grown(self, epoch: int, size: int) -> int:
        increment = self.policy.function(epoch, size)
        if increment is None:
            return size
        added = whole(increment)
        if added is None or added < 0:
            raise BatchSizeError.cannot(
                f"increase the batch size of {size} by {shown(increment)}",
                why="it is not an integer of at least 0",
                instead="return how many samples to add, 0 for none",
                where=f"{name_of(self.policy.function)}({epoch}, {size})",
            )
        return size + added if size + added <= self.max_batch_size else size


def awaits_maximum(policy: BatchSizePolicy) -> bool:
    """Return whether a policy, or one inside it, has `max_batch_size="auto"`.

    >>> awaits_maximum(IncreaseFunction(lambda epoch, size: 8, 8, "auto"))
    True
    """
    return with_maximum(policy, 10**199) is not policy


def with_maximum(policy: BatchSizePolicy, size: int) -> BatchSizePolicy:
    """Return a policy with `size` in the place of each `max_batch_size="auto"`.

    >>> with_maximum(IncreaseFunction(max, 8, "auto"), 64)
    IncreaseFunction(max, 8, 64)

    Raises:
        BatchSizeError: it starts with a larger size.
    """

    def change(value: object) -> object:
        if isinstance(value, IncreaseFunction) and value.max_batch_size == "auto":
            return replace(value, max_batch_size=size)
        return value.replaced(change) if isinstance(value, Timed) else value

    return cast(BatchSizePolicy, change(policy))
