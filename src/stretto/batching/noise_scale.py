"""Batch sizes that follow the noise of the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import NormalDist
from typing import Any, NamedTuple, TypeGuard, cast, final

from stretto.batching.following import (
    checked_bounds,
    checked_number,
    rounded_size,
)
from stretto.batching.policy import BatchSizePolicy, Bound, PolicyState, Signals
from stretto.errors import BatchSizeError, shown
from stretto.schedules.fields import fill
from stretto.timing import Horizon, Timestamp
from stretto.timing.grammar import whole

LARGEST = 1e100
"""Values beyond it are taken for broken: their squares would come near the end of what a float
holds, and no gradient has such a norm."""
_LONGEST = 10**9
_FULL_STEPS = 5
_LEAST_STEPS = 20
"""Below it the spread of the steps is itself too badly known."""
_FEW = 15.0
"""Degrees of freedom below which the expansion of Student's distribution is off by 0.15 percent at
a confidence of 0.9999; at 5 it was 6 percent, and at 1 it was 12 percent at 0.9."""
_LEAST_CONFIDENCE, _MOST_CONFIDENCE = 0.01, 0.9999
STEADY = 3.0
"""A ratio that is known to within this factor counts as known."""


class Interval(NamedTuple):
    """Where a ratio lies; `upper` is infinite where the data do not bound it.

    >>> Interval(40.0, 60.0).is_within(3)
    True
    """

    lower: float
    upper: float

    def is_within(self, factor: float) -> bool:
        """Return whether its ends are at most a `factor` apart."""
        return self.upper <= factor * self.lower


UNKNOWN = Interval(0.0, math.inf)
"""Nothing is known of a ratio of two positive numbers but that it is one."""


@final
@dataclass(frozen=True, slots=True)
class RatioAverage:
    """Weighted means of a numerator and a denominator, with their variances. A frozen value.

    The two are averaged apart and divided at the end: the mean of the ratios of single steps is
    another number, and has no finite variance where a denominator may be near zero. The weights
    fall geometrically, by `1 - 2 / (window + 1)` a step, so that the means vary as those over
    `window` steps would; they are means from the first step on, nothing has to be warmed up
    (West 1979, "Updating mean and variance estimates", Communications of the ACM 22:532). Steps
    of unlike batches count by their samples: what is measured in a few varies far more.

    >>> average = RatioAverage()
    >>> for numerator, denominator in [(9.0, 1.0), (11.0, 3.0), (10.0, 2.0)]:
    ...     average = average.extended(numerator, denominator, window=100)
    >>> average.steps, round(average.ratio, 2)
    (3, 4.99)
    """

    steps: int = 0
    weight: float = 0.0
    weight_squares: float = 0.0
    numerator: float = 0.0
    """The mean of the numerators."""
    denominator: float = 0.0
    """The mean of the denominators."""
    spread_numerator: float = 0.0
    """The weighted sum of squared deviations of the numerators; so on for the others."""
    spread_both: float = 0.0
    spread_denominator: float = 0.0

    def extended(
        self,
        numerator: float | None,
        denominator: float | None,
        *,
        window: int,
        num_samples: float | None = None,
    ) -> RatioAverage:
        """Return the average with one more step; the same where a value is none or not finite.

        Args:
            numerator: what the step measured.
            denominator: what it is to be divided by.
            window: how many steps of equal size the means are over.
            num_samples: how much the step counts beside others; left out, as one sample.
        """
        own = 1.0 if num_samples is None else num_samples
        if not (_is_plausible(numerator) and _is_plausible(denominator)):
            return self
        if not 1 / LARGEST <= own <= LARGEST:
            return self
        kept = 1.0 - 2.0 / (window + 1)
        weight = kept * self.weight + own
        off_x, off_y = numerator - self.numerator, denominator - self.denominator
        share = kept * self.weight / weight * own
        return RatioAverage(
            self.steps + 1,
            weight,
            kept * kept * self.weight_squares + own * own,
            self.numerator + own * off_x / weight,
            self.denominator + own * off_y / weight,
            kept * self.spread_numerator + share * off_x * off_x,
            kept * self.spread_both + share * off_x * off_y,
            kept * self.spread_denominator + share * off_y * off_y,
        )

    @property
    def effective_steps(self) -> float:
        """How many steps of equal weight would give means that vary as these do."""
        return self.weight * self.weight / self.weight_squares if self.steps else 0.0

    def is_over_enough(self, window: int) -> bool:
        """Return whether there are enough steps for their spread to mean something.

        Twenty, or three quarters of a shorter window. Where the window is long full it holds as
        many as it can, and those of unlike batches are worth fewer: then five are enough, or two
        fifths of a shorter one.
        """
        least = min(_LEAST_STEPS, 0.75 * window)
        if self.steps >= 2 * window:
            least = min(least, _FULL_STEPS, 0.4 * window)
        return self.effective_steps >= least

    def has_begun(self, window: int) -> bool:
        """Return whether the means are over as many steps, whatever each is worth."""
        return self.steps >= min(_LEAST_STEPS, 0.75 * window)

    def is_steady(self, window: int, confidence: float) -> bool:
        """Return whether the ratio is known well enough to be told: within a factor of 3."""
        has_ratio = self.ratio is not None and self.is_over_enough(window)
        return has_ratio and self.interval(confidence).is_within(STEADY)

    @property
    def ratio(self) -> float | None:
        """Numerator over denominator; None where that is not a positive number."""
        if not (self.numerator > 0 and self.denominator > 0):
            return None
        ratio = self.numerator / self.denominator
        return ratio if math.isfinite(ratio) else None

    def interval(self, confidence: float) -> Interval:
        """Return where the ratio of the true means lies, with this probability.

        Fieller's interval (1954, "Some problems in interval estimation", Journal of the Royal
        Statistical Society B 16:175): all ratios R for which the mean of `numerator - R *
        denominator` differs from zero by no more than chance allows. It is exact where means are
        normal, skew as the ratio is, and has no upper end where the denominator may be zero. Steps
        count as independent, which gradients of disjoint batches are.
        """
        unbiased = self.weight - self.weight_squares / self.weight if self.steps else 0.0
        if not unbiased > 0:
            return UNKNOWN
        # Everything in units of its own size, so that no product overflows or vanishes.
        shrink = self.weight_squares / (self.weight * self.weight) / unbiased
        x_unit = max(abs(self.numerator), math.sqrt(shrink * self.spread_numerator))
        y_unit = max(abs(self.denominator), math.sqrt(shrink * self.spread_denominator))
        unit = x_unit / y_unit if y_unit > 0 else math.inf
        if not (x_unit > 0 and 0 < unit < math.inf):
            return UNKNOWN
        x, y = self.numerator / x_unit, self.denominator / y_unit
        reach = student(confidence, self.effective_steps - 1.0) ** 2 * shrink
        a = y * y - reach * (self.spread_denominator / y_unit / y_unit)
        b = x * y - reach * (self.spread_both / x_unit / y_unit)
        c = x * x - reach * (self.spread_numerator / x_unit / x_unit)
        return _positive_part(a, b, c, unit, is_positive=x > 0 and y > 0)

    def to_state(self) -> dict[str, int | float]:
        """Return the average as JSON."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RatioAverage:
        """Return the average that `to_state` described; other keys are left alone."""
        return cls(**{one.name: state[one.name] for one in fields(cls)})


