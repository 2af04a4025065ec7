"""Batch size policies, what they return when bound, and the signals that they read."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import filterfalse
from typing import Annotated, Any, Self, TypeAlias, final

from stretto.errors import BatchSizeError, TimeError, samples_text, shown
from stretto.schedules.fields import (
    Check,
    Timed,
    check_fields,
    checks_of,
    fill,
    number_field,
    values_of,
)
from stretto.timing import Axis, Horizon, Time, Timestamp, TimeUnit
from stretto.timing.batches import Batches, EqualBatches, TokenBatches
from stretto.timing.grammar import NAMES, as_float, whole
from stretto.timing.time import Number


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The measurements of the last step; None for missing ones.

    Any value may be nan or infinite: a policy must still decide.

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
    """The samples of that batch, the weight of its noise. By default, the loader fills it in."""
    cost_ratio: float | None = None
    """How many samples cost as much as a step without any (`a / b` of `StepCost`)."""

    def __post_init__(self) -> None:
        # NumPy numbers and tensors become floats: a checkpoint could not store them.
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and type(value) is not float:
                object.__setattr__(self, name, _as_signal(name, value))


def _as_signal(name: str, value: object) -> float:
    try:
        return as_float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements
        instead = "pass a number, or leave it out if nothing was measured"
        raise BatchSizeError.bad(name, value, "it is not a number", instead) from None


NO_SIGNALS = Signals()
"""No measurement: the input of static policies, which ignore signals."""


PolicyState: TypeAlias = Mapping[str, Any]
"""The state of a policy: a small record that JSON keeps exactly. Replaced, never edited."""


@final
class Tokens(int):
    """A batch size as an amount in tokens. An `int` that prints as it is written.

    Numbers computed from it are plain integers.

    >>> checked_size("64Ktok"), isinstance(checked_size("64Ktok"), Tokens)
    ('64Ktok', True)
    """

    __slots__ = ()

    def __str__(self) -> str:
        return str(Time(int(self), TimeUnit.TOKEN))

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, spec: str, /) -> str:
        # With the separators of a number, it is one for people: f"{size:,}".
        return str(self) if spec in ("", ",") else int.__format__(self, spec)


def whole_size(horizon: Horizon, position: int, size: int) -> int:
    """Return the samples of a batch of a decided size, whatever end of an epoch is inside it.

    >>> whole_size(Horizon("1ep", tokens_per_sample=4), 16, Tokens(35))
    8
    """
    if not isinstance(size, Tokens):
        return size
    if horizon.lengths is None:
        each = horizon.tokens_per_sample
        return 1 if each is None else max(1, size // each)  # one at least, if only reading tells
    return horizon.lengths.count(position, size)


def batches_of(horizon: Horizon, first: Timestamp, size: int) -> Batches:
    """Return batches of a decided size from a timestamp on.

    >>> batches_of(Horizon("1ep", dataset_num_samples=20), Timestamp(), 8).position(1)
    8
    """
    if isinstance(size, Tokens) and horizon.lengths is not None:
        return TokenBatches(horizon, first, size)
    return EqualBatches(horizon, first, whole_size(horizon, first.sample, size))


def is_same(size: int, other: int) -> bool:
    """Return whether two sizes are the same number of the same unit."""
    return size == other and isinstance(size, Tokens) is isinstance(other, Tokens)


def size_text(size: int) -> str:
    """Return a number of samples in words, or an amount in tokens.

    >>> size_text(2048), size_text(checked_size("64Ktok"))
    ('2,048 samples', '64Ktok')
    """
    return str(size) if isinstance(size, Tokens) else samples_text(size)


def saved_size(size: int | None) -> int | str | None:
    """Return a size as JSON keeps it with its unit: an amount in tokens as text.

    >>> saved_size(Tokens(2000)), saved_size(2000)
    ('2000tok', 2000)
    """
    return str(size) if isinstance(size, Tokens) else size


def in_unit_of(size: int | None, number: int) -> int:
    """Return a number in the unit of a size: as `Tokens` if that is one of them.

    >>> in_unit_of(Tokens(8), 16), in_unit_of(8, 16)
    ('16tok', 16)
    """
    return Tokens(number) if isinstance(size, Tokens) else number


Decision: TypeAlias = tuple[int, PolicyState]
"""The size of a batch, and the state after deciding it."""

_TOO_LARGE = 10**200
"""Larger than any batch size in a plan; longer numbers only cost time and long messages."""


@final
@dataclass(frozen=True, slots=True)
class Hold:
    """How long a size stays: until any of its limits is reached.

    A limit is a counter of the clock and the tick at which the hold ends, so every batch that
    *starts* at a smaller tick has this size. Without limits it lasts to the end of the run.

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


