"""Batch sizes that follow the noise of the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated, Any, Literal, TypeAlias, TypeGuard, final

from stretto.batching.policy import (
    BatchSizePolicy,
    Bound,
    Decision,
    FoundSize,
    PolicyState,
    Signals,
    Size,
    SizeLike,
    check_start,
    grain_of,
    has_tokens,
    in_unit_of,
    known_size,
    rounded_size,
)
from stretto.errors import BatchSizeError
from stretto.schedules.fields import Check, check_fields, fill, number_field
from stretto.timing import Horizon, Timestamp
from stretto.timing.grammar import whole

LARGEST = 1e100
"""Larger values are ignored: their squares would come near the largest float, and no gradient has
such a norm."""
_LONGEST = 10**9
_FULL_STEPS = 5
_LEAST_STEPS = 20
"""With fewer steps, their spread is not known well enough."""
_FEW = 15.0
"""Degrees of freedom below which the expansion of Student's distribution is off by 0.15 percent at
a confidence of 0.9999; at 5 it was 6 percent, and at 1 it was 12 percent at 0.9."""
STEADY = 3.0
"""A ratio that is known to within this factor counts as known."""
WINDOW, SHORT_WINDOW = 100, 20
"""The measured steps that averages are over, by default, and with the root of the noise scale."""
LEAST_GAIN = 0.03
"""A smaller saving is no reason to move: near its minimum the cost is flat."""


UNKNOWN = (0.0, math.inf)
"""The interval of a ratio of positive numbers without data."""


def _checked_window(window: object) -> int:
    """Return the number of steps that an average is over: an integer from 2 to a billion."""
    steps = whole(window)
    if steps is None or not 2 <= steps <= _LONGEST:
        why = f"it is not an integer from 2 to {_LONGEST:,}"
        raise BatchSizeError.bad("window", window, why, "write a number of steps such as 100")
    return steps


Window: TypeAlias = Annotated[int, Check(lambda value, *_: _checked_window(value))]
# Above, Student's distribution is less exact.
Confidence: TypeAlias = Annotated[
    float, number_field("a number from 0.01 to 0.9999", lambda value: 0.01 <= value <= 0.9999)
]
_POSITIVE = number_field("a finite number above 0, or 'time'", lambda value: 0 < value < math.inf)
Factor: TypeAlias = Annotated[
    float | Literal["time"],
    Check(lambda value, *named: value if value == "time" else _POSITIVE.converted(value, *named)),
]
Power: TypeAlias = Annotated[
    float, number_field("a number above 0 and at most 1", lambda value: 0 < value <= 1)
]


@final
@dataclass(frozen=True, slots=True)
class GradientNoise:
    """The gradient noise scale `B_simple = tr(Sigma) / |G|^2`, averaged over steps. A frozen value.

    It is the batch size at which the noise of the gradient is as large as the gradient (McCandlish
    et al. 2018, arXiv 1812.06162, equation 2.9). Numerator and denominator are averaged separately
    and divided at the end: the mean of the ratios of single steps is another number, and has no
    finite variance if a denominator may be near zero. The weights fall geometrically, by
    `1 - 2 / (window + 1)` a step, so the means vary like those over `window` steps; they are means
    from the first step on (West 1979, "Updating mean and variance estimates", Communications of the
    ACM 22:532). Steps are weighted by their samples: a measurement on few samples varies more.

    If the interval is rarely narrow enough for a `scale`, the scales are biased: it is narrow when
    the denominator is high by chance, so they are too small by a quarter or more.

    >>> noise = GradientNoise(window=50)
    >>> for step in range(40):
    ...     noise = noise.after(Signals(noise_numerator=120.0 + step % 2, noise_denominator=2.0))
    >>> round(noise.scale, 2), [round(end, 1) for end in noise.interval]
    (60.26, [60.2, 60.3])

    Args:
        window: the number of steps of equal size that the means are over.
        confidence: the probability with which the interval contains the true ratio.

    Raises:
        BatchSizeError: `window` or `confidence` is out of range.
    """

    error = BatchSizeError

    window: Window = 100
    confidence: Confidence = 0.9
    steps: int = 0
    """The number of measured steps."""
    weight: float = 0.0
    weight_squares: float = 0.0
    numerator: float = 0.0
    """The mean of tr(Sigma), the variance of a sample's gradient."""
    denominator: float = 0.0
    """The mean of |G|^2, the squared norm of the true gradient."""
    spread_numerator: float = 0.0
    """The weighted sum of squared deviations of the numerators; likewise below."""
    spread_both: float = 0.0
    spread_denominator: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    def after(self, signals: Signals) -> GradientNoise:
        """Return the noise with one more step; unchanged if it measured none, or none finite.

        Without `num_samples`, all steps have equal weights.
        """
        numerator, denominator = signals.noise_numerator, signals.noise_denominator
        own = 1.0 if signals.num_samples is None else signals.num_samples
        if not (_is_plausible(numerator) and _is_plausible(denominator)):
            return self
        if not 1 / LARGEST <= own <= LARGEST:
            return self
        kept = 1.0 - 2.0 / (self.window + 1)
        weight = kept * self.weight + own
        off_x, off_y = numerator - self.numerator, denominator - self.denominator
        share = kept * self.weight / weight * own
        return self._with(
            steps=self.steps + 1,
            weight=weight,
            weight_squares=kept * kept * self.weight_squares + own * own,
            numerator=self.numerator + own * off_x / weight,
            denominator=self.denominator + own * off_y / weight,
            spread_numerator=kept * self.spread_numerator + share * off_x * off_x,
            spread_both=kept * self.spread_both + share * off_x * off_y,
            spread_denominator=kept * self.spread_denominator + share * off_y * off_y,
        )

    @property
    def effective_steps(self) -> float:
        """The number of steps of equal weight whose means would vary like these."""
        return self.weight * self.weight / self.weight_squares if self.steps else 0.0

    @property
    def has_enough_steps(self) -> bool:
        """Whether there are enough steps for their spread to mean something.

        Twenty, or three quarters of a shorter window. After two windows no more can come, and
        steps of different batches are worth fewer: then five are enough, or two fifths of a
        shorter window.
        """
        least = min(_LEAST_STEPS, 0.75 * self.window)
        if self.steps >= 2 * self.window:
            least = min(least, _FULL_STEPS, 0.4 * self.window)
        return self.effective_steps >= least

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None until it is known to within a factor of 3."""
        lower, upper = self.interval if self.has_enough_steps else UNKNOWN
        return self.ratio if upper <= STEADY * lower else None

    @property
    def ratio(self) -> float | None:
        """Numerator over denominator; None if that is not a positive number."""
        if not (self.numerator > 0 and self.denominator > 0):
            return None
        ratio = self.numerator / self.denominator
        return ratio if math.isfinite(ratio) else None

    @property
    def interval(self) -> tuple[float, float]:
        """Where the ratio of the true means lies; the upper end is infinite if nothing bounds it.

        Fieller's interval (1954, "Some problems in interval estimation", Journal of the Royal
        Statistical Society B 16:175): all ratios R for which the mean of `numerator - R *
        denominator` differs from zero by no more than chance allows. It is exact for normal means,
        skewed like the ratio, and has no upper end if the denominator may be zero. Steps count as
        independent, like the gradients of disjoint batches.
        """
        unbiased = self.weight - self.weight_squares / self.weight if self.steps else 0.0
        if not unbiased > 0:
            return UNKNOWN
        # All values are in units of their own size, so no product overflows or vanishes.
        shrink = self.weight_squares / (self.weight * self.weight) / unbiased
        x_unit = max(abs(self.numerator), math.sqrt(shrink * self.spread_numerator))
        y_unit = max(abs(self.denominator), math.sqrt(shrink * self.spread_denominator))
        unit = x_unit / y_unit if y_unit > 0 else math.inf
        if not (x_unit > 0 and 0 < unit < math.inf):
            return UNKNOWN
        x, y = self.numerator / x_unit, self.denominator / y_unit
        reach = student(self.confidence, self.effective_steps - 1.0) ** 2 * shrink
        a = y * y - reach * (self.spread_denominator / y_unit / y_unit)
        b = x * y - reach * (self.spread_both / x_unit / y_unit)
        c = x * x - reach * (self.spread_numerator / x_unit / x_unit)
        return positive_part(a, b, c, unit, is_positive=x > 0 and y > 0)

    def to_state(self) -> dict[str, int | float]:
        """Return the averages as JSON."""
        return {name: getattr(self, name) for name in self.__slots__[2:]}

    def from_state(self, state: Mapping[str, Any]) -> GradientNoise:
        """Return the averages that `to_state` described, over this window; ignores other keys."""
        for name in self.__slots__[2:]:
            math.isfinite(state[name])  # raises if it is not a number
        return self._with(**{name: state[name] for name in self.__slots__[2:]})

    def _with(self, **averages: float) -> GradientNoise:
        # Not replace(), which would check the window again: a third of the time of a decision.
        changed = object.__new__(GradientNoise)
        fill(changed, window=self.window, confidence=self.confidence, **averages)
        return changed


def student(confidence: float, freedom: float) -> float:
    """Return within how many standard errors a mean is with probability `confidence`.

    This is Student's distribution, by its expansion in the inverse degrees of freedom (Abramowitz
    and Stegun 26.7.5), and for few of them by its integral: within 0.15 percent up to a confidence
    of 0.9999. Less than one degree of freedom counts as one.

    >>> round(student(0.95, 20), 3), round(student(0.95, 1e9), 3), round(student(0.9, 1), 3)
    (2.086, 1.96, 6.314)
    """
    v = max(freedom, 1.0)
    if v < _FEW:
        return _integrated(confidence, v)
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / v + second / v**2 + third / v**3


def _integrated(confidence: float, v: float) -> float:
    """With `t = sqrt(v) sinh(y)` the density of y is a power of `cosh(y)`, smooth and steep."""
    at_zero = 2.0 / math.sqrt(math.pi) * math.exp(math.lgamma((v + 1) / 2) - math.lgamma(v / 2))

    def density(y: float) -> float:
        return at_zero * math.pow(math.cosh(y), -v)

    y = covered = 0.0
    # Newton's steps never overshoot, since the density falls. Simpson's rule integrates each.
    while (step := (confidence - covered) / density(y)) > 1e-9 * y:
        at = [density(y + step * part / 16) for part in range(17)]
        covered += step / 48 * (at[0] + 4 * sum(at[1::2]) + 2 * sum(at[2:16:2]) + at[16])
        y += step
    return math.sqrt(v) * math.sinh(y)


def positive_part(
    a: float, b: float, c: float, unit: float, *, is_positive: bool
) -> tuple[float, float]:
    """The positive ratios R with `a R^2 - 2 b R + c <= 0`."""
    root = math.sqrt(max(0.0, b * b - a * c))
    if c <= 0 or b + root <= 0:  # the numerator may be zero
        lower = 0.0
    else:
        lower = c / (b + root)
    if a <= 0:  # the denominator may be zero
        return lower * unit, math.inf
    if not is_positive:
        return UNKNOWN  # negative, which no variance or square is
    return lower * unit, (b + root) / a * unit


def _is_plausible(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and abs(value) <= LARGEST


@final
@dataclass(frozen=True, slots=True)
class NoiseScale(BatchSizePolicy):
    """Follows `c * B_noise`, where `B_noise = tr(Sigma) / |G|^2` is the gradient noise scale.

    Far below the noise scale, twice the batch needs about half the steps; far above it, about as
    many as before (McCandlish et al. 2018, arXiv 1812.06162, section 2.2). Both terms are averaged
    over `window` steps and divided at the end, with Fieller's interval around the ratio.

    The size stays while it is within what the ends of the interval give, so chance alone seldom
    moves it. Otherwise it moves to what the noise scale gives or, if the noise scale is not known
    to within a factor of 3, to the nearer end. Wrappers round it or slow it down further:
    `PowerOfTwo(NoiseScale(8, 256))`.

    With a `power` it follows `c * B_noise ** power`. The root, `power=0.5`, costs least if a
    step costs as much as `c ** 2` samples: the same progress takes `1 + B_noise / B` steps and
    `B + B_noise` samples, and `c ** 2 * steps + samples` is least at `B = c * sqrt(B_noise)`. So
    with the root, the size moves only if that is to save 3 percent of this cost.

    `c="time"` means the root with the `c` of this machine, which the trainer measures before the
    first batch and then keeps; the log has it. `c=` that number gives the same sizes.

    >>> from stretto import Horizon, Timestamp
    >>> from stretto.batching import Signals
    >>> bound = NoiseScale(8, 256, c=0.5, window=20).bind(Horizon("1ep"))
    >>> state = bound.start
    >>> for batch in range(40):
    ...     seen = Signals(noise_numerator=90.0 + batch % 3, noise_denominator=1.0)
    ...     size, state = bound.decide(Timestamp(batch=batch), state, seen)
    >>> size
    45

    Args:
        start: the size until the noise is known.
        maximum: the largest size; `"auto"`: what fits into memory in one pass on each rank, found
            by a `Trainer`.
        c: the factor of the noise scale, or of its `power`; or `"time"`. With sizes in tokens, the
            noise scale is in tokens.
        power: the power of the noise scale that the batch follows, above 0 and at most 1.
        minimum: the smallest size; by default, `start`.
        window: the number of measured steps that the averages are over; by default 100, and 20 with
            the root, whose cost is flat around its least.
        confidence: the probability with which the interval holds the true noise scale.

    Raises:
        BatchSizeError: a size is not an integer of at least 2, `start` is not from `minimum` to
            `maximum`, or another value is out of range.
    """

    start: Size
    maximum: FoundSize
    minimum: Size | None = field(default=None, kw_only=True)
    window: Window | None = field(default=None, kw_only=True)
    confidence: Confidence = field(default=0.9, kw_only=True)
    c: Factor = field(default=1.0, kw_only=True)
    power: Power = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        BatchSizePolicy.__post_init__(self)
        name, least = ("start", self.start) if self.minimum is None else ("minimum", self.minimum)
        fill(self, minimum=least)
        check_start(self.start, least, self.maximum)
        if least < 2:
            raise _single(name, least, "2 or more")
        if self.c == "time":
            if self.power not in (0.5, 1.0):
                why, instead = "c='time' follows the root", "leave it out"
                raise BatchSizeError.bad("power", self.power, why, instead)
            if has_tokens(self.start):
                why, instead = "the sizes are in tokens", "write sizes as numbers of samples"
                raise BatchSizeError.bad("c", self.c, why, instead)
            fill(self, power=0.5)
        if self.window is None:
            fill(self, window=SHORT_WINDOW if self.power == 0.5 else WINDOW)

    def bind(self, horizon: Horizon) -> Bound:
        """Return the policy; it remembers the size and the averages."""
        least, two = self.minimum or self.start, 2 * grain_of(self, horizon)
        known_size(self.maximum)
        if least < two:
            raise _single("minimum", least, f"{in_unit_of(least, two)} or more")
        empty = GradientNoise(self.window or WINDOW, self.confidence)
        of_time = self.c == "time"

        def decide(_: Timestamp, state: PolicyState, signals: Signals) -> Decision:
            noise = empty.from_state(state).after(signals)
            if not of_time:
                return self._decide(state["size"], noise, float(self.c))
            ratio = signals.cost_ratio
            c = state["c"] if ratio is None or not 0 < ratio < math.inf else math.sqrt(ratio)
            size, after = self._decide(state["size"], noise, c)
            return size, {**after, "c": c}

        return Bound(
            decide=decide,
            start={"size": self.start, **empty.to_state(), **({"c": None} if of_time else {})},
            reads=frozenset({"noise", "cost"} if of_time else {"noise"}),
            bounds=(self.minimum or self.start, self.maximum),
            log_values=lambda state: _log_values(empty.from_state(state), state.get("c")),
            sizes=lambda state: (state["size"],),
        )

    def _decide(self, size: int, noise: GradientNoise, c: float | None) -> Decision:
        """Return the size, moved if the interval of the noise scale excludes it."""
        size = self._bounded(size)  # the bounds of this run; it may have been resumed with others
        if noise.has_enough_steps and c is not None:
            lowest, highest = (self._wanted(end, c) for end in noise.interval)
            if not lowest <= size <= highest:
                wanted = lowest if size < lowest else highest
                if noise.scale is not None:
                    wanted = self._wanted(noise.scale, c)
                if self.power != 0.5 or _saves(size, self._bounded(wanted), wanted, c):
                    size = self._bounded(wanted)
        return size, {"size": size, **noise.to_state()}

    def _bounded(self, size: float) -> int:
        return rounded_size(size, self.minimum or self.start, self.maximum)

    def _wanted(self, noise_scale: float, c: float) -> float:
        # An end of the interval may be below zero by a rounding error.
        return c * math.pow(max(noise_scale, 0.0), self.power)


def _saves(size: int, other: int, best: float, c: float) -> bool:
    """Return whether another size costs at least 3 percent less, if `best` costs least.

    The noise scale is then `(best / c) ** 2`, and a step costs as much as `c ** 2` samples.
    """
    noise, ratio = (best / c) ** 2, c * c
    before, after = ((ratio + one) * (1 + noise / one) for one in (size, other))
    return after <= (1 - LEAST_GAIN) * before


def _single(name: str, size: int, instead: str) -> BatchSizeError:
    """Return the error for a size that would stay 1 for ever."""
    why = "a single sample has no noise to measure"
    return BatchSizeError.bad(name, size, why, f"write {instead}")


def _log_values(noise: GradientNoise, c: float | None) -> dict[str, float]:
    """Return the noise scale, the ends of its interval and a measured `c`, as far as known."""
    found: dict[str, float] = {} if c is None else {"c": c}
    if noise.has_enough_steps:
        lower, upper = noise.interval
        if noise.scale is not None:
            found["noise_scale"] = noise.scale
        if lower > 0:
            found["noise_scale_low"] = lower
        if upper < math.inf:
            found["noise_scale_high"] = upper
    return found


def NormTest(  # noqa: N802  a kind of policy
    start: SizeLike,
    maximum: SizeLike,
    *,
    eta: float = 0.9,
    minimum: SizeLike | None = None,
    window: int = 100,
    confidence: float = 0.9,
) -> NoiseScale:
    """Keeps the variance of the batch's gradient at `eta^2` times its squared norm.

    The norm test is `tr(Sigma) / B <= eta^2 |G_B|^2` (Byrd et al. 2012, "Sample size selection in
    optimization methods for machine learning", Mathematical Programming 134:127, equation 3.7; De
    et al. 2017, arXiv 1610.05792; Bollapragada et al. 2018, arXiv 1710.11258; on several ranks Lau
    et al. 2024, arXiv 2412.21124). The norm of a batch's gradient contains its noise, so on average
    `|G_B|^2 = |G|^2 + tr(Sigma) / B`, and the smallest batch that passes has
    `(1 / eta^2 - 1) tr(Sigma) / |G|^2` samples: it is `NoiseScale` with `c = 1 / eta^2 - 1`.

    A single test is noisy. So the size follows the averages of `window` steps with a confidence
    interval: it stays while it may be the smallest size that passes, and otherwise it moves there.
    It also shrinks, down to `minimum`. The batches of the papers never shrink, as with
    `Monotone(NormTest(8, 256))`.

    >>> NormTest(8, 256, eta=0.5)
    NoiseScale(start=8, maximum=256, minimum=8, window=100, confidence=0.9, c=3.0, power=1.0)

    Args:
        start: the size until the noise is known.
        maximum: the largest size.
        eta: the largest error of the batch's gradient, as a fraction of its norm; below 1.
        minimum: the smallest size; by default, `start`.
        window: the number of measured steps that the averages are over.
        confidence: the probability with which the interval holds the true noise scale.

    Raises:
        BatchSizeError: a size is not an integer of at least 2, `start` is not from `minimum` to
            `maximum`, `eta` is not between 0 and 1, or `window` or `confidence` is out of range.
    """
    part: float = _ETA.converted(eta, "eta", BatchSizeError)
    c = min((1.0 - part * part) / part / part, LARGEST)
    return NoiseScale(start, maximum, c=c, minimum=minimum, window=window, confidence=confidence)


_ETA = number_field("a number above 0 and below 1", lambda value: 0 < value < 1)
