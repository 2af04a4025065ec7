"""The critical batch size, from the losses of short runs at several batch sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, final

from stretto.batching.adaptive.averages import student
from stretto.errors import TrainingError, cannot

CONFIDENCE = 0.9
"""The probability with which an interval contains the true value."""
LEAST_STEPS = 4
"""A branch with fewer optimizer steps does not show how its batch size trains."""
_DIVERGED = 10.0
"""A size diverges if its excess is more than this many times the baseline loss (or the tolerance,
if that is larger). Student's distribution does not describe such losses."""

Verdict: TypeAlias = Literal["below", "open", "above"]
"""Whether a size is surely below the critical one, surely above it, or neither."""
_SAID: dict[Verdict, str] = {
    "below": "within the tolerance",
    "open": "cannot be told",
    "above": "beyond it",
}
_HEADS = ("batch size", "steps", "learning rate", "loss", "excess", "")


class Branch(NamedTuple):
    """A short run from a checkpoint at one batch size."""

    size: int
    seed: int
    """Of the order of samples. Branches with the same seed see the same samples."""
    steps: int
    learning_rate: float
    loss: float


@final
@dataclass(frozen=True, slots=True)
class SizeRow:
    """What the branches of one size show."""

    size: int
    steps: int
    learning_rate: float
    loss: float
    """The mean over the seeds."""
    excess: float
    """How much the loss is above that of the smallest size: the mean of the differences by seed.
    Infinite if a branch diverges: its loss is not finite, or its excess is more than ten times the
    loss of the smallest size."""
    reach: float
    """Half the width of the interval of the excess. Infinite for a single seed, and if all seeds
    have exactly the same loss."""
    verdict: Verdict


@final
@dataclass(frozen=True, slots=True)
class CriticalBatchSize:
    """The largest batch that trains as well per sample as the smallest one.

    Branches start from one checkpoint and see equally many samples, each at a constant batch size
    with the learning rate that goes with it. The critical size is where the mean excess of the loss
    over that of the smallest size passes `tolerance`, interpolated between neighbouring sizes
    linearly in the logarithm of the size. Source: Merrill et al. 2025 (arXiv 2505.23971), section
    3; the intervals are of Student's distribution over the differences by seed.

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
    """How many each branch saw."""
    tolerance: float
    rows: tuple[SizeRow, ...]
    size: float | None
    """Where the mean excess passes the tolerance; None if it does at no size that was tried."""
    low: int
    """The largest size up to which all are surely within the tolerance; at least the smallest."""
    high: int | None
    """The smallest size that is surely not; None if there is none."""

    @classmethod
    def of(cls, branches: Sequence[Branch], *, samples: int, tolerance: float) -> CriticalBatchSize:
        """Return what `branches` show: one of each size, two or more, with each seed.

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
                 8     64          0.001  2.5000           the yardstick
                16     32       0.001414  2.5625  +0.0625  cannot be told (one seed)
        """
        lines = [_HEADS, *map(self._cells, self.rows)]
        widths = [max(map(len, column)) for column in list(zip(*lines, strict=True))[:5]]
        aligned = [[*map(str.rjust, line, widths), line[5]] for line in lines]
        return "\n".join("  ".join(line).rstrip() for line in aligned)

    def _cells(self, row: SizeRow) -> tuple[str, ...]:
        said, excess = _SAID[row.verdict], f"{row.excess:+.4f}"
        if row is self.rows[0]:
            said, excess = "the yardstick", ""
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
    """Return half of `size`, itself, and its doublings as far as branches have enough steps.

    They are two at least, also if branches of so many samples are too short for the second.

    >>> default_sizes(16, 1024)
    [8, 16, 32, 64, 128, 256]
    """
    wanted = sorted({max(1, size // 2), *(size * 2**power for power in range(5))})
    return wanted[: max(2, sum(one * LEAST_STEPS <= samples for one in wanted))]


def whole_steps(samples: int, sizes: Sequence[int]) -> int:
    """Return at most `samples`, so that the last batch of every size is whole if possible.

    If that takes more than a quarter off, or leaves the largest size too few steps, the last batch
    of the largest size is whole.

    >>> whole_steps(1000, [8, 16]), whole_steps(40, [6, 10])
    (992, 40)
    """
    whole = samples - samples % math.lcm(*sizes)
    least = max(0.75 * samples, LEAST_STEPS * sizes[-1])
    return whole if whole >= least else samples - samples % sizes[-1]


def check_baseline(branch: Branch, smallest: int) -> None:
    """Refuse a branch of the smallest size whose loss the others cannot be compared with.

    Raises:
        TrainingError: its loss is not finite.
    """
    if branch.size == smallest and not math.isfinite(branch.loss):
        raise TrainingError(
            cannot(
                f"hold losses against that of batches of {smallest:,}",
                why=f"it is {branch.loss} after {branch.steps:,} steps, and it is the smallest",
                instead="name a checkpoint whose weights are finite, or a run file with a lower "
                "learning rate",
            )
        )


def check_tolerance(tolerance: float) -> None:
    """Refuse what no loss can be worse by.

    Raises:
        TrainingError: it is not a number of at least 0.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise TrainingError(
            cannot(
                f"tolerate a loss that is worse by {tolerance}",
                why="it is not a number of at least 0",
                instead="write for example --tolerance 0.01",
            )
        )


def check_sizes(sizes: Sequence[int], samples: int) -> None:
    """Refuse sizes that branches of so many samples cannot compare.

    Raises:
        TrainingError: there are fewer than two, they are not ascending, or the largest has too few
            steps.
    """
    if len(sizes) < 2 or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise TrainingError(
            cannot(
                f"compare the batch sizes {', '.join(map(str, sizes))}",
                why="they are not two or more in ascending order",
                instead="write for example --sizes 16,32,64,128",
            )
        )
    if samples < LEAST_STEPS * sizes[-1]:
        raise TrainingError(
            cannot(
                f"compare batches of {sizes[-1]:,} over {samples:,} samples",
                why=f"that is less than {LEAST_STEPS} steps",
                instead=f"write --over {LEAST_STEPS * sizes[-1]}sp or more, or smaller --sizes",
            )
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
        # Equal losses to the last bit come from one order of samples, which shows no variation.
        reach = student(CONFIDENCE, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    verdict: Verdict = "open"
    if excess + reach <= tolerance:
        verdict = "below"
    elif excess - reach > tolerance:
        verdict = "above"
    loss = statistics.mean(branch.loss for branch in own)
    return SizeRow(size, own[0].steps, own[0].learning_rate, loss, excess, reach, verdict)


def _crossing(rows: Sequence[SizeRow], tolerance: float) -> float | None:
    """The size at which the line through the mean excesses passes the tolerance first."""
    for before, after in pairwise(rows):
        if after.excess > tolerance:
            if not math.isfinite(after.excess):
                return float(before.size)
            part = (tolerance - before.excess) / (after.excess - before.excess)
            return float(before.size * (after.size / before.size) ** part)
    return None
