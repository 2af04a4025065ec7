"""A plan as JSON and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from stretto.planning.plan_warnings import bound_of
from stretto.planning.stages import Event, Stage
from stretto.timing import Horizon, Timestamp, TimeUnit

if TYPE_CHECKING:
    from stretto.planning.plan import Plan


COUNTS = Timestamp._fields[:7]
"""The counts of the clock, without its times."""


def to_record(plan: Plan) -> dict[str, object]:
    """Return the plan as plain values that JSON keeps exactly."""
    horizon = plan.horizon
    return {
        "max_duration": str(horizon.max_duration),
        "dataset_num_samples": horizon.dataset_num_samples,
        "dataset_num_tokens": horizon.dataset_num_tokens,
        "tokens_per_sample": horizon.tokens_per_sample,
        "last_batch": horizon.last_batch,
        "batch_size": repr(plan.policy),
        "world_size": plan.world_size,
        "micro_batch_size": plan.micro_batch_size,
        "is_exact": plan.is_exact,
        "num_batches": plan.num_batches,
        "num_samples": plan.num_samples,
        "end": clock(horizon, plan.end),
        "stages": [_stage(horizon, stage) for stage in plan.stages],
        "events": [
            {
                "name": event.name,
                "count": event.count,
                "is_exact": event.is_exact,
                "follows": event.follows,
                "first": [clock(horizon, timestamp) for timestamp in event.first],
            }
            for event in plan.events
        ],
        "warnings": list(plan.warnings),
    }


def clock(horizon: Horizon, timestamp: Timestamp | None) -> dict[str, int | str] | None:
    """Return the counts of a timestamp, and the exact epoch and fraction of the run as times."""
    if timestamp is None:
        return None
    state = timestamp.to_state()
    counts: dict[str, int | str] = {name: state[name] for name in COUNTS}
    counts["ep"] = str(horizon.position(timestamp, "ep"))
    counts["dur"] = str(horizon.position(timestamp, "dur"))
    return counts


def _stage(horizon: Horizon, stage: Stage) -> dict[str, object]:
    values = {name: value._asdict() for name, value in stage.values.items()}
    return {
        **{name: getattr(stage, name) for name in ("number", "size", "batches", "samples")},
        "skipped": stage.skipped,
        "cut_sizes": list(stage.cut_sizes),
        "shares": list(stage.shares),
        "accumulation": stage.accumulation,
        "first": clock(horizon, stage.first),
        "end": clock(horizon, stage.end),
        "values": values,
    }


WIDTH = 100
"""Columns of text."""
_LOOKS = 64
"""Batches per row that are sampled in search of a peak, before the search narrows."""
Best: TypeAlias = Callable[..., Any]
"""`max` or `min`."""
Column: TypeAlias = list[str]
"""A heading and the cells below it."""


def to_table(plan: Plan, *, max_rows: int) -> str:
    """Return the plan as text: a headline, the stages, the events and the warnings."""
    size = "as many batches as that takes,"
    if plan.num_batches is not None and plan.num_samples is not None:
        size = f"{plan.num_batches:,} batches, {plan.num_samples:,} samples"
        bound = bound_of(plan.sizes)
        if bound is not None:
            is_counted = plan.horizon.max_duration.unit is TimeUnit.BATCH
            size = f"{plan.num_batches:,} batches, {bound}" if is_counted else bound
    lines = list(_headline(plan, size))
    for block in blocks(_columns(plan, groups(plan.stages, max_rows))):
        lines += ["", *block]
    notes = [f"note: {warning}" for warning in plan.warnings]
    for lot in ([_event(event) for event in plan.events], notes):
        lines += _paragraph(lot)
    return "\n".join(lines)


def _paragraph(texts: Sequence[str]) -> Iterator[str]:
    """Yield an empty line and the wrapped texts; nothing if there are none."""
    for number, text in enumerate(texts):
        if number == 0:
            yield ""
        yield from textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def groups(stages: Sequence[Stage], max_rows: int) -> list[Sequence[Stage]]:
    """Return the stages by row; neighbours share a row if there are too many.

    The first and the last stage keep rows of their own.
    """
    max_rows = max(3, max_rows)
    if len(stages) <= max_rows:
        return [[stage] for stage in stages]
    middle = stages[1:-1]
    each = -(-len(middle) // (max_rows - 2))
    shared = [middle[start : start + each] for start in range(0, len(middle), each)]
    return [stages[:1], *shared, stages[-1:]]


def blocks(columns: Sequence[Column]) -> Iterator[list[str]]:
    """Yield the lines of tables that fit the width; each repeats the first column."""
    first, *others = columns
    taken = [first]
    for column in others:
        if len(taken) > 1 and max(map(len, aligned([*taken, column]))) > WIDTH:
            yield aligned(taken)
            taken = [first]
        taken.append(column)
    yield aligned(taken)


def aligned(columns: Sequence[Column]) -> list[str]:
    """Return columns as lines, each right-aligned and as narrow as possible."""
    widths = [max(map(len, column)) for column in columns]
    rows = list(zip(*columns, strict=True))
    if not any(rows[-1][1:]):
        rows.pop()  # the row of the run's end, if it is empty in this block
    return ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]


def _headline(plan: Plan, size: str) -> Iterator[str]:
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    micro = ""
    if plan.micro_batch_size is not None:
        micro = f", micro-batches of at most {plan.micro_batch_size}"
    yield f"run of {plan.horizon.max_duration}: {size} on {ranks}{micro}"
    yield from textwrap.wrap(f"batch size: {plan.policy!r}", WIDTH, subsequent_indent="  ")


def _columns(plan: Plan, rows: Sequence[Sequence[Stage]]) -> list[Column]:
    """The columns of the table; the last row is the end of the run."""
    columns = [
        ["stage", *(span(row[0].number, row[-1].number) for row in rows), "end"],
        ["batch size", *map(_sizes, rows), ""],
        ["batches", *map(_batches, rows), ""],
    ]
    clocks = [row[0].first for row in rows] + ([plan.end] if plan.end else [])
    for heading, show in _clock(plan.horizon, is_open=plan.end is None).items():
        columns.append([heading, *map(show, clocks), *([] if plan.end else ["?"])])
    if plan.world_size > 1:
        shares = [[share for stage in row for share in stage.shares] for row in rows]
        columns.append(["per rank", *(span(min(row), max(row)) for row in shares), ""])
    if plan.micro_batch_size is not None:
        steps = [[stage.accumulation for stage in row] for row in rows]
        columns.append(["accumulation", *(span(min(row), max(row)) for row in steps), ""])
    names = plan.stages[0].values
    return columns + [[name, *(_values(plan, name, row) for row in rows), ""] for name in names]


def _clock(horizon: Horizon, *, is_open: bool) -> dict[str, Callable[[Timestamp], str]]:
    """Return how the clock is shown, by heading."""
    shown: dict[str, Callable[[Timestamp], str]] = {
        "from batch": lambda now: f"{now.batch:,}",
        "sample": lambda now: f"{now.sample:,}",
    }
    if horizon.tokens_per_sample is not None:
        shown["token"] = lambda now: f"{now.token:,}"
    if horizon.dataset_num_samples is not None:
        shown["epoch"] = lambda now: f"{float(horizon.position(now, 'ep').amount):.4g}"
    if not is_open:
        shown["of run"] = lambda now: f"{horizon.elapsed(now):.1%}"
    return shown


def _sizes(row: Sequence[Stage]) -> str:
    if row[0].size > row[-1].size:
        return f"{row[0].size:,}-{row[-1].size:,}"
    return span(min(stage.size for stage in row), max(stage.size for stage in row))


def _batches(row: Sequence[Stage]) -> str:
    counts = [stage.batches for stage in row]
    return "?" if None in counts else f"{sum(filter(None, counts)):,}"


def _values(plan: Plan, name: str, row: Sequence[Stage]) -> str:
    """Return the first and the last value, and extremes in between."""
    first, last = row[0].values[name].first, row[-1].values[name].last
    if last is None:
        return f"{first:.4g} to ?"
    start, count = row[0].first.batch, sum(filter(None, (stage.batches for stage in row)))
    batches = range(start, start + count)
    found = {batches[0]: first, batches[-1]: last}
    for best in (max, min):
        at, value = _extreme(plan, name, batches, best)
        if best(value, first, last) == value:
            found.setdefault(at, value)
    texts = [f"{found[batch]:.4g}" for batch in sorted(found)]
    return " to ".join(text for text, _ in groupby(texts))


def _extreme(plan: Plan, name: str, batches: range, best: Best) -> tuple[int, float]:
    """Return the batch with the largest or the smallest value, and that value.

    It samples 64 batches and narrows the search around the best. It can miss the extreme of a value
    that oscillates faster than that.
    """
    stride = -(-(batches.stop - batches.start) // _LOOKS)  # may exceed what `len` can return
    looks: Sequence[int] = batches[::stride]
    while True:
        values = {batch: plan.values_at(batch)[name] for batch in looks}
        at = best(values, key=values.__getitem__)
        if stride == 1:
            return at, values[at]
        stride = -(-stride // 2)
        looks = [batch for batch in (at - stride, at, at + stride) if batch in batches]


def _event(event: Event) -> str:
    if event.follows is not None:
        return f"{event.name}: by {event.follows}, so its times are only known in the run"
    if event.count == 0:
        return f"{event.name}: never in this run"
    often = "again and again"
    if event.count is not None:
        often = f"{'' if event.is_exact else 'at most '}{event.count:,} times"
        often = "once" if event.count == 1 and event.is_exact else often
    listed = ", ".join(f"{timestamp.batch:,}" for timestamp in event.first)
    more = ", ..." if event.count is None or event.count > len(event.first) else ""
    batches = "batch" if len(event.first) == 1 and not more else "batches"
    return f"{event.name}: {often}, after {batches} {listed}{more}"


def span(least: int, most: int) -> str:
    """Return a range as text; one number if both are equal."""
    return f"{least:,}" if least == most else f"{least:,}-{most:,}"
