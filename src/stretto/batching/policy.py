"""What a batch size policy is: a pure function of the clock, its own state and the signals."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast, final

from stretto.errors import BatchSizeError, Text, cannot, shown
from stretto.timing import Axis, Horizon, Time, Timestamp, TimeUnit
from stretto.timing.conversion import rounded
from stretto.timing.number import exact, whole
from stretto.timing.time import Number

PolicyState: TypeAlias = Mapping[str, "int | float | str | PolicyState | None"]
"""What a policy remembers: a small record that JSON keeps exactly. Never edited, only replaced."""


_TOO_LARGE = 10**200
"""More than any count has that a plan can be made of; a longer one makes work and long messages."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What the last step measured; None where it measured nothing.

    Any value may be nan or infinite: a policy must answer all the same.

    >>> Signals(loss=2.5).metric is None
    True

    Raises:
        BatchSizeError: a value is not a number.
    """

    loss: float | None = None
    """The mean loss of the last batch."""
    metric: float | None = None
    """The metric of the last evaluation, if there was one since the last batch."""
    noise_numerator: float | None = None
    """An unbiased estimate of tr(Sigma), the variance of a sample's gradient."""
    noise_denominator: float | None = None
    """An unbiased estimate of |G|^2, the squared norm of the true gradient."""
    num_samples: float | None = None
    """How many samples that batch had, by which its noise counts beside that of others; left out,
    the loader fills it in."""

    def __post_init__(self) -> None:
        # numpy's numbers and tensors count as they would, and would not go into a checkpoint.
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and type(value) is not float:
                object.__setattr__(self, name, _as_signal(name, value))


def as_float(value: float) -> float:
    """Return a number of any library as a float; one that is too large for it is infinite.

    >>> as_float(3), as_float(-(10**400))
    (3.0, -inf)
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _as_signal(name: str, value: object) -> float:
    try:
        return as_float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements
        raise BatchSizeError(
            cannot(
                f"decide by the signal {name}={shown(value)}",
                why="it is not a number",
                instead="pass a number, or leave it out where nothing was measured",
            )
        ) from None


NO_SIGNALS = Signals()
"""Nothing was measured: what a static policy, which ignores signals, is given."""


@final
@dataclass(frozen=True, slots=True)
class Hold:
    """For how long a size stays as it is: until any of its limits is reached.

    A limit is a counter of the clock and the tick at which the hold is over, so the size is that
    of every batch that *starts* at a smaller tick. No limits: to the end of the run.

    >>> axis = Horizon("100sp").axis("sp")
    >>> Hold(((axis, 40),)).covers(Timestamp(sample=39))
    True
    """

    limits: tuple[tuple[Axis, int], ...] = ()

    def covers(self, timestamp: Timestamp) -> bool:
        """Return whether a batch that starts at `timestamp` is still in the hold."""
        return all(axis.read(timestamp) < tick for axis, tick in self.limits)

    def __and__(self, other: Hold) -> Hold:
        """Return the hold that ends when the first of the two does."""
        return Hold(self.limits + other.limits)


class BoundPolicy(ABC):
    """A policy on one run, with all its times resolved.

    It is pure: the caller keeps the state and passes it in, so a checkpoint holds the state and
    nothing else, and every rank that sees the same arguments decides the same.

    >>> from stretto import Horizon, Steps, Timestamp
    >>> bound = Steps("0sp:8 100sp:16").bind(Horizon("1ep", dataset_num_samples=1000))
    >>> size, state = bound.decide(Timestamp(sample=100), bound.start(), Signals())
    >>> size
    16
    """

    __slots__ = ()

    @property
    @abstractmethod
    def is_static(self) -> bool:
        """Whether sizes follow from counts alone, without signals and wall time."""

    @property
    @abstractmethod
    def units(self) -> frozenset[TimeUnit]:
        """The units that it reads from the clock."""

    @property
    def reads(self) -> frozenset[str]:
        """The signals that it reads: only those are measured.

        `"loss"`, `"noise"` (all that belongs to it), or the name of a metric, such as
        `"validation/loss"`. Unless a policy says otherwise, one that is not static reads the loss.
        """
        return frozenset() if self.is_static else frozenset({"loss"})

    @property
    def is_coupled(self) -> bool:
        """Whether a schedule goes by these sizes, so that nothing may change them."""
        return False

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The least and the largest size that it may decide; None, unless a policy knows them."""
        return None

    def inside(self, state: PolicyState) -> tuple[BoundPolicy, PolicyState] | None:
        """Return the policy inside that decides now, and its part of the state; None: no other."""
        del state
        return None

    @abstractmethod
    def start(self) -> PolicyState:
        """Return the state before the first batch."""

    def accepts(self, state: PolicyState) -> bool:
        """Return whether a saved `state` is one that this policy may have kept.

        Unless a policy says otherwise, one that has the fields of `start()`.
        """
        return _fields(state) == _fields(self.start())

    def told(self, state: PolicyState) -> Mapping[str, float]:
        """Return what the last decision went by, for a line of metrics.

        Nothing, unless a policy says otherwise.
        """
        del state
        return {}

    @abstractmethod
    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Return the size of the batch that starts at `timestamp`, and the state after deciding.

        Called once for each batch, in order. The size is at least 1 whatever the signals are.
        """

    def holds_until(self, timestamp: Timestamp, state: PolicyState) -> Hold | None:
        """Return for how long the decision just made at `timestamp` stands.

        `state` is the state that `decide` returned there. For every batch that starts later and
        is covered by the hold, `decide` would return the same size and the same state, so it need
        not be called. None: it stands for this batch only, as it does unless a policy knows better.
        """
        del timestamp, state
        return None


class BatchSizePolicy(ABC):
    """How many samples, over all ranks, each optimizer step takes. A frozen value.

    >>> from stretto import LinearRamp
    >>> ramp = LinearRamp(8, 64, "1ep")
    >>> isinstance(ramp, BatchSizePolicy), ramp.times()
    (True, (Time('1ep'),))
    """

    __slots__ = ()

    @abstractmethod
    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Resolve every time for one run.

        Raises:
            ConversionError: a time needs a fact that is not known.
            BatchSizeError: the times are out of order on this run.
        """

    def scaled(self, ratio: Number) -> BatchSizePolicy:
        """Return the policy with every time that is not a fraction of the run stretched.

        Batches, samples and tokens are rounded up to whole ones: half of 5ba is 3ba.
        One that has no times stays as it is; one that has times says how.

        Raises:
            BatchSizeError: it has times, and the ratio is not positive or it does not say how.
        """
        if self.times():
            raise BatchSizeError(
                cannot(
                    f"stretch {self!r} by {ratio}",
                    why="it has times, and does not say what becomes of them",
                    instead=f"define scaled(self, ratio) in {type(self).__name__}",
                )
            )
        return self

    def times(self) -> tuple[Time, ...]:
        """Return every time that it is written with; none, unless a policy says otherwise."""
        return ()

    @property
    def is_coupled(self) -> bool:
        """Whether a schedule goes by these sizes, so that nothing may change them."""
        return False

    def cautions(self, horizon: Horizon, largest: int) -> tuple[str, ...]:  # noqa: ARG002
        """Return what may not be meant, a line each, on a run whose largest batch is `largest`.

        A plan tells it; nothing, unless a policy knows better.
        """
        return ()


