"""Tables of runs and of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.memory import Answer
from stretto.memory.amounts import show_bytes
from stretto.report.run import RunMetrics

HEADS = ("batch size", "peak", "headroom", "")


def memory_table(answer: Answer) -> str:
    """Return one line for each size around an answer; empty if it comes from trials.

    >>> from stretto.memory.measuring.limits import MemoryLimit
    >>> from stretto.memory.finding.result import Cost
    >>> answer = Answer(8, "exact", 9, MemoryLimit(1024, "as stated"), 24, 990, Cost(),
    ...                 peaks={4: 500, 8: 990, 9: 1110})
    >>> print(memory_table(answer))
    batch size      peak  headroom
             4     500 B     500 B
             8     990 B      10 B  the largest that fits
             9  1.08 KiB    -110 B
    """
    if not answer.peaks:
        return ""
    rows = [HEADS]
    for row in answer.rows():
        mark = answer.bound if row.size == answer.size else ""
        rows.append((f"{row.size:,}", show_bytes(row.peak), show_bytes(row.headroom), mark))
    return _aligned(rows)


def ranks_table(answers: Mapping[int, Answer]) -> str:
    """Return one line for each number of ranks."""
    rows = [("ranks", "micro-batch", "batch", "peak of a rank")]
    for ranks, answer in answers.items():
        peak = "" if answer.peak is None else show_bytes(answer.peak)
        rows.append((f"{ranks:,}", f"{answer.size:,}", f"{ranks * answer.size:,}", peak))
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(
            [*(cell.rjust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]
        ).rstrip()
        for row in rows
    )


MAX_ROWS = 24
"""The most rows; of more evaluations, evenly spaced ones are shown, with the last."""
FOLLOWED = ("noise_scale", "norm_test", "gain")
"""Measurements that batch sizes and learning rates can depend on."""
_CLOCK = {"ep": "epoch", "ba": "batches", "sp": "samples", "tok": "tokens"}


def run_table(metrics: RunMetrics, folder: Path) -> str:
    """Return a run as text: a row per evaluation, or per log if there are none."""
    rows = metrics.evaluations or metrics.training
    shown = _evenly_spaced(list(rows))
    counts = [unit for unit in _CLOCK if unit != "tok" or rows[-1]["tok"]]
    names = [name for name in metrics.measured if name not in metrics.references]
    followed = [name for name in FOLLOWED if any(name in line for line in metrics.training)]
    heads = [*(_CLOCK[unit] for unit in counts), "time", "batch size"]
    heads += [name.replace("_", " ") for name in followed] + ["loss", *names]
    table = [heads]
    for row in shown:
        trained = _line_at(metrics, row)
        cells = [_count(row[unit]) for unit in counts]
        cells += [_time(row["sec"]), _count(trained.get("batch_size"))]
        cells += [_about(trained.get(name)) for name in followed] + [_loss(trained.get("loss"))]
        table.append([*cells, *(_loss(row.get(name)) for name in names)])
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]
    notes = [f"{name}: {value:.4f} throughout" for name, value in metrics.references.items()]
    return "\n".join([f"{folder}:", "", *lines, *([""] if notes else []), *notes])


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
