"""Where the schedules of a plan change: its rows begin there, and words say what begins."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias, final

from stretto.planning.sizes import PlannedSizes, Stage
from stretto.planning.stages import Values, batches_until
from stretto.schedules import Schedule
from stretto.schedules.scope import MOST_BORDERS, Scope
from stretto.timing import Horizon, Timestamp

Borders: TypeAlias = Mapping[str, Sequence[int]]
"""By the name of a value, the batches at which its schedule changes its formula."""


@final
@dataclass(frozen=True, slots=True)
class Change:
    """What a scheduled value begins to do at a batch, in words."""

    name: str
    what: str
    """Such as `begins to fall`."""
    at: Timestamp
    """The clock at the start of the batch."""


def borders_of(
    horizon: Horizon, schedules: Mapping[str, Schedule], sizes: PlannedSizes
) -> dict[str, list[int]]:
    """Return where each schedule changes its formula, between the first and the last batch."""
    found = {}
    for name, schedule in schedules.items():
        marks = schedule.borders(Scope.of(horizon))
        batches = {batches_until(mark.axis, mark.first_tick, sizes) for mark in marks}
        inside = sorted(at for at in batches if 0 < at < (sizes.num_batches or math.inf))
        found[name] = inside if len(inside) <= MOST_BORDERS else []
    return found


def split_at(stages: Sequence[Stage], borders: Borders) -> Iterator[Stage]:
    """Yield the stages of a run, split where any schedule changes."""
    names: dict[int, list[str]] = {}
    for name, batches in borders.items():
        for batch in batches:
            names.setdefault(batch, []).append(name)
    cuts, number = sorted(names), 0
    for stage in stages:
        start, equal = stage.first.batch, stage.equal
        stop = None if stage.batches is None else start + stage.batches
        upto = len(cuts) if stop is None else bisect_left(cuts, stop)
        inner = cuts[bisect_right(cuts, start) : upto]
        for first, after in zip([start, *inner], [*inner, stop], strict=True):
            number += 1
            is_first = first == start
            yield replace(
                stage,
                number=number,
                equal=equal if is_first else equal.later(first - start),
                batches=None if after is None else after - first,
                end=stage.end if after in (None, stop) else equal.timestamp(after - start),
                skipped=stage.skipped if is_first else 0,
                begins=tuple(names.get(first, ())),
            )


def changes_of(stages: Sequence[Stage], sizes: PlannedSizes, values: Values) -> Iterator[Change]:
    """Yield what each scheduled value begins to do where its schedule changes.

    Args:
        stages: split where the schedules change.
        sizes: where each batch begins.
        values: every value at a timestamp, as its schedule says, without a rule.
    """
    if sizes.num_batches is None:
        return
    for name in dict.fromkeys(name for stage in stages for name in stage.begins):
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
            step, said, now = steps.pop(batch), list[str](), f"{stage.values[name].first:.4g}"
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
