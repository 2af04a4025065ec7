"""Shared parts of all plots: style, time axes and output files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto._optional import import_optional
from stretto.errors import ConfigError
from stretto.timing import TimeUnit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "butt",
    "svg.hashsalt": "stretto",  # the same picture is the same file
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.left": False,
}
MAX_SIZES = 6
"""Up to this many batch sizes, each gets a tick."""


def check_format(path: Path) -> None:
    """Check the file ending of a plot.

    Raises:
        ConfigError: the file ending is not supported.
    """
    if path.suffix.lower() not in FORMATS:
        why = "its name does not say what kind of picture it is"
        raise ConfigError.bad("path", str(path), why, f"let it end in {', '.join(FORMATS)}")


@contextmanager
def drawn(path: Path, heights: Sequence[float], title: str) -> Iterator[list[Axes]]:
    """Yield stacked panels with a shared horizontal axis, and write their picture at the end.

    Raises:
        ConfigError: the file ending is not supported, or the file cannot be written.
        MissingPackageError: matplotlib is not installed.
    """
    check_format(path)
    with import_optional("matplotlib", "plot").rc_context(STYLE):
        figures = import_optional("matplotlib.figure", "plot")
        figure: Figure = figures.Figure(figsize=(8, 1.1 + sum(heights)), layout="constrained")
        figure.suptitle(title, x=0.012, ha="left", fontsize=10.5, color=INK)
        ratios = {"height_ratios": list(heights)}
        grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=ratios)
        yield [row[0] for row in grid]
        save(figure, path)


def finish_time_axis(axes: Axes, unit: TimeUnit, end: float) -> None:
    """Label the horizontal axis of the lowest panel, from 0 to the end."""
    axes.set_xlim(0, end)
    axes.set_xlabel(LABELS[unit])
    if unit is TimeUnit.DURATION:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    elif end >= 10_000:
        axes.xaxis.set_major_formatter(lambda value, _: short(value))


def finish_size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Format the axis of batch sizes; it is logarithmic for a few distant sizes."""
    distinct = sorted(set(sizes))
    is_few = len(distinct) <= MAX_SIZES
    if is_few and distinct[-1] >= 4 * distinct[0]:
        axes.set_yscale("log", base=2)
        axes.set_ylim(distinct[0] / 1.5, distinct[-1] * 1.3)
    else:
        axes.set_ylim(0, distinct[-1] * 1.15)
    if is_few:
        axes.set_yticks(distinct)
        axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")


def finish_value_axis(axes: Axes) -> None:
    """Format the axis of a hyper-parameter: from 0, with plain numbers."""
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    # Print 0.004 and 1e-5; matplotlib would put a power of 10 above the axis.
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("e-0", "e-"))


def short(value: float) -> str:
    """Return a large count as short text.

    >>> [short(value) for value in (0, 950, 20_000, 1_310_720, 2e9)]
    ['0', '950', '20K', '1.31M', '2B']
    """
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:g}"


def save(figure: Figure, path: Path) -> None:
    """Write the plot; equal plots give equal bytes.

    Raises:
        ConfigError: the file cannot be written.
    """
    dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata=dated.get(path.suffix.lower()))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError.bad("path", str(path), why, "choose another folder") from None
