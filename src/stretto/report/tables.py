"""Tables of plans, runs and memory, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stretto.batching import Tokens
from stretto.batching.policy import in_unit_of
from stretto.batching.step_cost import StepCost, shown_seconds
from stretto.errors import PlanError
from stretto.planning import Event, Plan, Stage, bound_of
from stretto.planning.borders import value_text
from stretto.planning.stages import FIRST
from stretto.report.advice import advice_lines
from stretto.report.run import RunMetrics, read_metrics
from stretto.run_folder import PLAN, read_json, whole_ledger
from stretto.timing import Horizon, Time, Timestamp, TimeUnit

if TYPE_CHECKING:
    from stretto.memory import Answer

WIDTH = 100
"""Columns of text."""
_LOOKS = 64
"""Batches per row that are sampled in search of a peak, before the search narrows."""
Column: TypeAlias = Sequence[str]
"""A heading and the cells below it."""


def plan_table(plan: Plan, *, max_rows: int = 24) -> str:
    """Return a plan as text of at most 100 columns: its stages, its events and its warnings.

    >>> from stretto import Horizon, plan
    >>> print(plan_table(plan(Horizon("1ep", dataset_num_samples=320), 32)))
    run of 1ep: 10 batches, 320 samples on 1 rank
    batch size: Fixed(32)
    <BLANKLINE>
    stage  batch size  batches  from batch  sample  epoch  of run
        1          32       10           0       0      0    0.0%
      end                               10     320      1  100.0%

    Args:
        plan: the plan.
        max_rows: if there are more stages than this, neighbours share a row.
    """
    size = "as many batches as that takes,"
    given: object = plan
    if not isinstance(given, Plan):
        why, instead = f"it is a {type(given).__name__}", "look at run.why_not_planned"
        raise PlanError.bad("plan", given, why, instead)
    if plan.num_batches is not None and plan.num_samples is not None:
        unit = "tokens" if plan.horizon.tokens_per_sample == 1 else "samples"
        size = f"{plan.num_batches:,} batches, {plan.num_samples:,} {unit}"
        bound = bound_of(plan.sizes)
        if bound is not None:
            is_counted = plan.horizon.max_duration.unit is TimeUnit.BATCH
            size = f"{plan.num_batches:,} batches, {bound}" if is_counted else bound
    lines = list(_headline(plan, size))
    for block in blocks(_columns(plan, groups(plan.stages, max_rows))):
        lines += ["", *block]
    notes = [f"note: {warning}" for warning in plan.warnings]
    for lot in (_changes(plan), [_event(event) for event in plan.events], notes):
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

    The first and the last stage keep rows of their own. A row begins where a schedule changes,
    unless there are too many such places, too.
    """
    max_rows = max(3, max_rows)
    if len(stages) <= max_rows:
        return [[stage] for stage in stages]
    middle, shared = stages[1:-1], list[list[Stage]]()
    cuts = {stage.number for stage in middle if stage.begins}
    cuts = cuts if len(cuts) <= max_rows // 2 else set()
    each = -(-len(middle) // max(1, max_rows - 2 - len(cuts)))
    for stage in middle:
        if not shared or len(shared[-1]) == each or stage.number in cuts:
            shared.append([])
        shared[-1].append(stage)
    return [stages[:1], *shared, stages[-1:]]


def blocks(columns: Sequence[Column]) -> Iterator[list[str]]:
    """Yield the lines of tables that fit the width; each repeats the first column."""
    first, *others = columns
    taken = [first]
    for column in [*others, None]:
        lines = aligned(taken)
        if column is None or (len(taken) > 1 and max(map(len, aligned([*taken, column]))) > WIDTH):
            # Not the row of the run's end, if it is empty in this block.
            yield lines if any(one[-1] for one in taken[1:]) else lines[:-1]
            taken = [first]
        if column is not None:
            taken.append(column)


def aligned(columns: Sequence[Column]) -> list[str]:
    """Return columns as lines, each right-aligned and as narrow as possible."""
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join(map(str.rjust, row, widths)).rstrip() for row in zip(*columns, strict=True)]


