"""What a run has left in its folder, read and shown as a table."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from stretto._location import METRICS, local_path
from stretto.batching.policy import as_float
from stretto.errors import DataError

_LONGEST_LINE = 1 << 20
CLOCK = ("ep", "ba", "sp", "tok", "dur", "sec")
"""The units of time on each line."""


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
    folder = local_path(folder, "read the run in", DataError)
    lines = list(_lines(folder / METRICS))
    if not lines:
        raise unreadable(folder / METRICS, "it holds no line yet")
    training = tuple(line for line in lines if "loss" in line)
    evaluations = tuple(line for line in lines if any("/" in name for name in line))
    if not (training or evaluations):
        raise unreadable(folder / METRICS, "no line of it holds a loss")
    return RunMetrics(training, evaluations)


def _lines(path: Path) -> Iterator[dict[str, float]]:
    try:
        for number, text in enumerate(plain_lines(path), 1):
            line = _parsed(text)
            if line is not None:
                yield line
            elif text.endswith("\n"):
                raise unreadable(path, f"line {number} is not a line of metrics")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None)
        raise unreadable(path, said.lower() if said else "it is not UTF-8 text") from None


def plain_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a plain file.

    Raises:
        OSError: it is another kind of file, such as a pipe, which may never end; or a line is
            longer than a run writes.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(0, "It is not a plain file")
    with path.open(encoding="utf-8", newline="") as file:
        while text := file.readline(_LONGEST_LINE):
            if len(text) == _LONGEST_LINE:
                raise OSError(0, f"A line has more than {_LONGEST_LINE - 1:,} characters")
            yield text


def _parsed(text: str) -> dict[str, float] | None:
    try:
        line: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not all(name in line for name in CLOCK):
        return None
    # Values that are not finite were written as null.
    numbers = {
        name: math.nan if value is None else as_float(value)
        for name, value in line.items()
        if value is None or isinstance(value, (int, float))
    }
    return numbers if all(math.isfinite(numbers.get(name, math.nan)) for name in CLOCK) else None


def unreadable(path: Path, why: str) -> DataError:
    """Return the error for a file of a run that cannot be read."""
    return DataError.cannot(
        f"read {path}", why=why, instead="name the folder of a run, such as runs/default"
    )


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
