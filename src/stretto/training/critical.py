"""The critical batch size by measurement: what branches of a run at several sizes tell of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, final

from stretto.batching.averages import student
from stretto.errors import TrainingError, cannot

CONFIDENCE = 0.9
"""The probability with which an interval holds what it is of."""
LEAST_STEPS = 4
"""Fewer optimizer steps than this do not tell how a size trains."""
_DIVERGED = 10.0
"""An excess of more than so many times the loss (or the tolerance, if that is more) is that of a
size that diverges. Student's distribution knows nothing of such: they spread as far as they lie."""

Verdict: TypeAlias = Literal["below", "open", "above"]
"""Whether a size is surely below the critical one, surely above, or neither."""


class Branch(NamedTuple):
    """A short run from a checkpoint at one batch size."""

    size: int
    seed: int
    """Of the order of samples; branches of one seed see the same samples."""
    steps: int
    learning_rate: float
    loss: float


@final
@dataclass(frozen=True, slots=True)
class SizeRow:
    """What the branches of one size say."""

    size: int
    steps: int
    learning_rate: float
    loss: float
    """The mean over the seeds."""
    excess: float
    """By how much it is above that of the smallest size: the mean of the differences by seed.
    Infinite where a branch diverges: its loss is not finite, or in excess by more than ten
    times the loss of the smallest size."""
    reach: float
    """Half the width of the interval of the excess; infinite for a single seed, and for several
    that have come to the very same."""
    verdict: Verdict


@final
@dataclass(frozen=True, slots=True)
class CriticalBatchSize:
    """The largest batch that trains as well by the sample as the smallest one, from branches.

    Branches start from one checkpoint and see equally many samples, each at a constant batch size
    with the learning rate that goes with it. The critical size is where the mean excess of the loss
    over that of the smallest size passes `tolerance`, on the line between two neighbours in the
    logarithm of the size. Source: Merrill et al. 2025 (arXiv 2505.23971), section 3; the intervals
    are of Student's distribution over the differences by seed.

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
    """What each branch saw."""
    tolerance: float
    rows: tuple[SizeRow, ...]
    size: float | None
    """Where the mean excess passes the tolerance; None if at no size that was tried."""
    low: int
    """The largest size up to which all are surely within the tolerance; at least the smallest."""
    high: int | None
    """The smallest size that is surely not; None if there is none."""

    @classmethod
    def of(cls, branches: Sequence[Branch], *, samples: int, tolerance: float) -> CriticalBatchSize:
        """Return what `branches` say.

        Raises:
            TrainingError: there are fewer than two sizes, a size lacks a seed of the others or has
                one twice, the smallest diverges, or the tolerance is none.
        """
        sizes = sorted({branch.size for branch in branches})
        seeds = {branch.seed for branch in branches}
        losses = {(branch.size, branch.seed): branch.loss for branch in branches}
        if len(sizes) < 2 or not len(branches) == len(losses) == len(sizes) * len(seeds):
            raise TrainingError(
                cannot(
                    "tell the critical batch size",
                    why=f"there are {len(branches)} branches of {len(sizes)} sizes and "
                    f"{len(seeds)} seeds",
                    instead="train every size, two or more, once with every seed",
                )
            )
        check_tolerance(tolerance)
        for branch in branches:
            check_yardstick(branch, sizes[0])
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


def check_yardstick(branch: Branch, smallest: int) -> None:
    """Refuse a branch of the smallest size whose loss nothing can be held against.

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


def check_branches(sizes: Sequence[int], samples: int, *, tolerance: float) -> None:
    """Refuse sizes that branches of so many samples tell nothing about.

    Raises:
        TrainingError: there are fewer than two, they are not ascending, the largest has too few
            steps, or the tolerance is none.
    """
    check_tolerance(tolerance)
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
                instead=f"write --over {LEAST_STEPS * sizes[-1]}sp or more, or smaller sizes",
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
        # Seeds that all come to the same to the last bit are one order: nothing is known of others.
        reach = student(CONFIDENCE, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    verdict: Verdict = "open"
    if excess + reach <= tolerance:
        verdict = "below"
    elif excess - reach > tolerance:
        verdict = "above"
    return SizeRow(
        size=size,
        steps=own[0].steps,
        learning_rate=own[0].learning_rate,
        loss=statistics.mean(branch.loss for branch in own),
        excess=excess,
        reach=reach,
        verdict=verdict,
    )


def _crossing(rows: Sequence[SizeRow], tolerance: float) -> float | None:
    """The size at which the line through the mean excesses passes the tolerance first."""
    for before, after in pairwise(rows):
        if after.excess > tolerance:
            if not math.isfinite(after.excess):
                return float(before.size)
            part = (tolerance - before.excess) / (after.excess - before.excess)
            return float(before.size * (after.size / before.size) ** part)
    return None
