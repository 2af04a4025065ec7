"""Batch sizes from your own functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast, final

from stretto.batching.policy import (
    BatchSizePolicy,
    Bound,
    Decision,
    FoundSize,
    Hold,
    PolicyState,
    Signals,
    Size,
    SizeLike,
    Tokens,
    checked_size,
    has_tokens,
    in_unit_of,
    is_auto,
    known_size,
)
from stretto.errors import BatchSizeError, shown
from stretto.schedules.fields import Interval, Timed, fill, name_of
from stretto.timing import Horizon, Time, Timestamp, TimeUnit
from stretto.timing.epochs import UnknownCountError, known_counts, unknown_counters
from stretto.timing.grammar import NAMES, whole

SizeCallable: TypeAlias = Callable[[Timestamp, Any], SizeLike]
"""`(timestamp, current) -> size`; before the first batch `current` is the given start, or None."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class SizeFunction(BatchSizePolicy):
    """Asks your function for the size: `function(timestamp, current) -> size`.

    It must be pure: a plan, a resumed run and all ranks must get the same sizes from it. To read
    wall time, or tokens that are not known before the run, write `planned=False`: the run then has
    no plan. By default, reading one of them is an error.

    >>> grow = SizeFunction(lambda timestamp, current: current * 2, 4, every="1ep")
    >>> bound = grow.bind(Horizon("2ep", dataset_num_samples=100))
    >>> bound.decide(Timestamp(), bound.start, Signals())[0]
    8

    Args:
        function: returns the size of the batch that starts at `timestamp`; `current` is the size
            before it.
        start: `current` for the first batch; by default, None.
        every: ask once in each such interval from the start of the run; by default, before every
            batch.
        planned: whether the sizes follow from the counts of epochs, batches and samples (and
            tokens if all samples have equally many), so that they are known before the run.
        in_tokens: whether the sizes are in tokens, as they are if `start` is.

    Raises:
        BatchSizeError: `function` cannot be called, `start` is not an integer of at least 1, or
            `every` has no length.
    """

    function: SizeCallable
    start: Size | None = None
    every: Interval | None = field(default=None, kw_only=True)
    planned: bool = field(default=True, kw_only=True)
    in_tokens: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_callable(self.function, "(timestamp, current) -> size")
        names: list[str] = []
        with suppress(TypeError, ValueError):  # a function in C need not tell its parameters
            names = list(inspect.signature(self.function).parameters)
        if names[:1] == ["epoch"]:
            raise BatchSizeError.cannot(
                f"ask {name_of(self.function)} for a batch size",
                why="a function that begins with 'epoch' returns an increment",
                instead="write IncreaseFunction(function, start, max_batch_size)",
            )
        BatchSizePolicy.__post_init__(self)
        fill(self, in_tokens=self.in_tokens or has_tokens(self.start))

    @property
    def unit(self) -> TimeUnit:
        """The unit of all its sizes: samples or tokens."""
        return TimeUnit.TOKEN if self.in_tokens else TimeUnit.SAMPLE

    def bind(self, horizon: Horizon) -> Bound:
        """Resolve `every` for one run."""
        if self.every is None:
            hidden = self._hidden(horizon)

            def decide(timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
                del signals
                size = self._asked(timestamp, state, hidden)
                return size, {"size": size}

            # It may always read samples.
            return self._bound(decide, TimeUnit.SAMPLE, {"size": self.start})
        every = Time(self.every)
        axis = horizon.axis(every.unit)
        ticks, hidden = horizon.ticks(every, axis), self._hidden(horizon, axis.unit)
        above, below = ticks.numerator, ticks.denominator

        def decide_once(timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
            del signals
            interval = axis.read(timestamp) * below // above
            if state["asked"] == interval:
                return state["size"], state
            size = self._asked(timestamp, state, hidden)
            return size, {"size": size, "asked": interval}

        def holds_until(timestamp: Timestamp, state: PolicyState) -> Hold:
            del state
            following = axis.read(timestamp) * below // above + 1
            return Hold(((axis, -(-following * above // below)),))

        start: PolicyState = {"size": self.start, "asked": None}
        return replace(self._bound(decide_once, axis.unit, start), holds_until=holds_until)

    def _bound(self, decide: Any, unit: TimeUnit, start: PolicyState) -> Bound:
        return Bound(
            decide=decide,
            start=start,
            is_static=self.planned and unit is not TimeUnit.SECOND,
            units=frozenset({unit}),
            reads=frozenset(),
            sizes=lambda state: (state["size"],),
        )

    def _hidden(self, horizon: Horizon, *units: TimeUnit) -> frozenset[str]:
        """Return the counters that the function must not read."""
        return unknown_counters(horizon, but=units) if self.planned else frozenset()

    def _asked(self, timestamp: Timestamp, state: PolicyState, hidden: frozenset[str]) -> int:
        """Return the size that the function gives, checked."""
        name = name_of(self.function)
        known = known_counts(timestamp, hidden) if hidden else timestamp
        try:
            size = self.function(known, state["size"])
            what = f"the batch size that {name} returned"
            return _in_unit(size, self.unit, what, f"write SizeFunction({name}, in_tokens=True)")
        except UnknownCountError as error:
            raise BatchSizeError.cannot(
                f"ask {name} for a batch size before the run",
                why=f"it reads {error.name!r}, which is known only during the run",
                instead=f"write SizeFunction({name}, planned=False)",
            ) from None


def _in_unit(value: object, unit: TimeUnit, what: str, instead: str) -> int:
    """Return a size of a user's function; one that states a unit must be in that of the policy."""
    size = checked_size(value, what)
    states = isinstance(value, (str, Time, Tokens))
    if states and has_tokens(size) != (unit is TimeUnit.TOKEN):
        why = f"the sizes of the policy are in {NAMES[unit]}"
        instead = "return tokens such as '64Ktok'" if unit is TimeUnit.TOKEN else instead
        raise BatchSizeError.cannot(f"use {shown(value)} as {what}", why=why, instead=instead)
    return int(size)


def check_callable(function: object, form: str) -> None:
    """Refuse what cannot be called."""
    if not callable(function):
        raise BatchSizeError.bad("function", function, "it is not a function", f"pass one: {form}")


NO_LIMIT = 2**31
"""Stands for a largest batch size that is not known yet."""
IncreaseCallable: TypeAlias = Callable[[int, Any], SizeLike | None]
"""`(epoch, current_batch_size) -> increment`; 0 or None for no increase."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class IncreaseFunction(BatchSizePolicy):
    """Asks your function once an epoch by how much to grow.

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
        function: returns the increment; 0 or None for none. It must be pure.
        start: the size that the first call gets.
        max_batch_size: the largest size that an increment may lead to; `"auto"`: the largest that
            fits into memory in a single pass on each rank, found by a `Trainer` before the run.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, `start` is above
            `max_batch_size`, or `function` cannot be called.
    """

    function: IncreaseCallable
    start: Size
    max_batch_size: FoundSize

    def __post_init__(self) -> None:
        check_callable(self.function, "(epoch, current_batch_size) -> increment")
        BatchSizePolicy.__post_init__(self)
        largest = self.max_batch_size
        if not is_auto(largest) and self.start > largest:
            why, instead = f"it is above max_batch_size={largest}", "write a smaller start"
            raise BatchSizeError.bad("start", self.start, why, instead)

    def bind(self, horizon: Horizon) -> Bound:
        """Return the policy on the epochs of one run.

        Raises:
            BatchSizeError: `max_batch_size` is still `"auto"`.
        """
        most = known_size(self.max_batch_size, "max_batch_size")
        epochs = horizon.axis(TimeUnit.EPOCH)

        def decide(timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
            del signals
            # The maximum of this run; it may have been resumed with another.
            size, asked = min(state["size"], most), state["epochs_asked"]
            # Under `carry` a batch may be longer than an epoch: each epoch is asked about.
            for epoch in range(asked, timestamp.epoch + 1):
                size = self._grown(epoch, size, most)
            return size, {"size": size, "epochs_asked": max(asked, timestamp.epoch + 1)}

        def holds_until(timestamp: Timestamp, state: PolicyState) -> Hold:
            del state
            return Hold(((epochs, int((timestamp.epoch + 1) * epochs.scale)),))

        return Bound(
            decide=decide,
            start={"size": self.start, "epochs_asked": 0},
            holds_until=holds_until,
            is_static=True,
            units=frozenset({TimeUnit.EPOCH}),
            sizes=lambda state: (state["size"],),
        )

    def _grown(self, epoch: int, size: int, most: int) -> int:
        increment = self.function(epoch, size)
        added = 0 if increment is None else whole(increment)
        if added != 0 and isinstance(increment, (str, Time, Tokens)):
            what = f"the increment that {name_of(self.function)} returned"
            instead = "write the start in tokens, too, such as '64Ktok'"
            added = _in_unit(increment, self.unit, what, instead)
        if added is None or added < 0:
            raise BatchSizeError.cannot(
                f"increase the batch size of {size} by {shown(increment)}",
                why="it is not an integer of at least 0",
                instead="return how much to add, 0 for nothing",
                where=f"{name_of(self.function)}({epoch}, {size})",
            )
        return size + added if size + added <= most else size


@final
@dataclass(frozen=True, slots=True, repr=False)
class AsManyAsFit(BatchSizePolicy):
    """As many samples as fit into memory in one pass on each rank. `batch_size="auto"` is this.

    A `Trainer` finds the number before the run. It is part of the policy's state, so that a resumed
    run keeps the number it began with.

    >>> from stretto.batching import as_policy
    >>> as_policy("auto"), with_maximum(AsManyAsFit(), 96)
    (AsManyAsFit(), AsManyAsFit(size=96))

    Args:
        size: samples of one optimizer step, over all ranks; `"auto"` until it is found.

    Raises:
        BatchSizeError: the size is not an integer of at least 1.
    """

    size: FoundSize = "auto"

    def bind(self, horizon: Horizon) -> Bound:
        """Return the constant.

        Raises:
            BatchSizeError: the size is still `"auto"`.
        """
        del horizon
        return Bound(
            decide=lambda _, state, __: (state["found"], state),
            start={"found": known_size(self.size, "batch_size")},
            holds_until=lambda _, __: Hold(),
            is_static=True,
            sizes=lambda state: (state["found"],),
        )


_FOUND = ("maximum", "max_batch_size", "size")


def awaits_maximum(value: BatchSizePolicy) -> bool:
    """Return whether a size of a policy, or of one inside it, is still to be found.

    >>> awaits_maximum(IncreaseFunction(lambda epoch, size: 8, 8, "auto"))
    True
    """
    return with_maximum(value, None) is not value


def with_maximum(policy: BatchSizePolicy, size: int | None) -> BatchSizePolicy:
    """Return a policy with numbers for the sizes that memory decides.

    >>> with_maximum(IncreaseFunction(max, 8, "auto"), 64)
    IncreaseFunction(max, 8, 64)

    Args:
        policy: the policy.
        size: what fits into memory in one pass on each rank, over all ranks. None: not known yet;
            then sizes grow without a limit, and one that is to be found is 1.

    Raises:
        BatchSizeError: it starts with a larger size.
    """

    def change(value: object) -> object:
        fields = getattr(value, "__dataclass_fields__", ()) if isinstance(value, Timed) else ()
        for name in _FOUND:
            if name in fields and is_auto(getattr(value, name)):
                unknown = 1 if isinstance(value, AsManyAsFit) else NO_LIMIT
                most = in_unit_of(getattr(value, "start", 1), size or unknown)
                return replace(value, **{name: most})  # type: ignore[type-var]
        return value.replaced(change) if isinstance(value, Timed) else value

    return cast(BatchSizePolicy, change(policy))


def as_asked(policy: BatchSizePolicy) -> BatchSizePolicy:
    """Return a policy without the numbers of samples that fitted when the run began.

    >>> as_asked(AsManyAsFit(96))
    AsManyAsFit()
    """

    def change(value: object) -> object:
        if isinstance(value, AsManyAsFit):
            return AsManyAsFit()
        return value.replaced(change) if isinstance(value, Timed) else value

    return cast(BatchSizePolicy, change(policy))
