"""Static pictures of plans and runs, from the same data as the run page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stretto.errors import PlanError
from stretto.planning import Plan
from stretto.planning.plan import plan_record
from stretto.report.drawing import (
    BLUE,
    FAINT,
    GREEN,
    ORANGE,
    PURPLE,
    drawn,
    finish_size_axis,
    finish_time_axis,
    finish_value_axis,
    short,
)
from stretto.report.page.reading import PANELS, plan_data, read
from stretto.report.page.series import UNITS, RunData, Series
from stretto.timing import TimeUnit
from stretto.timing.grammar import parse_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIRST = ("loss", "batch_size", "accumulation")
LAST = ("noise_scale",)
"""Panels before and after those of hyper-parameters."""
MOST_VALUES = 3
"""Most panels of hyper-parameters."""
HEIGHTS = {"loss": 2.6, "accumulation": 0.9}
_COLORS = (BLUE, ORANGE, GREEN, PURPLE)


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
    if plan.end is None or plan.num_batches is None:
        raise PlanError.cannot(
            "draw a plan without an end",
            why=f"only the run can tell when {plan.horizon.max_duration} have passed",
            instead="say max_duration in 'ep', 'ba' or 'sp'",
        )
    target = parse_unit(unit) if unit else plan.horizon.max_duration.unit
    _draw(plan_data("plan", plan_record(plan)), path, target, describe(plan))


def draw_run(folder: Path, path: Path, *, unit: str | None = None) -> None:
    """Draw the run in a folder into a file.

    Args:
        folder: the run folder.
        path: a name that ends in `.png`, `.svg` or `.pdf`.
        unit: the unit of the horizontal axis; by default, samples.

    Raises:
        ConfigError: the file cannot be written, or its ending is not supported.
        DataError: the folder contains no run.
        PlanError: the run cannot be shown in that unit.
        MissingPackageError: matplotlib is not installed.
    """
    _draw(read(folder), path, parse_unit(unit or "sp"), folder.name)


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


def _count(value: int) -> str:
    return short(value) if value >= 10_000 else f"{value:,}"


def _draw(run: RunData, path: Path, unit: TimeUnit, title: str) -> None:
    column = UNITS.index(unit.value)
    shown = [one.thinned(2_000) for one in run.series if len(one.values)]
    values = [one.panel for one in shown if one.step and one.panel not in (*FIRST, "memory")]
    names = [*FIRST, *list(dict.fromkeys(values))[:MOST_VALUES], *LAST]
    panels = {name: [one for one in shown if one.panel == name] for name in names}
    panels = {name: lines for name, lines in panels.items() if lines}
    ends = [one.clock[:, column] for lines in panels.values() for one in lines]
    if not ends or np.isnan(np.concatenate(ends)).all() or not np.nanmax(np.concatenate(ends)):
        raise PlanError.cannot(
            f"draw it over {unit.value!r}",
            why="they are not known of it",
            instead="choose another unit, such as 'sp'",
        )
    with drawn(path, [HEIGHTS.get(name, 1.4) for name in panels], title) as axes:
        for panel, (name, lines) in zip(axes, panels.items(), strict=True):
            panel.set_title(PANELS.get(name) or ("loss" if name == "loss" else lines[-1].label))
            _draw_panel(panel, name, lines, column)
        finish_time_axis(axes[-1], unit, float(np.nanmax(np.concatenate(ends))))


def _draw_panel(panel: Axes, name: str, lines: Sequence[Series], column: int) -> None:
    for one in lines:
        times = one.clock[:, column]
        if one.planned:
            panel.fill_between(times, one.values, step="post", color=FAINT, linewidth=0)
            continue
        style = "steps-post" if one.step else "default"
        color = _COLORS[len(panel.lines) % len(_COLORS)]
        panel.plot(times, one.values, drawstyle=style, color=color, label=one.label)
        if one.low is not None and one.high is not None:
            panel.fill_between(times, one.low, one.high, color=color, alpha=0.15, linewidth=0)
    if len(panel.lines) > 1:
        panel.legend(loc="upper right")
    if name == "batch_size":
        finish_size_axis(panel, [int(size) for one in lines for size in one.values])
    elif name != "loss":
        finish_value_axis(panel)
