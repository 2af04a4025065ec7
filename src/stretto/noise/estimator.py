"""The gradient noise scale, estimated from sums of squared norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat, final

from stretto.batching import NO_SIGNALS, Signals
from stretto.batching.noise_scale import (
    Interval,
    RatioAverage,
    checked_confidence,
    checked_window,
)
from stretto.batching.policy import as_float, checked_size
from stretto.errors import TrainingError
from stretto.runtime.micro_gradients import total


class NoiseTerms(NamedTuple):
    """Unbiased but noisy estimates from one step; average them over steps, then divide.

    >>> NoiseTerms(numerator=120.0, denominator=-0.5).denominator
    -0.5
    """

    numerator: float
    """Estimate of tr(Sigma), the variance of the gradient of one sample."""
    denominator: float
    """Estimate of |mu|^2, the squared norm of the true gradient; often negative in one step."""

    @classmethod
    def of(cls, signals: Signals) -> NoiseTerms | None:
        """Return the terms that a step has measured; None if it has not."""
        if signals.noise_numerator is None or signals.noise_denominator is None:
            return None
        return cls(signals.noise_numerator, signals.noise_denominator)


class NoiseSums(NamedTuple):
    """Sums from which the terms follow; ranks add them up.

    The groups are micro-batches or ranks: group j has `n_j` units (samples, or tokens) and a mean
    gradient `g_j`.

    >>> alone = NoiseSums.of([8.0, 4.0], sizes=[2, 2], whole=5.0)
    >>> alone.terms(num_samples=4)
    NoiseTerms(numerator=4.0, denominator=4.0)
    """

    weighted: float = 0.0
    """`sum_j n_j |g_j|^2`."""
    groups: float = 0.0
    """Number of groups with any units."""
    units: float = 0.0
    """`N = sum_j n_j`."""
    whole: float = 0.0
    """`|sum_j n_j g_j|^2`, over all ranks."""

    @classmethod
    def of(cls, squares: Sequence[float], *, sizes: Sequence[float], whole: float) -> NoiseSums:
        """Return the sums of one rank, from squared norms of mean gradients.

        Args:
            squares: `|g_j|^2` of each group.
            sizes: `n_j` of each group.
            whole: `|G|^2` of the overall mean gradient `G`.
        """
        pairs = [(square, size) for square, size in zip(squares, sizes, strict=True) if size]
        units = total(size for _, size in pairs)
        weighted = total(size * square for square, size in pairs)
        return cls(weighted, len(pairs), units, units * units * whole)

    def __add__(self, other: object) -> NoiseSums:
        """Add two sets of sums."""
        if not isinstance(other, NoiseSums):
            return NotImplemented
        return NoiseSums(*(mine + more for mine, more in zip(self, other, strict=True)))

    def terms(self, num_samples: float) -> NoiseTerms | None:
        """Return the terms per sample; None for fewer than two groups, or if not finite.

        `S = (sum_j n_j |g_j|^2 / N - |G|^2) * N / (k - 1)` and `G2 = |G|^2 - S / N`, from
        `E |g_j|^2 = |mu|^2 + tr(Sigma) / n_j` (McCandlish et al. 2018, arXiv 1812.06162, appendix
        A.1, for two sizes; here for k groups of any sizes). If units are not samples, a sample has
        `N / num_samples` units, whose gradients count as independent. If samples have different
        numbers of units, and the units of a sample are similar, S is too small. (The unbiased
        estimate, `k / (k - 1) * sum_j (n_j / N)^2 |g_j - G|^2`, needs `sum_j n_j^2 g_j`, which is
        as large as all parameters.)
        """
        if not (self.groups >= 2 and self.units > 0 and num_samples > 0):
            return None
        square = self.whole / (self.units * self.units)
        variance = (self.weighted - self.units * square) / (self.groups - 1)
        terms = NoiseTerms(variance * num_samples / self.units, square - variance / self.units)
        return terms if all(map(math.isfinite, terms)) else None

    def signals(self, num_samples: int) -> Signals:
        """Return the terms of a step as signals for a policy, from the sums of all ranks."""
        terms = self.terms(num_samples)
        if terms is None:
            return NO_SIGNALS
        return Signals(
            noise_numerator=terms.numerator,
            noise_denominator=terms.denominator,
            num_samples=num_samples,
        )


def noise_terms(
    squares: Iterable[float], sizes: Iterable[float], whole: float
) -> NoiseTerms | None:
    """Return the terms of one step from the squared norms of its groups' mean gradients.

    For groups of equal size this is the usual estimator. Treating unequal groups as equal is
    biased: with sizes 8, 8, 8 and 2 the variance is 1.74 times too large.

    >>> noise_terms([8.0, 4.0], sizes=[2, 2], whole=5.0)
    NoiseTerms(numerator=4.0, denominator=4.0)

    Args:
        squares: `|g_j|^2` of each group (a micro-batch, or the batch of a rank).
        sizes: number of samples in each group.
        whole: `|G|^2`, where `G = sum_j n_j g_j / N` is the gradient of the whole step.

    Returns:
        None for fewer than two groups, or if a value is not finite.

    Raises:
        TrainingError: the numbers of sizes and norms differ, a size is negative, or a value is not
            a number.
    """
    squares, sizes = list(map(_number, squares)), list(map(_number, sizes))
    if len(squares) != len(sizes) or any(size < 0 for size in sizes):
        raise TrainingError.bad(
            "sizes", sizes, "it is not one size for each gradient", "pass numbers of samples"
        )
    sums = NoiseSums.of(squares, sizes=sizes, whole=_number(whole))
    return sums.terms(sums.units)


def _number(value: object) -> float:
    """Return a number or a tensor of one element as a float; inf if it overflows."""
    try:
        if isinstance(value, SupportsFloat) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        pass  # several elements
    raise TrainingError.bad("a norm or size", value, "it is not a number", "pass squared norms")


@final
class NoiseEstimator:
    """Estimates the gradient noise scale `B_simple = tr(Sigma) / |mu|^2` from many steps.

    It is the batch size at which the noise of the gradient is as large as the gradient (McCandlish
    et al. 2018, arXiv 1812.06162, equation 2.9). Numerator and denominator have separate moving
    averages with geometric weights, which are divided at the end. The interval is Fieller's. The
    estimate is None until about 20 steps are measured (or three quarters of a shorter window) and
    the interval spans at most a factor of 3. If the interval is rarely that narrow, the estimates
    are biased: it is narrow when the denominator is high by chance, so they are too small by a
    quarter or more.

    >>> estimator = NoiseEstimator(window=50)
    >>> for step in range(40):
    ...     estimator.observe([3.0 + step % 2, 5.0, 4.0, 4.0], [8, 8, 8, 2], whole=2.0)
    >>> round(estimator.noise_scale, 1), [round(end, 1) for end in estimator.interval]
    (14.6, [14.1, 15.1])

    Args:
        window: the number of steps in the averages.
        confidence: the probability that the interval contains the true ratio.

    Raises:
        BatchSizeError: `window` or `confidence` is out of range.
    """

    __slots__ = ("_average", "_confidence", "_window")

    def __init__(self, *, window: int = 100, confidence: float = 0.9) -> None:
        self._window = checked_window(window)
        self._confidence = checked_confidence(confidence)
        self._average = RatioAverage()

    def add(self, terms: NoiseTerms | None, num_samples: float | None = None) -> None:
        """Add the terms of one step; None and non-finite terms are ignored.

        Args:
            terms: the terms that the step measured.
            num_samples: the samples in its batch, which weight the step. Default: equal weights,
                which is right if all batches have the same size.
        """
        if terms is not None:
            numerator, denominator = map(as_float, terms)
            self._average = self._average.extended(
                numerator, denominator, window=self._window, num_samples=num_samples
            )

    def observe(self, squares: Iterable[float], sizes: Iterable[float], whole: float) -> None:
        """Add a step by the squared norms of its gradients; see `noise_terms`."""
        sizes = list(sizes)
        self.add(noise_terms(squares, sizes, whole), total(sizes))

    @property
    def steps(self) -> int:
        """Number of measured steps."""
        return self._average.steps

    @property
    def numerator(self) -> float | None:
        """The average of tr(Sigma); None before the first step."""
        return self._average.numerator if self.steps else None

    @property
    def denominator(self) -> float | None:
        """The average of |mu|^2; None before the first step."""
        return self._average.denominator if self.steps else None

    @property
    def is_steady(self) -> bool:
        """Whether the noise scale is known precisely enough."""
        return self._average.is_steady(self._window, self._confidence)

    @property
    def noise_scale(self) -> float | None:
        """`B_simple` in samples; None before it is steady."""
        return self._average.ratio if self.is_steady else None

    @property
    def interval(self) -> Interval | None:
        """The confidence interval of `B_simple`; None before it is steady."""
        return self._interval if self.is_steady else None

    def gain(self, size: int, reference: int) -> float:
        """Return the AdaScale gain of a batch over one of `reference` samples.

        `r = (S/b + G2) / (S/B + G2)` for a batch of B samples and a reference of b, where S is
        tr(Sigma) and G2 is |mu|^2: between 1 and `B / b` (Johnson et al. 2020, arXiv 2007.05105,
        equation 3). It is 1 until enough steps are measured.

        >>> estimator = NoiseEstimator()
        >>> for step in range(40):
        ...     estimator.add(NoiseTerms(64.0, 1.0))
        >>> round(estimator.gain(128, 64), 3)
        1.333

        Raises:
            BatchSizeError: a size is not an integer of at least 1.
        """
        size, reference = checked_size(size), checked_size(reference)
        average = self._average
        variance, square = max(0.0, average.numerator), max(0.0, average.denominator)
        if not average.has_begun(self._window) or variance + square == 0:
            return 1.0
        # Fractions of the sum, so that nothing underflows.
        noise = variance / (variance + square)
        return (noise / reference + (1.0 - noise)) / (noise / size + (1.0 - noise))

    @property
    def _interval(self) -> Interval:
        return self._average.interval(self._confidence)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages as JSON."""
        return self._average.to_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved averages."""
        for value in state.values():
            math.isfinite(value)  # raises if it is not a number
        self._average = RatioAverage.from_state(state)
