"""Batch sizes from functions of yours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, cast, final

from stretto.batching.policy import (
    BatchSizePolicy,
    Bound,
    Hold,
    PolicyState,
    Signals,
    Size,
    checked_size,
)
from stretto.errors import Argument, BatchSizeError, shown
from stretto.schedules.fields import Interval, Timed, check_fields, fill, name_of
from stretto.timing import Axis, Horizon, Time, Timestamp, TimeUnit
from stretto.timing.epochs import KnownCounts, UnknownCountError, unknown_counters
from stretto.timing.grammar import whole

SizeCallable: TypeAlias = Callable[[Timestamp, int | None], int]
"""`(timestamp, current) -> size`; before the first batch `current` is the given start, or None."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class SizeFunction(BatchSizePolicy):
    """Asks a function of yours for the size: `function(timestamp, current) -> size`.

    It must be pure: the same arguments give the same size, or a plan, a resumed run and the other
    ranks come to other sizes. Only without a plan may it look at wall time, or at tokens that
    the data cannot count beforehand: say `planned=False`. Else reading one of them is an error.

    >>> grow = SizeFunction(lambda timestamp, current: current * 2, 4, every="1ep")
    >>> bound = grow.bind(Horizon("2ep", dataset_num_samples=100))
    >>> bound.decide(Timestamp(), bound.start, Signals())[0]
    8

    Args:
        function: gives the size of the batch that starts at `timestamp`; `current` is the size
            before it.
        start: what `current` is for the first batch; left out, None.
        every: ask only when another such time has passed, counted from the start of the run;
            left out, before every batch.
        planned: whether the sizes follow from the counts of epochs, batches and samples (and
            tokens where each sample has equally many), so that they are known before the run.

    Raises:
        BatchSizeError: `function` cannot be called, or its first parameter is `epoch`, as that of
            an `IncreaseFunction`; `start` is not an integer of at least 1; or `every` has no
            length.
    """

    function: SizeCallable
    start: Size | None = None
    every: Interval | None = field(default=None, kw_only=True)
    planned: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_callable(self.function, "(timestamp, current) -> size")
        _check_no_increments(self.function)
        check_fields(self)

    def bind(self, horizon: Horizon) -> Bound:
        """Resolve `every` for one run."""
        if self.every is None:
            return AskedFunction(self, self._hidden(horizon)).bound
        every = Time(self.every)
        axis = horizon.axis(every.unit)
        ticks = horizon.ticks(every, axis)
        hidden = self._hidden(horizon, axis.unit)
        return AskedFunction(self, hidden, axis, ticks.numerator, ticks.denominator).bound

    def _hidden(self, horizon: Horizon, *units: TimeUnit) -> frozenset[str]:
        """The counters that the function must not read."""
        return unknown_counters(horizon, but=units) if self.planned else frozenset()


@final
@dataclass(frozen=True, slots=True)
class AskedFunction:
    """A function on one run, asked before every batch or once in each interval of a counter."""

    policy: SizeFunction
    hidden: frozenset[str]
    axis: Axis | None = None
    """The counter; None: every batch."""
    above: int = 1
    """The ticks of an interval, as `above / below`."""
    below: int = 1

    @property
    def bound(self) -> Bound:
        """The policy. Without a counter it reads samples, which a function can always read."""
        units = frozenset({TimeUnit.SAMPLE if self.axis is None else self.axis.unit})
        size: PolicyState = {"size": self.policy.start}
        return Bound(
            decide=self.decide,
            start=size if self.axis is None else {**size, "asked": None},
            holds_until=self.holds_until,
            is_static=self.policy.planned and TimeUnit.SECOND not in units,
            units=units,
            reads=frozenset(),
            sizes=lambda state: (state["size"],),
        )

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Ask the function; on a counter, once an interval."""
        del signals
        interval = self._interval(timestamp)
        if interval is not None and state["asked"] == interval:
            return cast(int, state["size"]), state
        size = asked(self.policy.function, timestamp, state, self.hidden)
        return size, {"size": size} if interval is None else {"size": size, "asked": interval}

    def holds_until(self, timestamp: Timestamp, state: PolicyState) -> Hold | None:
        """Return a hold until the next interval; None if every batch is asked about."""
        del state
        interval = self._interval(timestamp)
        if self.axis is None or interval is None:
            return None
        return Hold(((self.axis, -(-(interval + 1) * self.above // self.below)),))

    def _interval(self, timestamp: Timestamp) -> int | None:
        return None if self.axis is None else self.axis.read(timestamp) * self.below // self.above


def asked(
    function: SizeCallable, timestamp: Timestamp, state: PolicyState, hidden: frozenset[str]
) -> int:
    """Return the size that `function` gives, checked; it must not read counters in `hidden`."""
    known = KnownCounts.of(timestamp, hidden) if hidden else timestamp
    try:
        size = function(known, cast("int | None", state["size"]))
    except UnknownCountError as error:
        unplanned = f"SizeFunction({name_of(function)}, planned=False)"
        raise BatchSizeError.cannot(
            f"ask {name_of(function)} for a batch size before the run",
            why=f"it reads {error.name!r}, which only the run knows",
            instead=("write ", Argument("planned", value=False, python=unplanned)),
        ) from None
    return checked_size(
        size,
        f"the batch size that {name_of(function)} returned",
        instead=(
            "return a size such as 128; if it returns increments, write ",
            _increase(function),
        ),
    )


def _check_no_increments(function: SizeCallable) -> None:
    """Refuse a function whose parameters say that it returns increments."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function in C need not say
        return
    if names[:1] == ["epoch"]:
        raise BatchSizeError.cannot(
            f"ask {name_of(function)}({', '.join(names)}) for a batch size",
            why="a function that begins with 'epoch' returns an increment; one that returns "
            "a size takes (timestamp, current)",
            instead=("write ", _increase(function)),
        )


def _increase(function: SizeCallable) -> Argument:
    return Argument(
        "increase",
        "{target: ...} with start: 32 and max_batch_size: 256",
        python=f"IncreaseFunction({name_of(function)}, start=32, max_batch_size=256)",
    )


def check_callable(function: object, form: str) -> None:
    """Refuse what cannot be called."""
    if not callable(function):
        raise BatchSizeError.cannot(
            f"ask {shown(function)} for a batch size",
            why="it is not a function",
            instead=f"pass a function {form}",
        )


IncreaseCallable: TypeAlias = Callable[[int, int], int | None]
"""`(epoch, current_batch_size) -> increment`; 0 or None for no increase."""


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
    >>> size, state = bound.decide(Timestamp(epoch=1), bound.start, Signals())
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

    def bind(self, horizon: Horizon) -> Bound:
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
        return AskedIncrease(self, self.max_batch_size, horizon.axis(TimeUnit.EPOCH)).bound


@final
@dataclass(frozen=True, slots=True)
class AskedIncrease:
    """An increase function on one run; remembers the size and how many epochs were asked about."""

    policy: IncreaseFunction
    max_batch_size: int
    epochs: Axis

    @property
    def bound(self) -> Bound:
        """The policy."""
        return Bound(
            decide=self.decide,
            start={"size": self.policy.start, "epochs_asked": 0},
            holds_until=self.holds_until,
            is_static=True,
            units=frozenset({TimeUnit.EPOCH}),
            sizes=lambda state: (state["size"],),
        )

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
