"""Plot a run: loss, batch size and hyper-parameters, with the plan behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stretto._optional import import_optional
from stretto.errors import DataError, PlanError
from stretto.planning import Plan
from stretto.report.drawing import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    STYLE,
    check_format,
    finish_size_axis,
    finish_time_axis,
    finish_value_axis,
    panels,
    save,
)
from stretto.report.ledger import LedgerRow, decided_sizes, read_ledger
from stretto.report.plan_picture import Curves, describe, plan_curves, show_name
from stretto.report.run import RunMetrics, read_metrics
from stretto.timing import Horizon, Timestamp, TimeUnit
from stretto.timing.grammar import parse_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_VALUES = 3
"""The most hyper-parameters that get a panel."""
_COUNTERS = {TimeUnit.BATCH: "batch", TimeUnit.SAMPLE: "sample", TimeUnit.TOKEN: "token"}
_COLORS = (BLUE, ORANGE, GREEN, PURPLE)


def draw_run(
    folder: Path, path: Path, *, horizon: Horizon, plan: Plan | None, unit: str | None = None
) -> None:
    """Draw the run in `folder` into a file.

    Args:
        folder: the run folder.
        path: a name that ends in `.png`, `.svg` or `.pdf`.
        horizon: the horizon of the run.
        plan: the plan, drawn behind the run; None if unknown.
        unit: the unit of the horizontal axis. Default: tokens if they were counted, else samples.

    Raises:
        ConfigError: the file cannot be written, or its ending is not supported.
        DataError: the folder contains no run.
        MissingPackageError: matplotlib is not installed.
    """
    check_format(path)
    metrics = read_metrics(folder)
    target = _unit(metrics, unit)
    rows = list(read_ledger(folder))
    done = f"run of {horizon.max_duration}  ·  {len(rows):,} batches"
    rows, sizes = _thinned(rows, decided_sizes(rows))
    place = _horizontal_position(horizon, target)
    curves = _curves(plan, target)
    names = list(rows[0].values)[:MAX_VALUES] if rows else []
    with import_optional("matplotlib", "plot").rc_context(STYLE):
        title = f"{folder.name}:  {describe(plan) if plan else done}"
        noise = [line for line in metrics.training if "noise_scale" in line]
        figure, axes = panels([2.6, 1.3, *([1.2] * (len(names) + bool(noise)))], title)
        _draw_losses(axes[0], metrics, target)
        xs = [place(row) for row in rows]
        if rows and metrics.training:
            # A row marks the start of a batch; extend the last one to the end of the run.
            rows, xs = [*rows, rows[-1]], [*xs, max(xs[-1], metrics.training[-1][target])]
            sizes = [*sizes, sizes[-1]]
        _draw_sizes(axes[1], xs, sizes, curves)
        if noise:
            _draw_noise(axes[2], noise, target)
        rest = axes[2 + bool(noise) :]
        for panel, name, color in zip(rest, names, (ORANGE, GREEN, PURPLE), strict=False):
            _draw_value(panel, xs, [row.values[name] for row in rows], curves, name, color=color)
        end = max(xs[-1] if xs else 0.0, curves.end if curves else 0.0)
        finish_time_axis(axes[-1], target, end or 1.0)
        save(figure, path)


def _unit(metrics: RunMetrics, unit: str | None) -> TimeUnit:
    lines = metrics.training or metrics.evaluations
    if unit is None:
        return TimeUnit.TOKEN if lines[-1]["tok"] else TimeUnit.SAMPLE
    target = parse_unit(unit)
    why = None
    if target is TimeUnit.TOKEN and not lines[-1]["tok"]:
        why = "its tokens were not counted"
    if target is TimeUnit.SECOND:
        why = "its ledger holds no wall time"
    if why is not None:
        raise DataError.cannot(
            f"draw the run over '{target}'", why=why, instead="write --unit sp, ba or dur"
        )
    return target


def _horizontal_position(horizon: Horizon, unit: TimeUnit) -> Callable[[LedgerRow], float]:
    """Return a function from a row of the ledger to its horizontal position."""

    def place(row: LedgerRow) -> float:
        if unit in _COUNTERS:
            return float(row.counts[_COUNTERS[unit]])
        counts = {name: row.counts[name] for name in ("epoch", "batch", "sample", "token")}
        return float(horizon.position(Timestamp(**counts), unit))

    return place


def _curves(plan: Plan | None, unit: TimeUnit) -> Curves | None:
    if plan is None:
        return None
    try:
        return plan_curves(plan, unit)
    except PlanError:  # the plan has no end, or no tokens: draw the run alone
        return None


def _thinned(
    rows: list[LedgerRow], sizes: list[int], most: int = 3_000
) -> tuple[list[LedgerRow], list[int]]:
    """Return about `most` rows and their sizes, including every change of size."""
    stride = -(-len(rows) // most) if rows else 1
    kept = [
        number
        for number, size in enumerate(sizes)
        if number % stride == 0 or number == len(rows) - 1 or size != sizes[number - 1]
    ]
    return [rows[number] for number in kept], [sizes[number] for number in kept]


def _draw_losses(axes: Axes, metrics: RunMetrics, unit: TimeUnit) -> None:
    axes.set_title("loss")
    lines = metrics.training
    axes.plot(
        [line[unit] for line in lines],
        [line["loss"] for line in lines],
        color=BLUE,
        alpha=0.75,
        linewidth=1.3,
        label="training",
    )
    names = [name for name in metrics.measured if name.endswith("/loss")]
    for name, color in zip(names, (ORANGE, GREEN, PURPLE), strict=False):
        found = [line for line in metrics.evaluations if math.isfinite(line.get(name, math.nan))]
        if not found:
            continue
        axes.plot(
            [line[unit] for line in found],
            [line[name] for line in found],
            color=color,
            marker="o",
            markersize=4,
            clip_on=False,
            label=name.removesuffix("/loss"),
        )
        # On the side away from the last training loss.
        is_below = bool(lines) and lines[-1]["loss"] > found[-1][name]
        axes.annotate(
            f"{found[-1][name]:.3f}",
            (found[-1][unit], found[-1][name]),
            xytext=(0, -6 if is_below else 6),
            textcoords="offset points",
            ha="right",
            va="top" if is_below else "bottom",
            color=color,
            weight="bold",
            fontsize=9,
        )
    highest = max((line["loss"] for line in lines if math.isfinite(line["loss"])), default=0.0)
    for name, value in metrics.references.items():
        if 0 < value <= 1.5 * highest:
            axes.axhline(value, color=MUTED, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
            label = show_name(name.partition("/")[2])
            axes.annotate(
                label,
                (1, value),
                xycoords=("axes fraction", "data"),
                xytext=(-42, 3),  # beside the last value, which may be on the line
                textcoords="offset points",
                ha="right",
                color=MUTED,
                fontsize=9,
            )
    axes.margins(y=0.12)
    axes.legend(loc="upper right", ncols=4, bbox_to_anchor=(1, 1.14), borderaxespad=0)


def _draw_sizes(
    axes: Axes, xs: Sequence[float], sizes: Sequence[int], curves: Curves | None
) -> None:
    axes.set_title("batch size")
    if curves is not None:
        axes.stairs(curves.sizes, curves.edges, fill=True, color=FAINT, baseline=1e-9)
    axes.plot(xs, sizes, color=BLUE, drawstyle="steps-post")
    finish_size_axis(axes, [*sizes, *(curves.sizes if curves else ())] or [1])
    _label_planned(axes, curves)


def _draw_noise(axes: Axes, noise: Sequence[Mapping[str, float]], unit: TimeUnit) -> None:
    axes.set_title("noise scale, with its interval")
    xs = [line[unit] for line in noise]
    low, high = (
        [line.get(f"noise_scale_{end}", line["noise_scale"]) for line in noise]
        for end in ("low", "high")
    )
    axes.fill_between(xs, low, high, color=FAINT, linewidth=0)
    axes.plot(xs, [line["noise_scale"] for line in noise], color=PURPLE, marker="o", markersize=2)
    axes.set_yscale("log", base=2)
    ticker = import_optional("matplotlib.ticker", "plot")
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.4g}"))


def _draw_value(
    axes: Axes,
    xs: Sequence[float],
    values: Sequence[float],
    curves: Curves | None,
    name: str,
    *,
    color: str,
) -> None:
    axes.set_title(show_name(name))
    planned: Mapping[str, Sequence[float]] = curves.values if curves else {}
    if curves is not None and name in planned:
        axes.fill_between(curves.times, planned[name], step="post", color=FAINT, linewidth=0)
    axes.plot(xs, values, color=color, drawstyle="steps-post")
    finish_value_axis(axes)


def _label_planned(axes: Axes, curves: Curves | None) -> None:
    if curves is not None:
        patches = import_optional("matplotlib.patches", "plot")
        axes.legend(
            handles=[patches.Patch(color=FAINT, label="planned")],
            loc="upper right",
            bbox_to_anchor=(1, 1.27),
            borderaxespad=0,
            labelcolor=INK,
        )
