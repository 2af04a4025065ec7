"""Unbiased estimates of the two terms of the noise scale, for any micro-batch sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, SupportsFloat

from stretto.batching import Signals
from stretto.errors import TrainingError, shown
from stretto.noise.norms import total


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

    weighted: float
    """`sum_j n_j |g_j|^2`."""
    groups: float
    """Number of groups with any units."""
    units: float
    """`N = sum_j n_j`."""
    whole: float
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
    if len(squares) != len(sizes):
        raise TrainingError.cannot(
            f"measure the noise of {len(squares)} gradients",
            why=f"there are {len(sizes)} sizes",
            instead="pass the size of each group",
        )
    if any(size < 0 for size in sizes):
        raise TrainingError.cannot(
            f"measure the noise of gradients of {min(sizes):g} samples",
            why="a size is at least 0",
            instead="pass the size of each group",
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
    raise TrainingError.cannot(
        f"measure the noise of gradients with {shown(value)}",
        why="it is not a number",
        instead="pass squared norms, and the size of each group",
    )
