"""Estimate the critical batch size from short runs at several batch sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, final

from stretto.batching.adaptive.averages import student
from stretto.errors import TrainingError

CONFIDENCE = 0.9
"""The probability with which an interval contains the true value."""
LEAST_STEPS = 4
"""A branch with fewer optimizer steps does not show how its batch size trains."""
_DIVERGED = 10.0
"""A size diverges if its excess is more than this many times the baseline loss (or the tolerance,
if that is larger). Student's distribution does not describe such losses."""

Verdict: TypeAlias = Literal["below", "open", "above"]
"""Whether a size is significantly below the critical one, above it, or neither."""
_VERDICT_TEXTS: dict[Verdict, str] = {
    "below": "within the tolerance",
    "open": "undecided",
    "above": "beyond it",
}
_HEADS = ("batch size", "steps", "learning rate", "loss", "excess", "")


class Branch(NamedTuple):
    """A short run from a checkpoint at one batch size."""

    size: int
    seed: int
    """Seed of the sample order. Branches with the same seed see the same samples."""
    steps: int
    learning_rate: float
    loss: float


@final
@dataclass(frozen=True, slots=True)
class SizeRow:
    """The result of all branches of one size."""

    size: int
    steps: int
    learning_rate: float
    loss: float
    """The mean over the seeds."""
    excess: float
    """Loss minus the baseline loss (of the smallest size), averaged over the seeds. Infinite if a
    branch diverges: its loss is not finite, or its excess is more than ten times the baseline
    loss."""
    reach: float
    """Half the width of the interval of the excess. Infinite for a single seed, and if all seeds
    have exactly the same loss."""
    verdict: Verdict


@final
@dataclass(frozen=True, slots=True)
class CriticalBatchSize:
    """The largest batch that trains as well per sample as the smallest one.

    Branches start from one checkpoint and see the same number of samples, each at a constant batch
    size with the matching learning rate. The critical size is where the mean excess loss over the
    smallest size crosses `tolerance`. It is interpolated linearly in the logarithm of the size.
    Source: Merrill et al. 2025 (arXiv 2505.23971), section 3. Intervals use Student's distribution
    of the differences between seeds.

    >>> branches = [
    ...     Branch(size, seed, 512 // size, 1e-3, loss + 0.001 * seed)
    ...     for size, loss in ((8, 2.0), (16, 2.0), (32, 2.005), (64, 2.025))
    ...     for seed in range(3)
    ... ]
    >>> found = CriticalBatchSize.of(branches, samples=512, tolerance=0.01)
    >>> round(found.size), found.low, found.high
    (38, 32, 64)
    """

    branches: tuple[Branch, ...]
    samples: int
    """Samples of each branch."""
    tolerance: float
    rows: tuple[SizeRow, ...]
    size: float | None
    """Where the mean excess crosses the tolerance; None if it does not."""
    low: int
    """Up to this size, all are significantly within the tolerance; at least the smallest."""
    high: int | None
    """The smallest size significantly beyond the tolerance; None if there is none."""

    @classmethod
    def of(cls, branches: Sequence[Branch], *, samples: int, tolerance: float) -> CriticalBatchSize:
        """Evaluate branches of two or more sizes, one for each size and seed.

        Raises:
            TrainingError: the smallest size diverges, or the tolerance is not a number of at
                least 0.
        """
        check_tolerance(tolerance)
        sizes = sorted({branch.size for branch in branches})
        for branch in branches:
            check_baseline(branch, sizes[0])
        rows = tuple(_row(size, sizes[0], branches, tolerance) for size in sizes)
        within = next((n for n, row in enumerate(rows) if row.verdict != "below"), len(rows))
        return cls(
            branches=tuple(branches),
            samples=samples,
            tolerance=tolerance,
            rows=rows,
            size=_crossing(rows, tolerance),
            low=rows[max(within - 1, 0)].size,
            high=next((row.size for row in rows if row.verdict == "above"), None),
        )

    def __str__(self) -> str:
        if self.high is None and self.low == self.rows[0].size:
            bounds = "not sure of any size"
        elif self.high is None:
            bounds = f"at least {self.low:,}"
        else:
            bounds = f"between {self.low:,} and {self.high:,}"
        about = "" if self.size is None else f"about {self.size:,.0f}, "
        return (
            f"critical batch size: {about}{bounds} "
            f"(loss within {self.tolerance:g} of that at {self.rows[0].size:,} after "
            f"{self.samples:,} samples, {CONFIDENCE:.0%} confidence)"
        )

    def table(self) -> str:
        """Return one line for each size.

        >>> branches = [Branch(8, 0, 64, 0.001, 2.5), Branch(16, 0, 32, 0.0014142, 2.5625)]
        >>> print(CriticalBatchSize.of(branches, samples=512, tolerance=0.01).table())
        batch size  steps  learning rate    loss   excess
                 8     64          0.001  2.5000           baseline
                16     32       0.001414  2.5625  +0.0625  undecided (one seed)
        """
        lines = [_HEADS, *map(self._cells, self.rows)]
        widths = [max(map(len, column)) for column in list(zip(*lines, strict=True))[:5]]
        aligned = [[*map(str.rjust, line, widths), line[5]] for line in lines]
        return "\n".join("  ".join(line).rstrip() for line in aligned)

    def _cells(self, row: SizeRow) -> tuple[str, ...]:
        said, excess = _VERDICT_TEXTS[row.verdict], f"{row.excess:+.4f}"
        if row is self.rows[0]:
            said, excess = "baseline", ""
        elif math.isinf(row.excess):
            said, excess = "diverges", ""
        elif math.isinf(row.reach):
            is_single = len(self.branches) == len(self.rows)
            said += " (one seed)" if is_single else " (the same with every seed)"
        else:
            excess += f" +- {row.reach:.4f}"
        loss = f"{row.loss:.4f}" if abs(row.loss) < 1e6 else f"{row.loss:.3g}"
        return f"{row.size:,}", f"{row.steps:,}", f"{row.learning_rate:.4g}", loss, excess, said


