"""The price of a step: seconds by batch size, and how much of them no sample causes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, final

from stretto.batching.noise_scale import positive_part, student
from stretto.errors import BatchSizeError

MOST_ROWS = 64
"""Rows that are kept; of a longer run, the last ones."""
MOST_STEPS = 100
"""`measured` takes the time of so many steps of the largest size at most."""
_START_UP, _TIMED, _SIZES = 4, 12, 5
_ENOUGH = 4.0
"""How many times as long as the first size the last one has to take: its samples are then seen."""
_DISTURBED = 1.4
"""Seconds above this many times the fastest were disturbed: what disturbs a step only adds."""
_KNOWN = 2.5
"""A ratio whose interval spans no more than this factor is known, to a factor of 2 each way."""
_CONFIDENCE = 0.95


class StepSeconds(NamedTuple):
    """Seconds of a step, as they were measured."""

    size: int
    """Samples of the step, over all ranks."""
    seconds: float
    """Seconds of one step; the mean over several if they were measured together."""
    sample_seconds: float | None = None
    """Seconds of one more sample, from the time of a further micro-batch; None: not measured."""


class Line(NamedTuple):
    """Seconds of a step as a line, `a + b * B`."""

    a: float
    """Seconds of a step that do not depend on its samples; not below 0."""
    b: float
    """Seconds of a sample; not below 0."""
    interval: tuple[float, float]
    """Where `a / b` lies, in samples; the upper end may be infinite."""
    misfit: float
    """How far the seconds of a size are off the line at most, as a fraction."""

    @property
    def ratio(self) -> float | None:
        """`a / b` in samples; None if the seconds do not tell it to within a factor of 2."""
        lower, upper = self.interval
        return self.a / self.b if 0 < upper <= _KNOWN * lower and self.a * self.b > 0 else None


@final
@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step by batch size, and the line `a + b * B` through them. A frozen value.

    The same progress takes `1 + B_noise / B` steps, so its seconds are least at
    `B = sqrt(a / b * B_noise)`. The line has the least squares of relative errors. The interval of
    `a / b` is Fieller's at 95 percent, as that of `GradientNoise`.

    >>> cost = StepCost([StepSeconds(size, 0.04 + 0.001 * size) for size in (8, 8, 32, 32, 64, 64)])
    >>> round(cost.line.ratio, 6), round(cost.seconds(128), 6)
    (40.0, 0.168)
    >>> StepCost([StepSeconds(8, 0.048)]).line is None
    True

    Args:
        rows: what was measured, in any order. One size alone tells `a` and `b` only if its
            `sample_seconds` are known.

    Raises:
        BatchSizeError: there is no row, or a number is not positive and finite.
    """

    rows: Sequence[StepSeconds]

    def __post_init__(self) -> None:
        rows = tuple(StepSeconds(*row) for row in self.rows)
        object.__setattr__(self, "rows", rows)
        numbers = [number for row in rows for number in row if number is not None]
        if not rows or not all(0 < number < math.inf for number in numbers):
            what, why = "fit the price of a step", "there is no step, or a number is not positive"
            raise BatchSizeError.cannot(what, why=why, instead="pass rows such as (32, 0.25)")

    @property
    def sizes(self) -> dict[int, float]:
        """The seconds of a step by measured size, without steps that were disturbed."""
        return {size: fmean(kept) for size, kept in self._kept.items()}

    @property
    def fastest(self) -> dict[int, float]:
        """The seconds of the fastest step by measured size."""
        return {size: min(kept) for size, kept in self._kept.items()}

    @property
    def _kept(self) -> Mapping[int, Sequence[float]]:
        found = dict[int, list[float]]()
        for row in sorted(self.rows, key=lambda row: row.size):
            found.setdefault(row.size, []).append(row.seconds)
        return {size: undisturbed(seconds) for size, seconds in found.items()}

    @property
    def line(self) -> Line | None:
        """The line through the seconds; None if one size was measured, without its parts."""
        further = undisturbed([row.sample_seconds for row in self.rows if row.sample_seconds])
        seen = [(1.0, float(size), kept) for size, kept in self._kept.items()]
        seen += [(0.0, 1.0, further)] if further else []
        return _fitted(seen) if len(seen) > 1 else None

    @property
    def unknown(self) -> str | None:
        """Why `a / b` is not known; None if it is."""
        if self.line is None:
            return "only one batch size was measured, without accumulation, which gives no split"
        if self.line.ratio is None:
            low, high = self.line.interval
            return f"the seconds fit any a / b from {low:.3g} to {high:.3g} samples"
        return None

    def seconds(self, size: int) -> float:
        """Return the seconds of a step: as measured, or between two sizes, or along the line.

        Raises:
            BatchSizeError: it was not measured, and there is no line.
        """
        known, line = self.sizes, self.line
        below = [one for one in known if one <= size]
        above = [one for one in known if one >= size]
        if below and above:
            low, high = max(below), min(above)
            part = (size - low) / (high - low) if high > low else 0.0
            return known[low] + part * (known[high] - known[low])
        if line is None:
            what, why = f"tell the seconds of a step of {size}", "one size gives no line"
            instead = f"measure more sizes than {', '.join(map(str, known))}"
            raise BatchSizeError.cannot(what, why=why, instead=instead)
        nearest = min(known, key=lambda one: abs(one - size))
        bounded = None if line.ratio else self.bounded_ratio()
        a, b = (line.a, line.b) if bounded is None else (bounded, 1.0)
        return (a + b * size) * known[nearest] / (a + b * nearest)

    def bounded_ratio(self) -> float | None:
        """Return `a / b` for a policy, within what the sizes can tell; None: it is not known.

        If `a` is too small to be seen at the smallest size, or `b` at the largest, the ratio is
        that of the least part that could be seen, a tenth.
        """
        line = self.line
        if line is None:
            return None
        least, most = 0.1 * min(self.sizes), 10.0 * max(self.sizes)
        low, high = (min(max(end, least), most) for end in line.interval)
        if high > _KNOWN * low:
            return None
        ratio = line.a / line.b if line.b > 0 else math.inf
        return min(max(ratio, least), most)

    @property
    def c(self) -> float | None:
        """The `c` of `NoiseScale`, the root of `bounded_ratio`; None: it is not known."""
        ratio = self.bounded_ratio()
        return None if ratio is None else math.sqrt(ratio)

    def __str__(self) -> str:
        line = self.line
        span = f"{len(self.sizes)} sizes from {min(self.sizes):,} to {max(self.sizes):,}"
        if line is None or line.ratio is None:
            return f"a / b of a step is not known: {self.unknown}"
        if len(self.sizes) == 1:
            span = f"steps of {min(self.sizes):,} and their micro-batches"
        return (
            f"a step takes {shown_seconds(line.a)} + {shown_seconds(line.b)} a sample "
            f"({span}, fits to {line.misfit:.0%})"
        )


