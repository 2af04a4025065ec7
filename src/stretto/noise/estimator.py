"""`NoiseEstimator`: the noise scale over many steps, with what is known of it."""

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
from stretto.batching.policy import as_float, checked_size
from stretto.noise.norms import total
from stretto.noise.terms import NoiseTerms, noise_terms


@final
class NoiseEstimator:
    """Averages what steps measure into `B_simple = tr(Sigma) / |mu|^2`, the gradient noise scale.

    It is the batch size at which the noise of the gradient is as large as the gradient (McCandlish
    et al. 2018, arXiv 1812.06162, equation 2.9). Numerator and denominator are averaged apart, with
    weights that fall geometrically, and divided at the end; the interval is Fieller's. No number
    is given before about 20 steps were measured (or three quarters of a shorter window) and the
    interval spans at most a factor of 3. Where it hardly ever does, it does when the denominator
    happens to come out high: what is given now and then is too small, by a quarter and more.

    >>> estimator = NoiseEstimator(window=50)
    >>> for step in range(40):
    ...     estimator.observe([3.0 + step % 2, 5.0, 4.0, 4.0], [8, 8, 8, 2], whole=2.0)
    >>> round(estimator.noise_scale, 1), [round(end, 1) for end in estimator.interval]
    (14.6, [14.1, 15.1])

    Args:
        window: how many steps the averages are over.
        confidence: the probability with which the interval holds the true ratio.

    Raises:
        BatchSizeError: `window` or `confidence` cannot be.
    """

    __slots__ = ("_average", "_confidence", "_window")

    def __init__(self, *, window: int = 100, confidence: float = 0.9) -> None:
        self._window = checked_window(window)
        self._confidence = checked_confidence(confidence)
        self._average = RatioAverage()

    def add(self, terms: NoiseTerms | None, num_samples: float | None = None) -> None:
        """Take what one step measured; what is None or not finite is passed over.

        Args:
            terms: what it measured.
            num_samples: those of its batch: how much it counts beside other steps. Left out, all
                count alike, which is right where their batches are.
        """
        if terms is not None:
            numerator, denominator = map(as_float, terms)
            self._average = self._average.extended(
                numerator, denominator, window=self._window, num_samples=num_samples
            )

    def observe(self, squares: Iterable[float], sizes: Iterable[float], whole: float) -> None:
        """Take the squared norms of one step's gradients, as `noise_terms` does."""
        sizes = list(sizes)
        self.add(noise_terms(squares, sizes, whole), total(sizes))

    @property
    def steps(self) -> int:
        """How many steps were measured."""
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
        """Whether the noise scale is known well enough to be told."""
        return self._average.is_steady(self._window, self._confidence)

    @property
    def noise_scale(self) -> float | None:
        """`B_simple` in samples; None before it is steady."""
        return self._average.ratio if self.is_steady else None

    @property
    def interval(self) -> Interval | None:
        """Where `B_simple` lies with the probability `confidence`; None before it is steady."""
        return self._interval if self.is_steady else None

    def gain(self, size: int, reference: int) -> float:
        """Return the AdaScale gain of a batch over one of `reference` samples.

        `r = (S/b + G2) / (S/B + G2)` for a batch of B samples and a reference of b, where S is
        tr(Sigma) and G2 is |mu|^2: between 1 and `B / b` (Johnson et al. 2020, arXiv 2007.05105,
        equation 3). 1 before enough steps were measured.

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
        # As parts of their sum, so that nothing vanishes however small both are.
        noise = variance / (variance + square)
        return (noise / reference + (1.0 - noise)) / (noise / size + (1.0 - noise))

    @property
    def _interval(self) -> Interval:
        return self._average.interval(self._confidence)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages as JSON."""
        return self._average.to_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved averages."""
        for value in state.values():
            math.isfinite(value)  # raises if that is no number
        self._average = RatioAverage.from_state(state)
