"""The two terms of the noise scale from the gradients of one step, unbiased for any sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, SupportsFloat

from stretto.batching import Signals
from stretto.errors import TrainingError, cannot, shown
from stretto.noise.norms import total


class NoiseTerms(NamedTuple):
    """Estimates of one step, unbiased and very noisy: average each over many steps, then divide.

    >>> NoiseTerms(numerator=120.0, denominator=-0.5).denominator
    -0.5
    """

    numerator: float
    """Of tr(Sigma), the variance of the gradient of one sample."""
    denominator: float
    """Of |mu|^2, the squared norm of the true gradient; often negative in a single step."""

    @classmethod
    def of(cls, signals: Signals) -> NoiseTerms | None:
        """Return what a step has measured; None where it has not."""
        if signals.noise_numerator is None or signals.noise_denominator is None:
            return None
        return cls(signals.noise_numerator, signals.noise_denominator)


class NoiseSums(NamedTuple):
    """What ranks must add up to know the terms: every field is a sum over the ranks.

    The groups are micro-batches or ranks: group j has `n_j` units (samples, or tokens) and a mean
    gradient `g_j`.

    >>> alone = NoiseSums.of([8.0, 4.0], sizes=[2, 2], whole=5.0)
    >>> alone.terms(num_samples=4)
    NoiseTerms(numerator=4.0, denominator=4.0)
    """

    weighted: float
    """`sum_j n_j |g_j|^2`."""
    groups: float
    """How many groups have any unit."""
    units: float
    """`N = sum_j n_j`."""
    whole: float
    """`|sum_j n_j g_j|^2`, over all ranks."""

    @classmethod
    def of(cls, squares: Sequence[float], *, sizes: Sequence[float], whole: float) -> NoiseSums:
        """Return the sums of one rank, from squared norms of mean gradients.

        Args:
            squares: `|g_j|^2` of each group.
            sizes: `n_j` of each.
            whole: `|G|^2`, where `G` is the mean gradient of all.
        """
        pairs = [(square, size) for square, size in zip(squares, sizes, strict=True) if size]
        units = total(size for _, size in pairs)
        weighted = total(size * square for square, size in pairs)
        return cls(weighted, len(pairs), units, units * units * whole)

    def __add__(self, other: object) -> NoiseSums:
        """Return the sums over both."""
        if not isinstance(other, NoiseSums):
            return NotImplemented
        return NoiseSums(*(mine + more for mine, more in zip(self, other, strict=True)))

    def terms(self, num_samples: float) -> NoiseTerms | None:
        """Return the terms for one sample; None from fewer than two groups, or where not finite.

        `S = (sum_j n_j |g_j|^2 / N - |G|^2) * N / (k - 1)` and `G2 = |G|^2 - S / N`, from
        `E |g_j|^2 = |mu|^2 + tr(Sigma) / n_j` (McCandlish et al. 2018, arXiv 1812.06162, appendix
        A.1, for two sizes; here for k groups of any sizes). Units other than samples are counted
        as parts of a sample, of which a sample has `N / num_samples`. Their gradients count as
        independent: where samples have unequal numbers of units that are alike within a sample, S
        is too small. (What would be unbiased there, `k / (k - 1) * sum_j (n_j / N)^2 |g_j - G|^2`,
        needs `sum_j n_j^2 g_j`, which has the size of all parameters.)
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
    """Return the terms of one step from squared norms of the mean gradients of its groups.

    For groups of equal size this is the usual estimator; taking uneven groups for even ones, as
    is often done, is not unbiased: with sizes 8, 8, 8 and 2 it gives 1.74 times the variance.

    >>> noise_terms([8.0, 4.0], sizes=[2, 2], whole=5.0)
    NoiseTerms(numerator=4.0, denominator=4.0)

    Args:
        squares: `|g_j|^2` of each group: a micro-batch, or what a rank has.
        sizes: how many samples each group has.
        whole: `|G|^2`, where `G = sum_j n_j g_j / N` is the gradient of the whole step.

    Returns:
        None from fewer than two groups, or where something is not finite.

    Raises:
        TrainingError: there are not as many sizes as norms, one is below 0, or something is not a
            number.
    """
    squares, sizes = list(map(_number, squares)), list(map(_number, sizes))
    if len(squares) != len(sizes):
        raise TrainingError(
            cannot(
                f"measure the noise of {len(squares)} gradients",
                why=f"there are {len(sizes)} sizes",
                instead="pass the size of each group",
            )
        )
    if any(size < 0 for size in sizes):
        raise TrainingError(
            cannot(
                f"measure the noise of gradients of {min(sizes):g} samples",
                why="no gradient is of fewer than 0",
                instead="pass the size of each group",
            )
        )
    sums = NoiseSums.of(squares, sizes=sizes, whole=_number(whole))
    return sums.terms(sums.units)


def _number(value: object) -> float:
    """A number as a float, be it a tensor of one element; infinite where no float is as large."""
    try:
        if isinstance(value, SupportsFloat) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        pass  # of several elements
    raise TrainingError(
        cannot(
            f"measure the noise of gradients with {shown(value)}",
            why="it is not a number",
            instead="pass squared norms, and the size of each group",
        )
    )
