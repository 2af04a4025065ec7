"""`RatioAverage`: the ratio of two averages over the last steps, and how well it is known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from statistics import NormalDist
from typing import Any, NamedTuple, TypeGuard, final

from stretto.errors import BatchSizeError, shown
from stretto.timing.number import whole

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
