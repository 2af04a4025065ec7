"""Series over one clock, thinned and written as JSON for the page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = npt.NDArray[np.intp]
UNITS = ("ba", "sp", "tok", "ep", "dur", "sec", "utc")
"""The columns of a clock; a value may be nan."""
MOST_POINTS = 4_000
"""Of a series that is not a step function."""
MOST_STEPS = 8_000
"""Up to so many changes, a step function is kept whole."""
ALL_POINTS = 48_000
"""Of all series of a run, as far as each keeps 500: the clock takes most of a page."""
_COUNTS = 2.0**24
"""Up to here float32 keeps integers."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Values over a clock."""

    name: str
    panel: str
    label: str
    clock: Numbers
    """A row for each value, with a column for each of `UNITS`."""
    values: Numbers
    step: bool = False
    """Whether a value holds until the next one."""
    planned: bool = False
    unit: str = ""
    low: Numbers | None = None
    high: Numbers | None = None

    def __getitem__(self, rows: Rows) -> Series:
        low, high = (None if ends is None else ends[rows] for ends in (self.low, self.high))
        return replace(self, clock=self.clock[rows], values=self.values[rows], low=low, high=high)

    def thinned(self, most: int) -> Series:
        """Return the series without repeated steps, and with about `most` points."""
        values = self.values
        if self.step and len(values) > 2:
            is_same = (values[1:] == values[:-1]) | (np.isnan(values[1:]) & np.isnan(values[:-1]))
            kept = np.flatnonzero(np.r_[True, ~is_same[:-1], True])
            if len(kept) <= max(most, MOST_STEPS):
                return self[kept]
            return self[kept][extremes(values[kept], most)]
        return self[extremes(values, most)] if len(values) > most else self


@final
@dataclass(slots=True, eq=False)
class RunData:
    """What the page shows of a run or a plan."""

    name: str
    kind: str
    series: list[Series] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """Each with `event`, `attempt`, `text` and `clock`, a row."""
    columns: Sequence[str] = ()
    """The heads of the table of stages."""
    stages: list[list[str]] = field(default_factory=list)
    facts: list[list[str]] = field(default_factory=list)
    settings: list[list[str]] = field(default_factory=list)
    """Of its run file; none if it has none."""
    problem: str = ""
    """Why it cannot be read."""


def extremes(values: Numbers, most: int) -> Rows:
    """Return rows with the first, last, smallest and largest value of each of `most / 4` buckets.

    The smallest and largest of all are among them, and gaps (nan) stay.
    """
    edges = np.unique(np.linspace(0, len(values), max(most // 4, 1) + 1).astype(np.intp))
    starts, sizes = edges[:-1], np.diff(edges)
    is_gap = np.isnan(values)
    kept = [starts, edges[1:] - 1]
    for filled, best in ((np.inf, np.minimum), (-np.inf, np.maximum)):
        clean = np.where(is_gap, filled, values)
        found = clean == np.repeat(best.reduceat(clean, starts), sizes)
        rows = np.flatnonzero(found & ~is_gap)
        bucket = np.searchsorted(edges, rows, side="right")
        kept.append(rows[np.unique(bucket, return_index=True)[1]])
    gaps = np.flatnonzero(is_gap)
    bucket = np.searchsorted(edges, gaps, side="right")
    kept.append(gaps[np.unique(bucket, return_index=True)[1]])
    return np.unique(np.concatenate(kept))


def encoded(run: RunData) -> dict[str, Any]:
    """Return a run as the page reads it, with arrays in base64."""
    most = min(MOST_POINTS, max(500, ALL_POINTS // max(len(run.series), 1)))
    series = [one.thinned(most) for one in run.series if len(one.values)]
    clocks = [one.clock for one in series] + [event["clock"][None] for event in run.events]
    table, places = merged(clocks)
    return {
        "name": run.name,
        "kind": run.kind,
        "clock": {
            "n": len(table),
            **{
                unit: _base64(column, "<f8") if len(column) and not np.isnan(column).all() else None
                for unit, column in zip(UNITS, table.T, strict=True)
            },
        },
        "series": [_described(*pair) for pair in zip(series, places, strict=False)],
        "events": [
            {"row": int(rows[0]), "kind": event["event"]}
            | {name: event[name] for name in ("attempt", "text")}
            for event, rows in zip(run.events, places[len(series) :], strict=True)
        ],
        "stages": {"columns": list(run.columns), "rows": run.stages},
        "facts": run.facts,
        "settings": run.settings,
        "problem": run.problem,
    }


_SAME = ("name", "panel", "label", "step", "planned", "unit")


def _described(one: Series, rows: Rows) -> dict[str, Any]:
    """Return a series with its rows and values as JSON."""
    ends = {"low": one.low, "high": one.high}
    return {
        **{name: getattr(one, name) for name in _SAME},
        "rows": _base64(rows, "<u4"),
        "values": _values(one.values),
        **{name: _values(values) for name, values in ends.items() if values is not None},
    }


def merged(clocks: Sequence[Numbers]) -> tuple[Numbers, list[Rows]]:
    """Return all rows of several clocks, sorted and each once, and where those of each are."""
    if not clocks:
        return np.empty((0, len(UNITS))), []
    rows = filled(np.concatenate(clocks))
    # An evaluation has the counts of the batch before it, and may have another time.
    order = np.lexsort((rows[:, 5], rows[:, 1], rows[:, 0]))
    ordered = rows[order]
    same = (ordered[1:] == ordered[:-1]) | (np.isnan(ordered[1:]) & np.isnan(ordered[:-1]))
    is_new = np.r_[True, ~same.all(axis=1)]
    places = np.empty(len(rows), np.intp)
    places[order] = np.cumsum(is_new) - 1
    ends = np.cumsum([len(clock) for clock in clocks])[:-1]
    return ordered[is_new], np.split(places, ends)


def filled(rows: Numbers) -> Numbers:
    """Fill units that some rows lack: between known ones by the samples, after them at their pace.

    A plan has no seconds, and a ledger no epochs.
    """
    rows = rows.copy()
    samples = rows[:, 1]
    for column in range(len(UNITS)):
        values = rows[:, column]
        lacks = np.isnan(values)
        if not lacks.any() or lacks.all():
            continue
        known, first = np.unique(samples[~lacks], return_index=True)
        there = values[~lacks][first]
        values[lacks] = np.interp(samples[lacks], known, there)
        span = known[-1] - known[0]
        if span > 0:
            after = lacks & (samples > known[-1])
            pace = (there[-1] - there[0]) / span
            values[after] = there[-1] + (samples[after] - known[-1]) * pace
    return rows


def _values(values: Numbers) -> Any:
    finite = values[np.isfinite(values)]
    is_wide = len(finite) and np.abs(finite).max() > _COUNTS and (finite == np.rint(finite)).all()
    is_huge = len(finite) and np.abs(finite).max() > np.finfo(np.float32).max
    return {"f64": _base64(values, "<f8")} if is_wide or is_huge else _base64(values, "<f4")


def _base64(values: npt.NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, kind).tobytes()).decode("ascii")


def base64_of(values: Sequence[float]) -> str:
    """Return numbers as the page reads them."""
    return _base64(np.array(values, np.float64), "<f8")