PolicyHold: TypeAlias = Callable[[Timestamp, PolicyState], Hold | None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A policy on one run, with all its times resolved.

    It is pure: the caller keeps the state and passes it in. So a checkpoint needs only the state,
    and ranks with the same arguments decide the same. A wrapper replaces some of the fields.

    >>> from stretto import Horizon, PiecewiseConstant, Timestamp
    >>> bound = PiecewiseConstant("0sp:8 100sp:16").bind(Horizon("1ep", dataset_num_samples=1000))
    >>> size, state = bound.decide(Timestamp(sample=100), bound.start, Signals())
    >>> size
    16
    """

    decide: Callable[[Timestamp, PolicyState, Signals], Decision]
    """Returns the size of the batch that starts at a timestamp, and the state after deciding.
    Called once for each batch, in order. The size is at least 1 whatever the signals are."""
    start: PolicyState = field(default_factory=dict)
    """The state before the first batch."""
    holds_until: PolicyHold = lambda _, __: None
    """Returns how long the decision just made holds, from its timestamp and the state after it:
    for every later batch that the hold covers, `decide` would return the same size and state, so
    it is not called. None: for this batch only."""
    is_static: bool = False
    """Whether sizes follow from counts alone, without signals and wall time."""
    units: frozenset[TimeUnit] = frozenset()
    """The units that it reads from the clock."""
    reads: frozenset[str] = frozenset({"loss"})
    """The signals that it reads: `"loss"`, `"noise"` (all that belongs to it), `"cost"`
    (`cost_ratio`), or the name of a metric, such as `"validation/loss"`. Only those are measured.
    None if it is static."""
    bounds: tuple[int, int] | None = None
    """The smallest and the largest size that it may decide; None: unknown."""
    unit: TimeUnit = TimeUnit.SAMPLE
    """The unit of its sizes: that of the policy, which fills it in."""
    log_values: Callable[[PolicyState], Mapping[str, float]] = lambda _: {}
    """Returns the values behind the last decision, by name, for the log."""
    sizes: Callable[[PolicyState], tuple[object, ...]] = lambda _: ()
    """Returns the sizes in a state, to find out whether a checkpoint is damaged."""
    fits: Callable[[PolicyState], bool] | None = None
    """Returns whether a saved state could be one of this policy; None: if it has the fields of
    `start`."""

    row_at: Callable[[Timestamp], int] | None = None
    """Returns how many samples are joined to a row at a timestamp; None: none ever are."""
    asked: Callable[[Timestamp, PolicyState, Signals], Decision] | None = None
    """If samples are joined to rows: `decide` before sizes are rounded to whole rows."""

    def __post_init__(self) -> None:
        reads: object = self.reads
        if isinstance(reads, str):
            raise BatchSizeError.bad("reads", reads, "it is a text", f"write {{{reads!r}}}")
        if self.is_static:
            fill(self, reads=frozenset())

    def accepts(self, state: PolicyState) -> bool:
        """Return whether a saved state could be one of this policy."""
        return _fields(state) == _fields(self.start) if self.fits is None else self.fits(state)


def timed(
    size_at: Callable[[Timestamp], int],
    *,
    units: frozenset[TimeUnit],
    bounds: tuple[int, int] | None,
    holds_until: Callable[[Timestamp], Hold | None],
) -> Bound:
    """Return a bound policy that depends on time alone: no state, no signals."""
    return Bound(
        decide=lambda timestamp, state, _: (size_at(timestamp), state),
        holds_until=lambda timestamp, _: holds_until(timestamp),
        is_static=TimeUnit.SECOND not in units,
        units=units,
        reads=frozenset(),
        bounds=bounds,
    )


def wrapped(inner: Bound, own: PolicyState, **changes: Any) -> Bound:
    """Return a bound policy around another one, whose state is beside its own.

    Args:
        inner: the policy inside.
        own: the state of the wrapper before the first batch.
        **changes: the fields of `Bound` that are not those of the policy inside.
    """
    start = {**own, "inner": inner.start}
    same: dict[str, Any] = {
        "start": start,
        "holds_until": lambda timestamp, state: inner.holds_until(timestamp, state["inner"]),
        "log_values": lambda state: inner.log_values(state["inner"]),
        "fits": lambda state: set(state) == set(start) and inner.accepts(state["inner"]),
        "sizes": lambda state: (
            *(state[name] for name in ("size", "largest") if name in own),
            *inner.sizes(state["inner"]),
        ),
    }
    return replace(inner, **same | changes)


_SIZE = Check(lambda value, *_: checked_size(value))
_PART = Check(lambda value, name, _: checked_size(value, name))
_OR_AUTO = "write a number of samples such as 128, tokens such as '64Ktok', or 'auto'"
_FOUND = Check(
    lambda value, name, _: value if is_auto(value) else checked_size(value, name, instead=_OR_AUTO)
)
SizeLike: TypeAlias = int | str | Time
"""A batch size as it is written: a number of samples, or tokens such as `"64Ktok"`."""
# Any: given as a SizeLike, and an int from then on.
Size: TypeAlias = Annotated[Any, _SIZE]
"""A field that is a batch size, in samples or tokens."""
SizePart: TypeAlias = Annotated[Any, _PART]
"""A field that sizes grow by or are multiples of; 1 is that of either unit."""
FoundSize: TypeAlias = Annotated[Any, _FOUND]
"""A field that is a size, or `"auto"`: as many samples as fit into memory."""
PositiveInt: TypeAlias = Annotated[int, Check(lambda value, name, _: checked_number(value, name))]
"""A field that is an integer of at least 1."""
ABOVE_1 = number_field("a finite number above 1", lambda value: 1 < value < math.inf)
"""The check of a factor of growth."""


class BatchSizePolicy(Timed):
    """How many samples, over all ranks, each optimizer step takes. A frozen value.

    >>> from stretto import LinearRamp
    >>> ramp = LinearRamp(8, 64, "1ep")
    >>> isinstance(ramp, BatchSizePolicy), ramp.times()
    (True, (Time('1ep'),))
    """

    __slots__ = ()
    error = BatchSizeError

    def __init_subclass__(cls, **named: Any) -> None:
        """Let `bind` fill in the unit, so that no amount in tokens is taken for samples."""
        super().__init_subclass__(**named)
        bind: Callable[[Self, Horizon], Bound] | None = vars(cls).get("bind")
        if bind is not None:

            @wraps(bind)
            def in_unit(self: Self, horizon: Horizon, /) -> Bound:
                return replace(bind(self, horizon), unit=self.unit)

            cls.bind = in_unit  # type: ignore[method-assign, assignment]

    def __post_init__(self) -> None:
        check_fields(self)
        check_units(self)

    @property
    def unit(self) -> TimeUnit:
        """The unit of all its sizes: samples or tokens.

        By default, it is found among the fields. Override it for a policy of your own that decides
        in tokens without a size in its fields.

        >>> from stretto import LinearRamp
        >>> LinearRamp("64Ktok", "1Mtok", "10%").unit
        <TimeUnit.TOKEN: 'tok'>
        """
        return TimeUnit.TOKEN if any(map(has_tokens, values_of(self).values())) else TimeUnit.SAMPLE

    @abstractmethod
    def bind(self, horizon: Horizon) -> Bound:
        """Resolve every time for one run.

        Raises:
            ConversionError: a time needs a fact that is not known.
            BatchSizeError: the times are out of order on this run.
        """

    def scaled(self, ratio: Number) -> Self:
        """Return the policy with all times scaled, except fractions of the run.

        Batches, samples and tokens are rounded up to whole ones: half of 5ba is 3ba. A class that
        defines `times` must define this, too.

        Raises:
            BatchSizeError: the ratio is not positive, or the method is missing.
        """
        if type(self).times is not Timed.times and self.times():
            why = f"{type(self).__name__} defines times() alone"
            instead = "define scaled(self, ratio), too"
            raise BatchSizeError.cannot(f"stretch {self!r}", why=why, instead=instead)
        return Timed.scaled(self, ratio)

    def end_size(self) -> int | None:
        """Return the size that it ends with on any run; None: only a run tells."""
        return None

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:  # noqa: ARG002
        """Return warnings for a run whose largest batch is `largest`, one line each.

        A plan shows them. By default, there are none.
        """
        return ()


def grain_of(policy: BatchSizePolicy, horizon: Horizon) -> int:
    """Return the least amount by which batches can differ, in the unit of a policy.

    >>> from stretto.batching import as_policy
    >>> data = Horizon("1ep", tokens_per_sample=4096)
    >>> grain_of(as_policy("64Ktok"), data), grain_of(as_policy(16), data)
    (4096, 1)
    """
    return (horizon.tokens_per_sample or 1) if policy.unit is TimeUnit.TOKEN else 1


def has_tokens(value: object) -> bool:
    """Return whether a value is an amount in tokens, or has one inside, or decides in tokens.

    >>> has_tokens((Tokens(8), 8)), has_tokens(8)
    (True, False)
    """
    if isinstance(value, BatchSizePolicy):
        return value.unit is TimeUnit.TOKEN
    inside = value if isinstance(value, tuple) else values_of(value).values()
    return isinstance(value, Tokens) or any(map(has_tokens, inside))


def check_units(policy: Timed) -> None:
    """Refuse sizes of which some are in samples and others in tokens."""
    sizes = [*sizes_in(policy)]
    tokens, others = [*filter(has_tokens, sizes)], [*filterfalse(has_tokens, sizes)]
    if tokens and others:
        raise BatchSizeError.cannot(
            f"use {tokens[0]!r} in tokens and {others[0]!r} in samples in one batch size policy",
            why="how many tokens a sample has is not known here",
            instead="write all its sizes as numbers of samples, or all like '64Ktok'",
        )


def sizes_in(policy: Timed, *, parts: bool = True) -> Iterator[object]:
    """Yield the sizes among the fields of a policy, and the policies inside.

    >>> from stretto.batching import AtMost, Fixed
    >>> [*sizes_in(AtMost(Fixed(8), 64))]
    [Fixed(8), 64]

    Args:
        policy: the policy.
        parts: whether to yield what sizes grow by or are multiples of.
    """
    values, checks = values_of(policy), dict[str, tuple[Check, bool]]()
    with suppress(NameError):  # somebody's class may name types that are not there at run time
        checks = checks_of(type(policy)) if values else {}
    for name, value in values.items():
        check = checks[name][0] if name in checks else None
        is_size = check in (_SIZE, _FOUND) or (parts and check is _PART and value != 1)
        if isinstance(value, BatchSizePolicy) or (is_size and isinstance(value, int)):
            yield value
        elif isinstance(value, tuple):  # of sizes, or of pairs of a time and one
            items = (item[-1] if isinstance(item, tuple) else item for item in value)
            yield from (item for item in items if isinstance(item, (int, BatchSizePolicy)))


def checked_size(
    value: object,
    what: str = "a batch size",
    *,
    instead: str = "write a number of samples such as 128, or tokens such as '64Ktok'",
) -> int:
    """Return a number of samples as an int, and an amount in tokens as `Tokens`.

    >>> checked_size(32), checked_size("128sp"), checked_size("64Ktok")
    (32, 128, '64Ktok')

    Raises:
        BatchSizeError: it is anything else, less than 1, or has more than 200 digits; floats and
            booleans are never converted.
    """
    if not isinstance(value, (str, Time)):
        size = checked_number(value, what, instead=instead)
        return Tokens(size) if isinstance(value, Tokens) else size
    text, kinds = str(value).strip(), {TimeUnit.SAMPLE: int, TimeUnit.TOKEN: Tokens}
    try:
        time = Time(f"{text}sp" if text.replace("_", "").isdecimal() else text)
        if time.unit in kinds and time.amount >= 1:
            return kinds[time.unit](time.amount)
        why = "it is less than 1" if time.unit in kinds else f"it is a time in {NAMES[time.unit]}"
    except TimeError:
        why = "it is not a number of samples or tokens"
    raise BatchSizeError.cannot(f"use {shown(text)} as {what}", why=why, instead=instead)


def checked_number(
    value: object, what: str, *, instead: str = "write a whole number such as 128"
) -> int:
    """Return `value` as an int, if it is a whole number of at least 1.

    Raises:
        BatchSizeError: it is anything else, or has more than 200 digits.
    """
    size = whole(value)
    if size is None or not 1 <= size < _TOO_LARGE:
        is_long = size is not None and size >= _TOO_LARGE
        why = "it has more than 200 digits" if is_long else "it is not an integer of at least 1"
        raise BatchSizeError.cannot(f"use {shown(value)} as {what}", why=why, instead=instead)
    return size


def is_auto(size: object) -> bool:
    """Return whether memory decides a size.

    >>> is_auto("auto"), is_auto(64)
    (True, False)
    """
    return isinstance(size, str) and size == "auto"


def known_size(size: Any, name: str = "maximum") -> Any:
    """Return a size that is a number.

    Raises:
        BatchSizeError: memory decides it.
    """
    if is_auto(size):
        why, instead = "stretto.Trainer finds it when it begins", "write a number of samples"
        raise BatchSizeError.bad(name, size, why, instead)
    return size


def check_start(start: int, minimum: int, maximum: int) -> None:
    """Refuse a first size that is not within its bounds."""
    maximum = max(start, minimum) if is_auto(maximum) else maximum
    if not minimum <= start <= maximum:
        why = f"above maximum={maximum}" if start > maximum else f"below minimum={minimum}"
        raise BatchSizeError.bad("start", start, f"it is {why}", "write a size within its bounds")


def rounded_size(size: float, least: int, most: int) -> int:
    """Return the whole size nearest to `size` within bounds, which may be infinite.

    >>> rounded_size(46.4, 8, 256), rounded_size(math.inf, 8, 256)
    (46, 256)
    """
    return round(min(max(size, least), most))


def checked_world_size(value: object) -> int:
    """Return `value` as an int, if it is a whole number of ranks of at least 1.

    Raises:
        BatchSizeError: it is anything else.
    """
    return checked_number(value, "a world size", instead="write a number of ranks such as 8")


def _fields(state: object) -> object:
    if not isinstance(state, Mapping):
        return None
    return {name: _fields(one) for name, one in state.items()}