def student(confidence: float, freedom: float) -> float:
    """Return how many standard errors hold a mean with probability `confidence`.

    Student's distribution, by its expansion in the inverse degrees of freedom (Abramowitz and
    Stegun 26.7.5), and for few of them by its integral: within 0.15 percent up to a confidence of
    0.9999. Less than one degree of freedom counts as one.

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
    # Newton's steps: as the density falls, none goes too far. Each is integrated by Simpson's rule.
    while (step := (confidence - covered) / density(y)) > 1e-9 * y:
        at = [density(y + step * part / 16) for part in range(17)]
        covered += step / 48 * (at[0] + 4 * sum(at[1::2]) + 2 * sum(at[2:16:2]) + at[16])
        y += step
    return math.sqrt(v) * math.sinh(y)


def checked_window(window: object) -> int:
    """Return the number of steps that an average is over.

    Raises:
        BatchSizeError: it is not an integer from 2 to a billion.
    """
    steps = whole(window)
    if steps is None or not 2 <= steps <= _LONGEST:
        raise BatchSizeError.cannot(
            f"average over {shown(window)} steps",
            why=f"it is not an integer from 2 to {_LONGEST:,}",
            instead="write a number of steps such as window=100",
        )
    return steps


def checked_confidence(confidence: Any) -> float:
    """Return the probability with which an interval holds.

    Raises:
        BatchSizeError: it is not a number from 0.01 to 0.9999.
    """
    is_number = isinstance(confidence, (int, float)) and not isinstance(confidence, bool)
    if not is_number or not _LEAST_CONFIDENCE <= confidence <= _MOST_CONFIDENCE:
        raise BatchSizeError.cannot(
            f"be sure with a probability of {shown(confidence)}",
            why=f"it is not a number from {_LEAST_CONFIDENCE} to {_MOST_CONFIDENCE}",
            instead="write a number such as confidence=0.9",
        )
    return float(confidence)


def _positive_part(a: float, b: float, c: float, unit: float, *, is_positive: bool) -> Interval:
    """The positive ratios R with `a R^2 - 2 b R + c <= 0`."""
    root = math.sqrt(max(0.0, b * b - a * c))
    if c <= 0 or b + root <= 0:  # the numerator may be zero
        lower = 0.0
    else:
        lower = c / (b + root)
    if a <= 0:  # the denominator may be zero
        return Interval(lower * unit, math.inf)
    if not is_positive:
        return UNKNOWN  # surely negative, which no variance or square is: something is wrong
    return Interval(lower * unit, (b + root) / a * unit)


def _is_plausible(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and abs(value) <= LARGEST


@dataclass(frozen=True, slots=True)
class _FollowsNoise(BatchSizePolicy):
    """A policy that follows the averages of the measured noise."""

    start: int
    maximum: int
    minimum: int | None = field(default=None, kw_only=True)
    window: int = field(default=100, kw_only=True)
    confidence: float = field(default=0.9, kw_only=True)

    def __post_init__(self) -> None:
        least, first, most = checked_bounds(
            self.start, self.maximum, self.minimum, follows_noise=True
        )
        fill(self, start=first, maximum=most, minimum=least, window=checked_window(self.window))
        fill(self, confidence=checked_confidence(self.confidence))


@final
@dataclass(frozen=True, slots=True)
class NoiseScale(_FollowsNoise):
    """Follows `c * B_noise`, where `B_noise = tr(Sigma) / |G|^2` is the gradient noise scale.

    Far below the noise scale, twice the batch needs about half the steps; far above it, about as
    many as before (McCandlish et al. 2018, arXiv 1812.06162, section 2.2). Both terms are averaged
    over `window` steps and divided at the end, with Fieller's interval around the ratio.

    The size stays as long as it lies within what the ends of the interval give, so that chance
    alone moves it little. Where it does not, it moves to what the noise scale gives; or, where that
    is not known to within a factor of 3, to the nearer end. The wrappers round it, or hold it back
    further: `PowerOfTwo(NoiseScale(8, 256))`.

    With a `power` it follows `c * B_noise ** power`. The root, `power=0.5`, costs least where a
    step costs as much as `c ** 2` samples: the same progress takes `1 + B_noise / B` steps and
    `B + B_noise` samples, and `c ** 2 * steps + samples` is least at `B = c * sqrt(B_noise)`.

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
        maximum: the size is never above it.
        c: which part of the noise scale the batch is; with a `power`, of that power of it.
        power: the power of the noise scale that the batch follows, above 0 and at most 1.
        minimum: the size is never below it; left out, `start`.
        window: how many measured steps the averages are over.
        confidence: the probability with which the interval holds the true noise scale.

    Raises:
        BatchSizeError: a size is not an integer of at least 2, `start` is not from `minimum` to
            `maximum`, `c` is not a positive number, or `power`, `window` or `confidence` cannot be.
    """

    c: float = field(default=1.0, kw_only=True)
    power: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        _FollowsNoise.__post_init__(self)
        c = checked_number(self.c, "the part of the noise scale that the batch is")
        power = checked_number(self.power, "the power of the noise scale", at_most=1.0)
        fill(self, c=c, power=power)

    def bind(self, horizon: Horizon) -> Bound:
        """Return the policy on one run."""
        del horizon
        return NoiseFollower(self, cast(int, self.minimum)).bound


@final
@dataclass(frozen=True, slots=True)
class NoiseFollower:
    """The noise scale on one run; remembers the size and the averages."""

    policy: NoiseScale
    minimum: int
    is_norm_test: bool = False
    """Whether it also reports the size that passes the norm test: its part of the noise scale."""

    @property
    def bound(self) -> Bound:
        """The policy."""
        return Bound(
            decide=self.decide,
            start={"size": self.policy.start, **RatioAverage().to_state()},
            reads=frozenset({"noise"}),
            bounds=(self.minimum, self.policy.maximum),
            log_values=self.log_values,
            sizes=lambda state: (state["size"],),
        )

    def log_values(self, state: PolicyState) -> Mapping[str, float]:
        """Return what is known: the noise scale, and each end of its interval."""
        confidence, average = self.policy.confidence, RatioAverage.from_state(state)
        if not average.is_over_enough(self.policy.window):
            return {}
        interval, found = average.interval(confidence), {}
        if average.ratio is not None and interval.is_within(STEADY):
            found["noise_scale"] = average.ratio
            if self.is_norm_test:
                found["norm_test"] = self._wanted(average.ratio)
        if interval.lower > 0:
            found["noise_scale_low"] = interval.lower
        if interval.upper < math.inf:
            found["noise_scale_high"] = interval.upper
        return found

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Return the size, moved where the noise is surely another one."""
        del timestamp
        average = RatioAverage.from_state(state).extended(
            signals.noise_numerator,
            signals.noise_denominator,
            window=self.policy.window,
            num_samples=signals.num_samples,
        )
        # The bounds of this run; it may have been resumed with others.
        size = rounded_size(cast(int, state["size"]), self.minimum, self.policy.maximum)
        size = self._moved(size, average)
        return size, {"size": size, **average.to_state()}

    def _moved(self, size: int, average: RatioAverage) -> int:
        if not average.is_over_enough(self.policy.window):
            return size
        interval = average.interval(self.policy.confidence)
        lowest, highest = self._wanted(interval.lower), self._wanted(interval.upper)
        if lowest <= size <= highest:
            return size
        wanted = lowest if size < lowest else highest
        if interval.is_within(STEADY) and average.ratio is not None:
            wanted = self._wanted(average.ratio)
        return rounded_size(wanted, self.minimum, self.policy.maximum)

    def _wanted(self, noise_scale: float) -> float:
        # An end of the interval may be below zero by a rounding error.
        return self.policy.c * math.pow(max(noise_scale, 0.0), self.policy.power)


