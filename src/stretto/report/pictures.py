"""A static picture of a plan or a run, from the same data as the run page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto._location import replacing
from stretto._optional import import_optional
from stretto.errors import ConfigError, PlanError
from stretto.planning import Plan
from stretto.planning.plan import plan_record
from stretto.timing import TimeUnit
from stretto.timing.grammar import parse_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from stretto.report.page.series import Series

FORMATS = (".png", ".svg", ".pdf")
"""The supported file endings."""
LABELS = {
    TimeUnit.EPOCH: "epochs",
    TimeUnit.BATCH: "batches",
    TimeUnit.SAMPLE: "samples",
    TimeUnit.TOKEN: "tokens",
    TimeUnit.DURATION: "fraction of the run",
    TimeUnit.SECOND: "seconds",
}
"""The label of an axis, by unit."""

# Distinct in print and for colour-blind readers (Okabe and Ito 2008).
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#a05a8c"
INK, MUTED, FAINT = "#222222", "#767676", "#e3e3e3"
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "grid.color": FAINT,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "stretto",  # the same picture is the same file
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.left": False,
}
FIRST = ("loss", "batch_size", "accumulation")
LAST = ("noise_scale",)
"""Panels before and after those of hyper-parameters."""
MOST_VALUES = 3
"""Most panels of hyper-parameters."""
MOST_SIZES = 6
"""Up to this many batch sizes, each gets a tick."""
HEIGHTS = {"loss": 2.6, "accumulation": 0.9}
_COLORS = (BLUE, ORANGE, GREEN, PURPLE)


def draw(source: Plan | Path | str, path: Path | str, *, unit: str | None = None) -> None:
    """Draw a plan, or the run in a folder, into a file.

    Args:
        source: the plan, or the run folder.
        path: a name that ends in `.png`, `.svg` or `.pdf`.
        unit: the unit of the horizontal axis; by default, that of a plan's length, and samples for
            a run.

    Raises:
        ConfigError: the file ending is not supported, or the file cannot be written.
        DataError: the folder contains no run.
        PlanError: the plan has no end, or it cannot be shown in that unit.
        MissingPackageError: matplotlib is not installed.
    """
    import numpy as np

    from stretto.report.page.reading import PANELS, plan_data, read
    from stretto.report.page.series import UNITS

    path, source = Path(path), Path(source) if isinstance(source, str) else source
    if path.suffix.lower() not in FORMATS:
        why = "its name does not say what kind of picture it is"
        raise ConfigError.bad("path", str(path), why, f"let it end in {', '.join(FORMATS)}")
    if not isinstance(source, Plan):
        data, title, target = read(source), source.name, parse_unit(unit or "sp")
    elif source.end is None or source.num_batches is None:
        raise PlanError.cannot(
            "draw a plan without an end",
            why=f"only the run can tell when {source.horizon.max_duration} have passed",
            instead="say max_duration in 'ep', 'ba' or 'sp'",
        )
    else:
        data = plan_data("plan", plan_record(source))
        title = f"run of {source.horizon.max_duration}  ·  {source.num_batches:,} batches"
        target = parse_unit(unit) if unit else source.horizon.max_duration.unit
    column = UNITS.index(target.value)
    shown = [one.thinned(2_000) for one in data.series if len(one.values)]
    values = [one.panel for one in shown if one.step and one.panel not in (*FIRST, "memory")]
    names = [*FIRST, *list(dict.fromkeys(values))[:MOST_VALUES], *LAST]
    panels = {name: [one for one in shown if one.panel == name] for name in names}
    panels = {name: lines for name, lines in panels.items() if lines}
    clocks = [one.clock[:, column] for lines in panels.values() for one in lines]
    end = float(np.nanmax(np.concatenate([[0.0], *clocks])))
    if not end:
        raise PlanError.cannot(
            f"draw it over {target.value!r}",
            why="they are not known of it",
            instead="choose another unit, such as 'sp'",
        )
    heights = [HEIGHTS.get(name, 1.4) for name in panels]
    with import_optional("matplotlib", "plot").rc_context(STYLE):
        figures = import_optional("matplotlib.figure", "plot")
        figure: Figure = figures.Figure(figsize=(8, 1.1 + sum(heights)), layout="constrained")
        figure.suptitle(title, x=0.012, ha="left", fontsize=10.5, color=INK)
        ratios = {"height_ratios": heights}
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw=ratios)
        for (axes,), (name, lines) in zip(grid, panels.items(), strict=True):
            axes.set_title(PANELS.get(name) or ("loss" if name == "loss" else lines[-1].label))
            _draw_panel(axes, name, lines, column)
        _finish_time_axis(axes, target, end)
        _save(figure, path)


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
        _finish_size_axis(panel, sorted({int(size) for one in lines for size in one.values}))
    elif name != "loss":
        panel.set_ylim(bottom=0)
        panel.margins(y=0.1)
        # Print 0.004 and 1e-5; matplotlib would put a power of 10 above the axis.
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("e-0", "e-"))


def _finish_time_axis(axes: Axes, unit: TimeUnit, end: float) -> None:
    """Label the horizontal axis of the lowest panel, from 0 to the end."""
    axes.set_xlim(0, end)
    axes.set_xlabel(LABELS[unit])
    if unit is TimeUnit.DURATION:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    elif end >= 10_000:
        axes.xaxis.set_major_formatter(lambda value, _: short(value))


def _finish_size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Format the axis of batch sizes; it is logarithmic for a few distant sizes."""
    is_few = len(sizes) <= MOST_SIZES
    if is_few and sizes[-1] >= 4 * sizes[0]:
        axes.set_yscale("log", base=2)
        axes.set_ylim(sizes[0] / 1.5, sizes[-1] * 1.3)
    else:
        axes.set_ylim(0, sizes[-1] * 1.15)
    if is_few:
        axes.set_yticks(sizes)
        axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")


def short(value: float) -> str:
    """Return a large count as short text.

    >>> [short(value) for value in (0, 950, 20_000, 1_310_720, 2e9)]
    ['0', '950', '20K', '1.31M', '2B']
    """
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:g}"


def _save(figure: Figure, path: Path) -> None:
    """Write the plot; equal plots give equal bytes.

    Raises:
        ConfigError: the file cannot be written.
    """
    dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = path.suffix.lower()
        with replacing(path) as file:
            figure.savefig(file, format=kind[1:], dpi=150, metadata=dated.get(kind))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError.bad("path", str(path), why, "choose another folder") from None
