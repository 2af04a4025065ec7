"""The critical batch size: how large a batch still trains as well per sample, from branches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
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
    """Half the width of its 90 percent interval; inf for a single order, 0 if one diverged."""

    @property
    def shown(self) -> str:
        """The excess, with its reach if there is one."""
        return f"{self.excess:+.4f}" + (
            f" +- {self.reach:.4f}" if 0 < self.reach < math.inf else ""
        )

    @property
    def plain(self) -> dict[str, float | None]:
        """What JSON can hold: None for what is not finite."""
        return {n: one if math.isfinite(one) else None for n, one in self._asdict().items()}


class Critical(NamedTuple):
    """The critical batch size at one point of a run, and how sure it is."""

    size: int
    """The largest size whose excess, and that of all smaller ones, is within the tolerance."""
    crossing: float | None
    """Where the excess crosses the tolerance, between sizes; None: at none that was tried."""
    interval: tuple[float, float | None] | None
    """Where the excess crosses it at both ends of its own interval, or the largest size that was
    tried and None; None for a single order, which decides nothing."""

    def __str__(self) -> str:
        about = "not crossed" if self.crossing is None else f"crossed near {self.crossing:,.0f}"
        sure = "one order, so no interval"
        if self.interval is not None:
            least, most = self.interval
            sure = f"90% interval {least:,.0f} to {'more' if most is None else f'{most:,.0f}'}"
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
            excess, reach = math.inf, 0.0
        elif orders > 1:
            reach = STUDENT[min(orders, len(STUDENT)) - 1] * stdev(each) / math.sqrt(orders)
        rows.append(Tried(size, mean(losses[size]), excess, reach))
    return rows


def critical(rows: Sequence[Tried], tolerance: float) -> Critical:
    """Return the critical size at a tolerance, in the unit of the loss.

    The crossing is interpolated linearly in the logarithm of the size. Source: Merrill et al. 2025
    (arXiv 2505.23971, section 3).

    >>> rows = compared({8: [2.0, 2.0], 16: [2.0, 2.0], 32: [2.02, 2.03]})
    >>> str(critical(rows, 0.01))
    '16 (crossed near 21; 90% interval 18 to more)'
    """

    def crossing(values: Sequence[float]) -> float | None:
        for (row, value), (after, beyond) in pairwise(zip(rows, values, strict=True)):
            if beyond > tolerance:
                part = (tolerance - value) / (beyond - value)
                return float(row.size * (after.size / row.size) ** part)
        return None

    is_within = [row.excess <= tolerance for row in rows] + [False]
    size, interval = rows[is_within.index(False) - 1].size, None
    if rows[0].reach < math.inf:
        most = crossing([row.excess - row.reach for row in rows])
        interval = crossing([row.excess + row.reach for row in rows]) or rows[-1].size, most
    return Critical(size, crossing([row.excess for row in rows]), interval)


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