class TimedPolicy(BoundPolicy):
    """A bound policy that is a function of the time alone: no state, no signals."""

    __slots__ = ()

    @property
    @final
    def is_static(self) -> bool:
        """Whether sizes follow from counts: not where they follow the wall clock."""
        return TimeUnit.SECOND not in self.units

    @property
    @final
    def reads(self) -> frozenset[str]:
        """No signal."""
        return frozenset()

    @final
    def start(self) -> PolicyState:
        """Return the empty state."""
        return {}

    @final
    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Return the size at `timestamp`."""
        del signals
        return self.size_at(timestamp), state

    @abstractmethod
    def size_at(self, timestamp: Timestamp) -> int:
        """Return the size of a batch that starts at `timestamp`."""


def checked_size(
    value: object,
    what: str = "a batch size",
    *,
    instead: Text = "write a number of samples such as 128",
) -> int:
    """Return `value` as an int, if it is a whole number of samples of at least 1.

    >>> checked_size(32)
    32

    Raises:
        BatchSizeError: it is anything else, or has more than 200 digits; floats and booleans
            are never converted.
    """
    size = whole(value)
    is_large = size is not None and size >= _TOO_LARGE
    if size is None or size < 1 or is_large:
        raise BatchSizeError(
            cannot(
                f"use {shown(value)} as {what}",
                why="it has more than 200 digits"
                if is_large
                else "it is not an integer of at least 1",
                instead=instead,
            )
        )
    return size


def checked_world_size(value: object) -> int:
    """Return `value` as an int, if it is a whole number of ranks of at least 1.

    Raises:
        BatchSizeError: it is anything else.
    """
    return checked_size(value, "a world size", instead="write a number of ranks such as 8")


def stretched(time: Time, ratio: Number) -> Time:
    """Return `time` stretched, rounded up to whole counts; fractions of the run stay as they are.

    >>> stretched(Time("5ba"), 0.5)
    Time('3ba')
    """
    if time.unit is TimeUnit.DURATION:
        return time
    factor = exact(ratio)
    if factor <= 0:
        raise BatchSizeError(
            cannot(
                f"stretch the times of a batch size policy by {ratio}",
                why="it is not positive",
                instead="write a ratio such as 0.5",
            )
        )
    return rounded(time.amount * factor, time.unit)


def inner_state(state: PolicyState) -> PolicyState:
    """Return the state of the policy that a wrapper holds."""
    return cast(PolicyState, state["inner"])


def _fields(state: object) -> object:
    if not isinstance(state, Mapping):
        return None
    return {name: _fields(one) for name, one in state.items()}