def undisturbed(seconds: Sequence[float]) -> list[float]:
    """Return those that were not disturbed.

    >>> undisturbed([1.0, 10.0, 1.1])
    [1.0, 1.1]
    """
    return [one for one in seconds if one <= _DISTURBED * min(seconds)]


def ladder(least: int, most: int) -> list[int]:
    """Return up to five sizes to measure, at equal ratios.

    >>> ladder(4, 8192)
    [4, 27, 181, 1218, 8192]
    """
    steps = min(_SIZES - 1, max(1, round(math.log2(most / least))))
    return sorted({round(least * (most / least) ** (part / steps)) for part in range(steps + 1)})


def measured(seconds_of: Callable[[int], float], sizes: Sequence[int]) -> StepCost:
    """Time steps of several sizes, in the time of 100 steps of the largest at most.

    Of each size, 4 steps are not counted and 12 are. Larger sizes are left out when a step takes
    4 times as long as the smallest. The time that is left goes to the smallest and the largest.

    Args:
        seconds_of: runs a step of a size; returns its seconds, the same on all ranks; infinity if
            there is no memory for it.
        sizes: up to five sizes, in rising order.

    Raises:
        BatchSizeError: there are more, or others; or there is no memory for a step of the smallest.
    """
    what = f"measure steps of {', '.join(map(str, sizes)) or 'no size'}"
    if not 0 < len(sizes) <= _SIZES or [*sizes] != sorted({*sizes}) or sizes[0] < 1:
        why, instead = f"it takes up to {_SIZES} sizes in rising order", "write [8, 32, 128]"
        raise BatchSizeError.cannot(what, why=why, instead=instead)
    steps = [*_steps(seconds_of, sizes)]
    if not steps:
        instead = "write smaller sizes, or a smaller micro_batch_size"
        raise BatchSizeError.cannot(what, why=f"not even {sizes[0]} fit in memory", instead=instead)
    return StepCost(steps)


