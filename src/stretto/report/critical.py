"""The critical batch size: how large a batch still trains as well per sample, from branches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import mean, stdev
from typing import NamedTuple

STUDENT = (math.inf, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""Half the width of a 90 percent interval, in standard errors, by degrees of freedom."""


class Tried(NamedTuple):
    """One batch size at one point of a run."""

    size: int
    loss: float
    """Mean of the smoothed losses over the orders of the samples."""
    excess: float
    """Mean loss over that of the smallest size, in the same order; inf if one diverged."""
    reach: float
    """Half the width of its 90 percent interval; inf for a single order."""


class Critical(NamedTuple):
    """The critical batch size at one point of a run, and how sure it is."""

    size: int
    """The largest size whose excess, and that of all smaller ones, is within the tolerance."""
    crossing: float | None
    """Where the excess crosses the tolerance, between sizes; None: at none that was tried."""
    interval: tuple[int, int | None] | None
    """The largest size that is surely within the tolerance, and the last before the first that is
    surely beyond it (None: none is); None for a single order, which decides nothing."""

    def __str__(self) -> str:
        about = "not crossed" if self.crossing is None else f"crossed near {self.crossing:,.0f}"
        sure = "one order, so no interval"
        if self.interval is not None:
            least, most = self.interval
            sure = f"90% interval {least:,} to {'more' if most is None else format(most, ',')}"
        return f"{self.size:,} ({about}; {sure})"


def compared(losses: Mapping[int, Sequence[float]]) -> list[Tried]:
    """Return sizes in ascending order, each compared with the smallest within the same orders.

    >>> [round(one.excess, 3) for one in compared({8: [2.0, 2.1], 16: [2.01, 2.13]})]
    [0.0, 0.02]

    Args:
        losses: of each size, the smoothed loss of each order of the samples.
    """
    base, rows = losses[min(losses)], list[Tried]()
    for size in sorted(losses):
        each = [one - other for one, other in zip(losses[size], base, strict=True)]
        excess, reach, orders = mean(each), math.inf, len(base)
        if not math.isfinite(excess):
            excess = math.inf
        elif orders > 1:
            reach = STUDENT[min(orders, len(STUDENT)) - 1] * stdev(each) / math.sqrt(orders)
        rows.append(Tried(size, mean(losses[size]), excess, reach))
    return rows


def critical(rows: Sequence[Tried], tolerance: float) -> Critical:
    """Return the critical size at a tolerance, in the unit of the loss.

    The crossing is interpolated linearly in the logarithm of the size. Source: Merrill et al. 2025
    (arXiv 2505.23971, section 3).

    >>> rows = compared({8: [2.0, 2.0], 16: [2.0, 2.0], 32: [2.03, 2.03]})
    >>> str(critical(rows, 0.01))
    '16 (crossed near 20; 90% interval 16 to 16)'
    """

    def last_within(values: Sequence[float]) -> int:
        beyond = (place for place, value in enumerate(values) if not value <= tolerance)
        return max(next(beyond, len(rows)) - 1, 0)

    place, crossing, interval = last_within([row.excess for row in rows]), None, None
    if place + 1 < len(rows):
        row, after = rows[place], rows[place + 1]
        part = (tolerance - row.excess) / (after.excess - row.excess)
        crossing = row.size * (after.size / row.size) ** part
    if rows[0].reach < math.inf:
        low = [row.excess - row.reach for row in rows]  # nan if one diverged
        most = None if all(one <= tolerance for one in low) else rows[last_within(low)].size
        interval = rows[last_within([row.excess + row.reach for row in rows])].size, most
    return Critical(rows[place].size, crossing, interval)


def static_plan(found: Mapping[str, Critical], start: int) -> dict[str, int]:
    """Return the sizes that follow, by the time at which each begins.

    It is one size if the critical size is the same at all points, or if one size lies in the
    intervals of all: then no growth is shown.

    >>> at = {"20%": Critical(32, 40.0, (32, 32)), "50%": Critical(64, 90.0, (64, 64))}
    >>> static_plan(at, 16), static_plan({"20%": at["20%"]}, 16)
    ({'0%': 16, '20%': 32, '50%': 64}, {'0%': 32})

    Args:
        found: the critical size at each point.
        start: the size of the run before the first point.
    """
    sizes = [one.size for one in found.values()]
    known = [one.interval for one in found.values() if one.interval is not None]
    lasts = [math.inf if most is None else most for _, most in known]
    shows_none = bool(known) and max(least for least, _ in known) <= min(lasts)
    if len({*sizes}) == 1 or shows_none:
        return {"0%": min(sizes)}
    steps = [("0%", min(start, sizes[0])), *zip(found, sizes, strict=True)]
    return dict(next(same) for _, same in groupby(steps, key=itemgetter(1)))