def moments_table(plan: Plan, times: Sequence[str]) -> str:
    """Return what a plan says of some times, a row for each.

    >>> from stretto import Horizon, plan
    >>> print(moments_table(plan(Horizon("1ep", dataset_num_samples=320), 32), ["50%"]))
         at  stage  batch size  from batch  sample  epoch  of run
    0.5dur      1          32           5     160    0.5   50.0%
    """
    batches = [plan.at(time) for time in times]
    stages = [plan.stage_of(batch.timestamp.batch) for batch in batches]
    columns: list[Column] = [
        ["at", *(str(Time(time)) for time in times)],
        ["stage", *(f"{stage.number:,}" for stage in stages)],
        ["batch size", *(f"{batch.size:,}" for batch in batches)],
    ]
    samples = [(batch.timestamp.sample, batch.size) for batch in batches]
    tokens = [plan.horizon.tokens(start, start + size) for start, size in samples]
    if any(tokens):
        columns.append(["in tokens", *(f"{one:,}" for one in tokens)])
    for name, show in _clock(plan.horizon, is_open=plan.end is None).items():
        columns.append([name, *(show(batch.timestamp) for batch in batches)])
    columns += [
        [name, *(value_text(batch.values[name]) for batch in batches)] for name in batches[0].values
    ]
    return "\n\n".join("\n".join(block) for block in blocks(columns))


def _headline(plan: Plan, size: str) -> Iterator[str]:
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    micro = ""
    if plan.micro_batch_size is not None:
        micro = f", micro-batches of at most {plan.micro_batch_size}"
    yield f"run of {plan.horizon.max_duration}: {size} on {ranks}{micro}"
    yield from textwrap.wrap(f"batch size: {plan.policy!r}", WIDTH, subsequent_indent="  ")


def _columns(plan: Plan, rows: Sequence[Sequence[Stage]]) -> list[Column]:
    """The columns of the table; the last row is the end of the run."""
    columns: list[Column] = [
        ["stage", *(span(row[0].number, row[-1].number) for row in rows), "end"],
        ["batch size", *map(_sizes, rows), ""],
        ["batches", *map(_batches, rows), ""],
    ]
    if plan.sizes.bound.unit is TimeUnit.TOKEN:
        columns.append(["samples each", *map(_samples_each, rows), ""])
    clocks = [row[0].first for row in rows] + ([plan.end] if plan.end else [])
    for heading, show in _clock(plan.horizon, is_open=plan.end is None).items():
        columns.append([heading, *map(show, clocks), *([] if plan.end else ["?"])])
    if plan.world_size > 1 and not isinstance(plan.micro_batch_size, Tokens):
        shares = [[share for stage in row for share in stage.shares] for row in rows]
        columns.append(["per rank", *(span(min(row), max(row)) for row in shares), ""])
    if plan.micro_batch_size is not None:
        columns.append(["accumulation", *map(_passes, rows), ""])
    each = plan.horizon.tokens_per_sample
    if each not in (None, 1) and plan.policy.unit is TimeUnit.TOKEN:
        sizes = [[stage.size * each for stage in row] for row in rows]
        columns.insert(2, ["tokens each", *(span(min(row), max(row)) for row in sizes), ""])
    names = plan.stages[0].values
    return columns + [[name, *(_values(plan, name, row) for row in rows), ""] for name in names]


def _clock(horizon: Horizon, *, is_open: bool) -> dict[str, Callable[[Timestamp], str]]:
    """Return how the clock is shown, by heading."""
    shown: dict[str, Callable[[Timestamp], str]] = {"from batch": lambda now: f"{now.batch:,}"}
    if horizon.tokens_per_sample != 1:
        shown["sample"] = lambda now: f"{now.sample:,}"
    if horizon.tokens_per_sample is not None or horizon.lengths is not None:
        shown["token"] = lambda now: f"{now.token:,}"
    if horizon.dataset_num_samples is not None:
        shown["epoch"] = lambda now: f"{float(horizon.position(now, 'ep').amount):.4g}"
    if not is_open:
        shown["of run"] = lambda now: f"{horizon.elapsed(now):.1%}"
    return shown


def _samples_each(row: Sequence[Stage]) -> str:
    """Return the fewest, the mean and the most samples of batches of so many tokens."""
    counts = [(stage.samples, stage.batches) for stage in row]
    fewest = min(stage.whole_sizes[0] for stage in row)
    most = max(stage.whole_sizes[1] for stage in row)
    if any(None in pair for pair in counts):
        return span(fewest, most)
    samples, batches = (sum(filter(None, each)) for each in zip(*counts, strict=True))
    return f"{span(fewest, most)}, mean {samples / max(1, batches):,.1f}"