def _steps(seconds_of: Callable[[int], float], sizes: Sequence[int]) -> Iterator[StepSeconds]:
    visited, fastest = list[int](), list[float]()
    for size in sizes:
        first = seconds_of(size)
        if first == math.inf:
            break
        seconds = [first, *(seconds_of(size) for _ in range(_START_UP + _TIMED - 1))]
        yield from (StepSeconds(size, one) for one in seconds[_START_UP:])
        visited.append(size)
        fastest.append(min(seconds))
        if fastest[-1] > _ENOUGH * fastest[0]:
            break
    left = MOST_STEPS * max(fastest, default=0.0) - (_START_UP + _TIMED) * sum(fastest)
    for _ in range(int(left / (fastest[0] + fastest[-1])) if len(visited) > 1 else 0):
        yield from (StepSeconds(size, seconds_of(size)) for size in (visited[0], visited[-1]))


def _fitted(seen: Sequence[tuple[float, float, Sequence[float]]]) -> Line:
    """Fit `a * x + b * y` to the means of `(x, y, seconds)`, by relative errors."""
    rows = [(x / fmean(kept), y / fmean(kept), len(kept)) for x, y, kept in seen]
    aa, ab, bb = (sum(n * one[i] * one[j] for *one, n in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a_1, b_1 = (sum(n * one[i] for *one, n in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    a, b = (bb * a_1 - ab * b_1) / determinant, (aa * b_1 - ab * a_1) / determinant
    off = [a * x + b * y - 1.0 for x, y, _ in rows]
    within = sum((one / fmean(kept) - 1.0) ** 2 for *_, kept in seen for one in kept)
    freedom = sum(n for *_, n in rows) - len(rows)
    # Without repetitions, 5 percent: what steps vary by on a machine with nothing else to do.
    variance = max(within, 1e-9) / freedom if freedom > 0 else 0.05**2
    if len(rows) > 2:
        between = sum(n * one * one for (*_, n), one in zip(rows, off, strict=True))
        variance = max(variance, between / (len(rows) - 2))
    reach = student(_CONFIDENCE, max(freedom, 2)) ** 2 * variance / determinant
    interval = positive_part(
        b * b - reach * aa, a * b + reach * ab, a * a - reach * bb, 1.0, is_positive=a > 0 and b > 0
    )
    return Line(max(a, 0.0), max(b, 0.0), interval, max(map(abs, off)))


def shown_seconds(seconds: float) -> str:
    """Return a short time with its unit.

    >>> shown_seconds(0.041), shown_seconds(2.5e-05)
    ('41 ms', '25 us')
    """
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    unit, name = next((one for one in units if seconds >= 0.999 * one[0]), units[-1])
    return f"{seconds / unit:.3g} {name}"
