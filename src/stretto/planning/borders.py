"""Where the schedules of a plan change: its rows begin there, and words say what begins."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias, final

from stretto.batching.rows import LENGTH
from stretto.planning.sizes import PlannedSizes, Stage
from stretto.planning.stages import Values, first_after
from stretto.schedules import Schedule
from stretto.schedules.scope import MOST_BORDERS, Scope
from stretto.timing import Horizon, Timestamp


@final
@dataclass(frozen=True, slots=True)
class Change:
    """What a scheduled value begins to do at a batch, in words."""

    name: str
    what: str
    """Such as `begins to fall`."""
    at: Timestamp
    """The clock at the start of the batch."""


NamedPeriods: TypeAlias = Mapping[tuple[str, int], str]
"""What begins at a batch, by the name of the value and the batch."""


def split_at_borders(
    sizes: PlannedSizes, schedules: Mapping[str, Schedule], horizon: Horizon
) -> tuple[list[Stage], NamedPeriods]:
    """Return the stages, split where a schedule changes its formula, and named periods."""
    names, periods = dict[int, list[str]](), dict[tuple[str, int], str]()
    for name, schedule in schedules.items():
        batches: dict[int, str] = {}
        for mark in schedule.borders(Scope.of(horizon)):
            batch = first_after(mark.axis, mark.first_tick, sizes)
            batches[batch] = mark.period or batches.get(batch, "")
        for batch in batches if len(batches) <= MOST_BORDERS else ():
            names.setdefault(batch, []).append(name)
        periods |= {(name, at): f"{one!r} begins" for at, one in batches.items() if one}
    cuts, found = sorted(names), list[Stage]()
    for stage in sizes.stages:
        start, equal = stage.first.batch, stage.equal
        stop = None if stage.batches is None else start + stage.batches
        upto = len(cuts) if stop is None else bisect_left(cuts, stop)
        inner = cuts[bisect_right(cuts, start) : upto]
        if found and found[-1].row != stage.row:
            names.setdefault(start, []).append(LENGTH)
        for first, after in zip([start, *inner], [*inner, stop], strict=True):
            is_first = first == start
            one = replace(
                stage,
                number=len(found) + 1,
                equal=equal if is_first else equal.later(first - start),
                batches=None if after is None else after - first,
                end=stage.end if after in (None, stop) else equal.timestamp(after - start),
                skipped=stage.skipped if is_first else 0,
                begins=tuple(names.get(first, ())) if first else (),
            )
            found.append(one)
    return found, periods


def value_text(value: float) -> str:
    """Return a value as text of about four digits.

    >>> value_text(2.2e-4), value_text(32768.0)
    ('0.00022', '32,768')
    """
    return f"{value:,.0f}" if value.is_integer() and value >= 1e4 else f"{value:.4g}"


def changes_of(
    stages: Sequence[Stage], sizes: PlannedSizes, values: Values, periods: NamedPeriods
) -> Iterator[Change]:
    """Yield what each scheduled value begins to do where its schedule changes.

    Args:
        stages: split where the schedules change.
        sizes: where each batch begins.
        values: every value at a timestamp, as its schedule says, without a rule.
        periods: the named periods.
    """
    if sizes.num_batches is None:
        return
    begin = [name for name, batch in periods if batch == 0]
    for name in dict.fromkeys([*begin, *(name for stage in stages for name in stage.begins)]):
        if name in begin:
            yield Change(name, periods[name, 0], stages[0].first)
        begun = [stage for stage in stages if name in stage.begins]
        edges = [0, *(stage.first.batch for stage in begun), sizes.num_batches]

        def at(batch: int, name: str = name) -> float:
            return values(sizes.timestamp_at_batch(batch), 1)[name]

        trends = [_trend(at(first), at(after - 1)) for first, after in pairwise(edges)]
        for number, stage in enumerate(begun):
            batch, (before, after) = stage.first.batch, trends[number : number + 2]
            # A curve that begins or ends here has a step that is like those beside it.
            near = range(max(edges[number], batch - 2), min(edges[number + 2], batch + 2))
            steps = {one + 1: abs(at(one + 1) - at(one)) for one in near[:-1]}
            step, now = steps.pop(batch), value_text(stage.values[name].first)
            said = [periods[name, batch]] if (name, batch) in periods else []
            if step > 4 * max(steps.values(), default=0.0) + 1e-9 * abs(at(batch)):
                said.append(f"changes to {now}")
            elif before not in (0, after):
                said.append("warm-up ends" if before > 0 and number == 0 else f"reaches {now}")
            if after not in (0, before):
                said.append(f"begins to {'rise' if after > 0 else 'fall'}")
            if said:
                yield Change(name, " and ".join(said), stage.first)


def _trend(first: float, last: float) -> int:
    """Return 1 if a value rises, -1 if it falls, 0 if it stays."""
    return 0 if math.isclose(first, last, rel_tol=1e-12) else 1 if last > first else -1