def _sizes(row: Sequence[Stage]) -> str:
    sizes = [stage.size for stage in row]
    return span(sizes[0], sizes[-1]) if sizes[0] > sizes[-1] else span(min(sizes), max(sizes))


def _batches(row: Sequence[Stage]) -> str:
    counts = [stage.batches for stage in row]
    return "?" if None in counts else f"{sum(filter(None, counts)):,}"


def _passes(row: Sequence[Stage]) -> str:
    passes = [stage.accumulations for stage in row]
    if not all(passes):
        return "?"
    known = [one for each in passes for one in each]
    # A budget of tokens may take more or fewer passes for other batches than for the first.
    about = "~" if isinstance(row[0].micro_batch_size, Tokens) else ""
    return about + span(min(known), max(known))


def _values(plan: Plan, name: str, row: Sequence[Stage]) -> str:
    """Return the first and the last value, and extremes in between."""
    if row[-1].values[name].last is None:
        return f"{value_text(row[0].values[name].first)} to ?"
    start, count = row[0].first.batch, sum(filter(None, (stage.batches for stage in row)))
    batches = range(start, start + count)

    def value(batch: int) -> float:
        return plan.values_at(batch)[name]

    turns = {_extreme(value, batches, best) for best in (max, min)}
    texts = [value_text(value(batch)) for batch in sorted({batches[0], batches[-1], *turns})]
    return " to ".join(text for text, _ in groupby(texts))


