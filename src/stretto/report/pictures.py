"""Pictures of plans: batch sizes and hyper-parameters over any unit of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stretto.errors import PlanError
from stretto.planning import Plan
from stretto.planning.plan import batches_to_show
from stretto.report.drawing import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    drawn,
    finish_size_axis,
    finish_time_axis,
    finish_value_axis,
    short,
)
from stretto.report.page.reading import show_name
from stretto.timing import Timestamp, TimeUnit
from stretto.timing.grammar import parse_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = (ORANGE, GREEN, PURPLE)
"""Of hyper-parameters; each has a panel."""


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

    numbers = batches_to_show(plan, count)
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


def _draw_value(
    axes: Axes, name: str, times: Sequence[float], values: Sequence[float], *, color: str
) -> None:
    """Draw a hyper-parameter: each value holds until the next batch."""
    axes.set_title(show_name(name))
    axes.plot(times, values, color=color, drawstyle="steps-post")
    finish_value_axis(axes)


def _count(value: int) -> str:
    return f"{value:,}" if value < 10**7 else short(value)


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
