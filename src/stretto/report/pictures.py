"""Pictures of plans and runs: batch sizes, hyper-parameters and losses over any unit of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stretto.errors import DataError, PlanError
from stretto.planning import Plan
from stretto.report.drawing import (
    BLUE,
    FAINT,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    drawn,
    finish_size_axis,
    finish_time_axis,
    finish_value_axis,
    short,
)
from stretto.report.ledger import decided_sizes
from stretto.report.run import RunMetrics, read_metrics
from stretto.run_folder import LedgerRow, read_ledger
from stretto.timing import Horizon, Timestamp, TimeUnit
from stretto.timing.grammar import parse_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 2_000
"""Most batches whose hyper-parameters are drawn: more than the pixels across a picture."""
_COUNTERS = {TimeUnit.BATCH: "batch", TimeUnit.SAMPLE: "sample", TimeUnit.TOKEN: "token"}
_COLORS = (ORANGE, GREEN, PURPLE)
"""Of hyper-parameters and evaluations; each has a panel or a line."""


class Curves(NamedTuple):
    """A plan as lines over one unit of time."""

    unit: TimeUnit
    end: float
    edges: list[float]
    """The starts of stages, and the end of the last one."""
    sizes: list[int]
    accumulation: list[int]
    times: list[float]
    """The times of `values`, and the end."""
    values: dict[str, list[float]]
    """Hyper-parameters at `times`; the last value lasts to the end."""


def draw_plan(plan: Plan, path: Path, *, unit: str | None = None) -> None:
    """Draw a plan into a file.

    Args:
        plan: what to draw.
        path: a name that ends in `.png`, `.svg` or `.pdf`.
        unit: the unit of the horizontal axis; by default, that of the run's length.

    Raises:
        ConfigError: the file cannot be written, or is of another kind.
        PlanError: the plan has no end, or cannot be shown in that unit.
        MissingPackageError: matplotlib is not installed.
    """
    curves = plan_curves(plan, unit)
    names = list(curves.values)[: len(_COLORS)]
    accumulates = plan.micro_batch_size is not None
    heights = [1.7, *([0.9] if accumulates else []), *([1.5] * len(names))]
    with drawn(path, heights, describe(plan)) as axes:
        axes[0].set_title("batch size")
        axes[0].stairs(curves.sizes, curves.edges, fill=True, color=BLUE, alpha=0.12, baseline=1e-9)
        axes[0].stairs(curves.sizes, curves.edges, baseline=None, color=BLUE, linewidth=1.8)
        finish_size_axis(axes[0], curves.sizes)
        if accumulates:
            axes[1].set_title("micro-batches of each rank")
            axes[1].stairs(curves.accumulation, curves.edges, baseline=None, color=GREEN)
            axes[1].set_ylim(0, max(curves.accumulation) * 1.2)
            axes[1].locator_params(axis="y", nbins=4, integer=True)
        for panel, name, color in zip(axes[1 + accumulates :], names, _COLORS, strict=False):
            _draw_value(panel, name, curves.times, curves.values[name], color=color)
        finish_time_axis(axes[-1], curves.unit, curves.end)


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
    metrics = read_metrics(folder)
    target = _unit(metrics, unit)
    rows = list(read_ledger(folder))
    done = f"run of {horizon.max_duration}  ·  {len(rows):,} batches"
    rows, sizes = _thinned(rows, decided_sizes(rows))
    place = _horizontal_position(horizon, target)
    curves = _curves(plan, target)
    names = list(rows[0].values)[: len(_COLORS)] if rows else []
    noise = [line for line in metrics.training if "noise_scale" in line]
    title = f"{folder.name}:  {describe(plan) if plan else done}"
    heights = [2.6, 1.3, *([1.2] * (len(names) + bool(noise)))]
    with drawn(path, heights, title) as axes:
        _draw_losses(axes[0], metrics, target)
        xs = [place(row) for row in rows]
        if rows and metrics.training:
            # A row marks the start of a batch; extend the last one to the end of the run.
            rows, xs = [*rows, rows[-1]], [*xs, max(xs[-1], metrics.training[-1][target])]
            sizes = [*sizes, sizes[-1]]
        axes[1].set_title("batch size")
        if curves is not None:
            sizes_and_edges = curves.sizes, curves.edges
            axes[1].stairs(*sizes_and_edges, fill=True, color=FAINT, baseline=1e-9, label="planned")
            axes[1].legend(loc="upper right", bbox_to_anchor=(1, 1.27), borderaxespad=0)
        axes[1].plot(xs, sizes, color=BLUE, drawstyle="steps-post")
        finish_size_axis(axes[1], [*sizes, *(curves.sizes if curves else ())] or [1])
        if noise:
            _draw_noise(axes[2], noise, target)
        for panel, name, color in zip(axes[2 + bool(noise) :], names, _COLORS, strict=False):
            if curves is not None and name in curves.values:
                values = curves.values[name]
                panel.fill_between(curves.times, values, step="post", color=FAINT, linewidth=0)
            _draw_value(panel, name, xs, [row.values[name] for row in rows], color=color)
        end = max(xs[-1] if xs else 0.0, curves.end if curves else 0.0)
        finish_time_axis(axes[-1], target, end or 1.0)


def plan_curves(plan: Plan, unit: str | None = None) -> Curves:
    """Return a plan as lines over `unit`; by default, the unit of the run's length.

    >>> from stretto.planning import plan
    >>> from stretto.timing import Horizon
    >>> curves = plan_curves(plan(Horizon("40sp"), "0sp:4 20sp:10"))
    >>> curves.edges, curves.sizes
    ([0.0, 20.0, 40.0], [4, 10])

    Raises:
        PlanError: the plan has no end, or cannot be shown in that unit.
    """
    target = parse_unit(unit) if unit else plan.horizon.max_duration.unit
    end, count = plan.end, plan.num_batches
    if end is None or count is None:
        raise PlanError.cannot(
            "draw a plan without an end",
            why=f"only the run can tell when {plan.horizon.max_duration} have passed",
            instead="say max_duration in 'ep', 'ba' or 'sp'",
        )
    _check_unit(plan, target)

    def place(timestamp: Timestamp) -> float:
        return float(plan.horizon.position(timestamp, target))

    numbers = _batches_to_draw(plan, count)
    values = [plan.values_at(number) for number in numbers]
    return Curves(
        target,
        place(end),
        [place(stage.first) for stage in plan.stages] + [place(end)],
        [stage.size for stage in plan.stages],
        [stage.accumulation for stage in plan.stages],
        [place(plan.sizes.timestamp_at_batch(number)) for number in (*numbers, count)],
        {name: [row[name] for row in (*values, values[-1])] for name in values[0]},
    )


def describe(plan: Plan) -> str:
    """Return a plan in one line: its length in every unit, and the ranks."""
    end = plan.end
    parts = [f"run of {plan.horizon.max_duration}"]
    if end is not None:
        parts += [f"{end.batch:,} batches", f"{_count(plan.num_samples or 0)} samples"]
        if end.token:
            parts.append(f"{_count(end.token)} tokens")
    if plan.world_size > 1:
        parts.append(f"{plan.world_size} ranks")
    return "  ·  ".join(parts)


def show_name(name: str) -> str:
    """Return the readable name of a hyper-parameter or metric.

    >>> show_name("lr"), show_name("lr@head"), show_name("weight_decay")
    ('learning rate', 'learning rate of head', 'weight decay')
    """
    key, _, group = name.partition("@")
    said = {"lr": "learning rate"}.get(key, key.replace("_", " "))
    return f"{said} of {group}" if group else said


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


def _draw_value(
    axes: Axes, name: str, times: Sequence[float], values: Sequence[float], *, color: str
) -> None:
    """Draw a hyper-parameter: each value holds until the next batch."""
    axes.set_title(show_name(name))
    axes.plot(times, values, color=color, drawstyle="steps-post")
    finish_value_axis(axes)


def _draw_losses(axes: Axes, metrics: RunMetrics, unit: TimeUnit) -> None:
    """Draw the losses of training and evaluations; the legend has the last values."""
    axes.set_title("loss")
    lines = metrics.training
    losses, times = [line["loss"] for line in lines], [line[unit] for line in lines]
    axes.plot(times, losses, color=BLUE, alpha=0.75, linewidth=1.3, label="training")
    names = [name for name in metrics.measured if name.endswith("/loss")]
    for name, color in zip(names, _COLORS, strict=False):
        found = [line for line in metrics.evaluations if math.isfinite(line.get(name, math.nan))]
        if found:
            values, times = [line[name] for line in found], [line[unit] for line in found]
            label = f"{name.removesuffix('/loss')} {values[-1]:.3f}"
            axes.plot(times, values, color=color, marker="o", markersize=4, label=label)
    highest = max(filter(math.isfinite, losses), default=0.0)
    for name, value in metrics.references.items():
        if 0 < value <= 1.5 * highest:
            label = f"{show_name(name.partition('/')[2])} {value:.3f}"
            axes.axhline(value, color=MUTED, linewidth=1.1, linestyle="--", zorder=1, label=label)
    axes.margins(y=0.12)
    axes.legend(loc="upper right", ncols=4, bbox_to_anchor=(1, 1.14), borderaxespad=0)


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
    axes.yaxis.set_major_formatter("{x:,.4g}")


def _count(value: int) -> str:
    return f"{value:,}" if value < 10**7 else short(value)


def _batches_to_draw(plan: Plan, count: int) -> Sequence[int]:
    """Return batches spread evenly over the run, and the first of each stage."""
    if count <= POINTS:
        return range(count)
    spread = {number * (count - 1) // (POINTS - 1) for number in range(POINTS)}
    return sorted(spread | {stage.first.batch for stage in plan.stages[:POINTS]})


def _check_unit(plan: Plan, unit: TimeUnit) -> None:
    why = None
    if unit is TimeUnit.SECOND:
        why = "how long a batch will take is not known before the run"
    if unit is TimeUnit.TOKEN and not (plan.end and plan.end.token):
        why = "how many tokens a sample has is not known"
    if why is not None:
        raise PlanError.cannot(
            f"draw the plan over '{unit}'", why=why, instead="write --unit ep, ba, sp or dur"
        )