def _extreme(value: Callable[[int], float], batches: range, best: Callable[..., Any]) -> int:
    """Return the batch with the largest or the smallest value.

    It looks at 64 batches and narrows the search around the best. It can miss the extreme of a
    value that oscillates faster than that.
    """
    stride = -(-(batches.stop - batches.start) // _LOOKS)  # may exceed what `len` can return
    looks = [*batches[::stride], batches[-1]]
    while True:
        at: int = best(looks, key=value)
        if stride == 1:
            return at
        stride = -(-stride // 2)
        looks = [batch for batch in (at, at - stride, at + stride) if batch in batches]


def _changes(plan: Plan) -> list[str]:
    """Return a line for each value: what it begins to do, and when."""
    lines = []
    for name in dict.fromkeys(change.name for change in plan.changes):
        own = [change for change in plan.changes if change.name == name]
        said = [f"{change.what} at batch {change.at.batch:,}" for change in own[:FIRST]]
        lines.append(f"{name}: {'; '.join([*said, *(['...'] if own[FIRST:] else [])])}")
    return lines


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


MAX_ROWS = 24
"""The most rows; of more evaluations, evenly spaced ones are shown, with the last."""
FOLLOWED = ("noise_scale", "gain")
"""Measurements that batch sizes and learning rates can depend on."""
_CLOCK = {"ep": "epoch", "ba": "batches", "sp": "samples", "tok": "tokens"}


def run_table(metrics: RunMetrics, folder: Path) -> str:
    """Return a run as text: a row per evaluation, or per log if there are none."""
    rows = metrics.evaluations or metrics.training
    shown = _evenly_spaced(list(rows))
    counts = [unit for unit in _CLOCK if unit != "tok" or rows[-1]["tok"]]
    names = [name for name in metrics.measured if name not in metrics.references]
    followed = [name for name in FOLLOWED if any(name in line for line in metrics.training)]
    heads = [*(_CLOCK[unit] for unit in counts), "time", _size_head(folder)]
    heads += [name.replace("_", " ") for name in followed] + ["loss", *names]
    table, ledger = [heads], dict[str, Any]()
    with suppress(OSError):
        ledger |= whole_ledger(folder)
    for row in shown:
        trained = _line_at(metrics, row)
        cells = [_count(row[unit]) for unit in counts]
        cells += [_time(row["sec"]), _count(_size_at(row, trained, ledger))]
        cells += [_about(trained.get(name)) for name in followed] + [_loss(trained.get("loss"))]
        table.append([*cells, *(_loss(row.get(name)) for name in names)])
    lines = aligned(list(zip(*table, strict=True)))
    notes = [f"{name}: {value:.4f} throughout" for name, value in metrics.references.items()]
    return "\n".join([f"{folder}:", "", *lines, *([""] if notes else []), *notes])


def run_report(folder: Path) -> str:
    """Return a run as text, and what its log says of batch sizes.

    Raises:
        DataError: there are no metrics, or a line is not valid.
    """
    table = run_table(read_metrics(folder), folder)
    return "\n".join([table, "", *advice_lines(folder)]).rstrip()


def _size_head(folder: Path) -> str:
    """Return what the batch sizes of a run are, as far as its plan says it."""
    with suppress(TypeError, LookupError):
        if read_json(folder / PLAN)["stages"][0]["unit"] == "tok":
            return "batch tokens"
    return "batch size"


def _size_at(
    row: Mapping[str, float], line: Mapping[str, float], ledger: Mapping[str, Any]
) -> float | None:
    """Return the size of the batch after which a line is; None: it is not known.

    Args:
        row: the line.
        line: the last line of training up to it.
        ledger: the columns of the ledger; none if there is none.
    """
    if line.get("ba") == row["ba"]:
        return line.get("batch_size")
    sizes = ledger["decided_size"][ledger["batch"] == row["ba"] - 1] if ledger else ()
    return next(map(float, sizes), None)


def _evenly_spaced(rows: list[Mapping[str, float]]) -> list[Mapping[str, float]]:
    if len(rows) <= MAX_ROWS:
        return rows
    picked = {round(number * (len(rows) - 1) / (MAX_ROWS - 1)) for number in range(MAX_ROWS)}
    return [rows[number] for number in sorted(picked)]


def _line_at(metrics: RunMetrics, row: Mapping[str, float]) -> Mapping[str, float]:
    """Return the last line of training up to `row`."""
    before = [line for line in metrics.training if line["ba"] <= row["ba"]]
    return before[-1] if before else {}


def _count(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value.is_integer() else f"{value:,.4g}"


def _about(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def memory_table(answer: Answer) -> str:
    """Return one line for each size around an answer; empty if it comes from trials.

    >>> from stretto.memory.answer import Answer, Cost
    >>> from stretto.memory.limits import MemoryLimit
    >>> answer = Answer(8, "phantom", 9, MemoryLimit(1024, "as stated"), 24, Cost(),
    ...                 peaks={4: 500, 8: 990, 9: 1110})
    >>> print(memory_table(answer))
    batch size      peak  headroom
             4     500 B     500 B
             8     990 B      10 B  the largest that fits
             9  1.08 KiB    -110 B
    """
    from stretto.memory.amounts import show_bytes

    if not answer.peaks:
        return ""
    rows = [("batch size", "peak", "headroom", "")]
    for size, peak in answer.peaks.items():
        mark = answer.bound if size == answer.size else ""
        headroom = answer.limit.bytes - answer.reserve - peak
        rows.append(
            (f"{in_unit_of(answer.size, size):,}", show_bytes(peak), show_bytes(headroom), mark)
        )
    return _with_remarks(rows)


def cost_table(cost: StepCost) -> str:
    """Return one line for each size that was measured, then what follows from them.

    >>> from stretto.batching.step_cost import StepSeconds
    >>> rows = [StepSeconds(size, 0.04 + 0.001 * size) for size in (8, 8, 32, 32)]
    >>> print(cost_table(StepCost(rows)))
    batch size  a step  fastest  samples/s  off the line
             8   48 ms    48 ms        167            0%
            32   72 ms    72 ms        444            0%
    <BLANKLINE>
    a step takes 40 ms + 1 ms a sample (2 sizes from 8 to 32, fits to 0%)
    as much as 40 samples (40 to 40): NoiseScale(start, maximum, c=6.325, power=0.5)
    """
    line, fastest = cost.line, cost.fastest
    table = [("batch size", "a step", "fastest", "samples/s", "off the line")]
    for size, seconds in cost.sizes.items():
        off = "" if line is None else f"{abs(seconds / (line.a + line.b * size) - 1):.0%}"
        times = shown_seconds(seconds), shown_seconds(fastest[size])
        table.append((f"{size:,}", *times, f"{size / seconds:,.3g}", off))
    lines = [*aligned(list(zip(*table, strict=True))), "", str(cost)]
    if line is not None and line.ratio is not None:
        low, high = line.interval
        policy = f"NoiseScale(start, maximum, c={cost.c:.4g}, power=0.5)"
        lines.append(f"as much as {line.ratio:.3g} samples ({low:.3g} to {high:.3g}): {policy}")
    return "\n".join(lines)


def _with_remarks(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines; the last cell of each is a remark, aligned to the left."""
    lines = aligned(list(zip(*(row[:-1] for row in rows), strict=True)))
    return "\n".join(f"{line}  {row[-1]}".rstrip() for line, row in zip(lines, rows, strict=True))
