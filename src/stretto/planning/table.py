"""A plan as text that needs no explanation, in at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stretto.planning.events import Event
from stretto.planning.stages import Stage
from stretto.timing import Horizon, Timestamp

if TYPE_CHECKING:
    from stretto.planning.plan import Plan

WIDTH = 100
"""Columns of text."""


def to_table(plan: Plan, *, max_rows: int) -> str:
    """Return the plan as text: a headline, the stages, what happens when, and warnings."""
    rows = groups(plan.stages, max_rows)
    names = list(plan.stages[0].values)
    table = [_headings(plan), *(_cells(plan, row) for row in rows), _last(plan)]
    values = [names, *(_values(names, row) for row in rows)]
    lines = list(_headline(plan))
    joined = [[*left, *right] for left, right in zip(table, [*values, []], strict=True)]
    if not names or max(map(len, aligned(joined))) <= WIDTH:
        lines += aligned(joined)
    else:
        lines += [*aligned(table), ""]
        stages = [["stage"], *([_numbers(row)] for row in rows)]
        lines += aligned([[*left, *right] for left, right in zip(stages, values, strict=True)])
    events = [_event(event) for event in plan.events]
    notes = [f"note: {warning}" for warning in plan.warnings]
    for line in [*events, *notes]:
        if line in (*events[:1], *notes[:1]):
            lines.append("")
        lines += textwrap.wrap(line, WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def groups(stages: Sequence[Stage], max_rows: int) -> list[Sequence[Stage]]:
    """Return the stages by rows: each its own, or neighbours together where there are too many.

    The first and the last stage keep rows of their own.
    """
    max_rows = max(3, max_rows)
    if len(stages) <= max_rows:
        return [[stage] for stage in stages]
    middle = stages[1:-1]
    each = -(-len(middle) // (max_rows - 2))
    shared = [middle[start : start + each] for start in range(0, len(middle), each)]
    return [stages[:1], *shared, stages[-1:]]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, each column as wide as it must be, to the right."""
    columns = max(map(len, rows))
    full = [[*row, *[""] * (columns - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    lines = ("  ".join(map(str.rjust, row, widths)) for row in full)
    return [line.rstrip() for line in lines]


def _headline(plan: Plan) -> Iterator[str]:
    known = plan.num_batches is not None and plan.num_samples is not None
    size = (
        f"{plan.num_batches:,} batches, {plan.num_samples:,} samples" if known else "no known end"
    )
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    micro = ""
    if plan.micro_batch_size is not None:
        micro = f", micro-batches of at most {plan.micro_batch_size}"
    yield f"run of {plan.horizon.max_duration}: {size} on {ranks}{micro}"
    yield from textwrap.wrap(f"batch size: {plan.policy!r}", WIDTH, subsequent_indent="  ")
    yield ""


def _headings(plan: Plan) -> list[str]:
    cells = ["stage", "batch size", "batches", *_clock_headings(plan.horizon)]
    if plan.world_size > 1:
        cells.append("per rank")
    if plan.micro_batch_size is not None:
        cells.append("accumulation")
    return cells


def _cells(plan: Plan, row: Sequence[Stage]) -> list[str]:
    counts = [stage.batches for stage in row]
    batches = "?" if None in counts else f"{sum(filter(None, counts)):,}"
    sizes = span(min(stage.size for stage in row), max(stage.size for stage in row))
    if row[0].size > row[-1].size:
        sizes = f"{row[0].size:,}-{row[-1].size:,}"
    cells = [_numbers(row), sizes, batches, *_clock(plan.horizon, row[0].first)]
    if plan.world_size > 1:
        shares = [share for stage in row for share in stage.shares]
        cells.append(span(min(shares), max(shares)))
    if plan.micro_batch_size is not None:
        steps = [stage.accumulation for stage in row]
        cells.append(span(min(steps), max(steps)))
    return cells


def _last(plan: Plan) -> list[str]:
    if plan.end is None:
        return ["end", "", "", "?"]
    return ["end", "", "", *_clock(plan.horizon, plan.end)]


def _clock_headings(horizon: Horizon) -> list[str]:
    tokens = ["token"] if horizon.tokens_per_sample else []
    epochs = ["epoch"] if horizon.dataset_num_samples else []
    return ["from batch", "sample", *tokens, *epochs, "of run"]


def _clock(horizon: Horizon, timestamp: Timestamp) -> list[str]:
    tokens = [f"{timestamp.token:,}"] if horizon.tokens_per_sample else []
    epochs = []
    if horizon.dataset_num_samples:
        epochs = [f"{float(horizon.position(timestamp, 'ep').amount):.4g}"]
    elapsed = f"{horizon.elapsed(timestamp):.1%}"
    return [f"{timestamp.batch:,}", f"{timestamp.sample:,}", *tokens, *epochs, elapsed]


def _numbers(row: Sequence[Stage]) -> str:
    return span(row[0].number, row[-1].number)


def _values(names: Sequence[str], row: Sequence[Stage]) -> list[str]:
    cells = []
    for name in names:
        first, last = row[0].values[name].first, row[-1].values[name].last
        both = (f"{first:.4g}", "?" if last is None else f"{last:.4g}")
        cells.append(both[0] if both[0] == both[1] else " to ".join(both))
    return cells


def _event(event: Event) -> str:
    if event.needs_wall_clock:
        return f"{event.name}: by the wall clock, so its times are not planned"
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
    """Return two numbers as text, as one where they are equal."""
    return f"{least:,}" if least == most else f"{least:,}-{most:,}"
