"""`NoiseEstimator`: the gradient noise scale averaged over steps, with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, final

from stretto.batching.adaptive.averages import (
    Interval,
    RatioAverage,
    checked_confidence,
    checked_window,
)
from stretto.batching.policy import checked_size
from stretto.batching.signals import as_float
from stretto.noise.norms import total
from stretto.noise.terms import NoiseTerms, noise_terms


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
