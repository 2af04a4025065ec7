"""What a run has left in its folder, read and shown as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from stretto.run_folder import METRICS, metrics_lines, unreadable


@final
@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The lines of `metrics.jsonl`: training and evaluations."""

    training: tuple[Mapping[str, float], ...]
    """Lines with the loss, batch size, learning rate and throughput since the last line."""
    evaluations: tuple[Mapping[str, float], ...]
    """Lines with `<name>/loss` and `<name>/<metric>`."""

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of evaluated metrics, in order of appearance."""
        names = (name for line in self.evaluations for name in line if "/" in name)
        return tuple(dict.fromkeys(names))

    @property
    def references(self) -> dict[str, float]:
        """Metrics that never change: baselines, such as the entropy of the text.

        Two evaluations must agree on them to a millionth.
        """
        found = {}
        for name in self.measured:
            values = [line[name] for line in self.evaluations if name in line]
            if not all(map(math.isfinite, values)):
                continue
            low, high = min(values), max(values)
            if len(values) > 1 and high - low <= 1e-6 * abs(high):
                found[name] = values[-1]
        return found


def read_metrics(folder: Path) -> RunMetrics:
    """Return the metrics of the run in `folder`.

    It ignores an incomplete last line, which a killed or running run leaves.

    Raises:
        DataError: there are no metrics, or a line is not valid.
    """
    lines = list(metrics_lines(folder))
    if not lines:
        raise unreadable(folder / METRICS, "it holds no line yet")
    training = tuple(line for line in lines if "loss" in line)
    evaluations = tuple(line for line in lines if any("/" in name for name in line))
    if not (training or evaluations):
        raise unreadable(folder / METRICS, "no line of it holds a loss")
    return RunMetrics(training, evaluations)


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