def default_sizes(size: int, samples: int) -> list[int]:
    """Return `size / 2`, `size`, and its doublings while branches have enough steps.

    There are at least two sizes, even if branches are too short for the second.

    >>> default_sizes(16, 1024)
    [8, 16, 32, 64, 128, 256]
    """
    wanted = sorted({max(1, size // 2), *(size * 2**power for power in range(5))})
    return wanted[: max(2, sum(one * LEAST_STEPS <= samples for one in wanted))]


def whole_steps(samples: int, sizes: Sequence[int]) -> int:
    """Round `samples` down so that all sizes have full batches only, if possible.

    If that removes more than a quarter, or leaves too few steps for the largest size, only the
    largest size has full batches only.

    >>> whole_steps(1000, [8, 16]), whole_steps(40, [6, 10])
    (992, 40)
    """
    whole = samples - samples % math.lcm(*sizes)
    least = max(0.75 * samples, LEAST_STEPS * sizes[-1])
    return whole if whole >= least else samples - samples % sizes[-1]


def check_baseline(branch: Branch, smallest: int) -> None:
    """Refuse a baseline that diverged.

    Raises:
        TrainingError: its loss is not finite.
    """
    if branch.size == smallest and not math.isfinite(branch.loss):
        raise TrainingError.cannot(
            f"compare losses with the baseline run (batch size {smallest:,})",
            why=f"it diverged: its loss is {branch.loss} after {branch.steps:,} steps",
            instead="name a checkpoint with finite weights, or lower the learning rate in the "
            "run file",
        )


def check_tolerance(tolerance: float) -> None:
    """Refuse a tolerance that is not a number of at least 0.

    Raises:
        TrainingError: it is not a number of at least 0.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise TrainingError.cannot(
            f"tolerate a loss that is worse by {tolerance}",
            why="it is not a number of at least 0",
            instead="write for example --tolerance 0.01",
        )


def check_sizes(sizes: Sequence[int], samples: int) -> None:
    """Refuse sizes that branches of this length cannot compare.

    Raises:
        TrainingError: there are fewer than two, they are not ascending, or the largest has too few
            steps.
    """
    if len(sizes) < 2 or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise TrainingError.cannot(
            f"compare the batch sizes {', '.join(map(str, sizes))}",
            why="they are not two or more in ascending order",
            instead="write for example --sizes 16,32,64,128",
        )
    if samples < LEAST_STEPS * sizes[-1]:
        raise TrainingError.cannot(
            f"compare batches of {sizes[-1]:,} over {samples:,} samples",
            why=f"that is less than {LEAST_STEPS} steps",
            instead=f"write --over {LEAST_STEPS * sizes[-1]}sp or more, or smaller --sizes",
        )


def _row(size: int, smallest: int, branches: Sequence[Branch], tolerance: float) -> SizeRow:
    own = [branch for branch in branches if branch.size == size]
    base = {branch.seed: branch.loss for branch in branches if branch.size == smallest}
    differences = [branch.loss - base[branch.seed] for branch in own]
    worst = {seed: _DIVERGED * max(abs(loss), tolerance) for seed, loss in base.items()}
    diverges = not all(
        math.isfinite(branch.loss) and branch.loss - base[branch.seed] <= worst[branch.seed]
        for branch in own
    )
    excess = math.inf if diverges else statistics.mean(differences)
    reach, count = math.inf, len(differences)
    if size == smallest or diverges:
        reach = 0.0
    elif len({branch.loss for branch in own}) > 1:
        # Bitwise equal losses come from one order of samples, which shows no variation.
        reach = student(CONFIDENCE, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    verdict: Verdict = "open"
    if excess + reach <= tolerance:
        verdict = "below"
    elif excess - reach > tolerance:
        verdict = "above"
    loss = statistics.mean(branch.loss for branch in own)
    return SizeRow(size, own[0].steps, own[0].learning_rate, loss, excess, reach, verdict)


def _crossing(rows: Sequence[SizeRow], tolerance: float) -> float | None:
    """Return the size where the interpolated mean excess first crosses the tolerance."""
    for before, after in pairwise(rows):
        if after.excess > tolerance:
            if not math.isfinite(after.excess):
                return float(before.size)
            part = (tolerance - before.excess) / (after.excess - before.excess)
            return float(before.size * (after.size / before.size) ** part)
    return None