@final
@dataclass(frozen=True, slots=True)
class NormTest(_FollowsNoise):
    """Keeps the variance of the batch's gradient at `eta^2` times its squared norm.

    The norm test is `tr(Sigma) / B <= eta^2 |G_B|^2` (Byrd et al. 2012, "Sample size selection in
    optimization methods for machine learning", Mathematical Programming 134:127, equation 3.7; De
    et al. 2017, arXiv 1610.05792; Bollapragada et al. 2018, arXiv 1710.11258; on several ranks Lau
    et al. 2024, arXiv 2412.21124). The norm of a batch's gradient contains its noise, so on average
    `|G_B|^2 = |G|^2 + tr(Sigma) / B`, and the smallest batch that passes has
    `(1 / eta^2 - 1) tr(Sigma) / |G|^2` samples: that part of the gradient noise scale.

    A single test is noisy. So the size follows the averages of `window` steps with a confidence
    interval, as `NoiseScale` does: it stays while it may be the smallest size that passes, and
    otherwise it moves there. It shrinks as well, down to `minimum`. The batches of the papers never
    shrink; `Monotone(NormTest(8, 256))` is the same here.

    >>> from stretto import Horizon, Timestamp
    >>> from stretto.batching import Signals
    >>> bound = NormTest(8, 256, eta=0.5, window=20).bind(Horizon("1ep"))
    >>> state = bound.start
    >>> for batch in range(40):
    ...     seen = Signals(noise_numerator=20.0 + batch % 3, noise_denominator=1.0)
    ...     size, state = bound.decide(Timestamp(batch=batch), state, seen)
    >>> size
    63

    Args:
        start: the size until the noise is known.
        maximum: the size is never above it.
        eta: the largest error of the batch's gradient, as a part of its norm; below 1.
        minimum: the size is never below it; left out, `start`.
        window: how many measured steps the averages are over.
        confidence: the probability with which the interval holds the true noise scale.

    Raises:
        BatchSizeError: a size is not an integer of at least 2, `start` is not from `minimum` to
            `maximum`, `eta` is not between 0 and 1, or `window` or `confidence` cannot be.
    """

    eta: float = field(default=0.9, kw_only=True)

    def __post_init__(self) -> None:
        _FollowsNoise.__post_init__(self)
        fill(self, eta=checked_number(self.eta, "the eta of a norm test", below=1.0))

    def bind(self, horizon: Horizon) -> Bound:
        """Return the policy on one run."""
        del horizon
        part = (1.0 - self.eta * self.eta) / self.eta / self.eta
        policy = NoiseScale(
            self.start,
            self.maximum,
            c=min(part, LARGEST),
            minimum=self.minimum,
            window=self.window,
            confidence=self.confidence,
        )
        return NoiseFollower(policy, cast(int, self.minimum), is_norm_test=True).bound
