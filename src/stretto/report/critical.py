"""The critical batch size as a table and as a picture: the excess of the loss over the size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from stretto._optional import import_optional
from stretto.report.drawing import (
    BLUE,
    INK,
    MUTED,
    ORANGE,
    STYLE,
    check_format,
    panels,
    save,
)
from stretto.training.critical import CriticalBatchSize, SizeRow, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADS = ("batch size", "steps", "learning rate", "loss", "excess", "")
_SAID: dict[Verdict, str] = {
    "below": "within the tolerance",
    "open": "cannot be told",
    "above": "beyond it",
}


def critical_table(found: CriticalBatchSize) -> str:
    """Return what the branches of each size came to, a line each.

    >>> from stretto.training.critical import Branch
    >>> branches = [Branch(8, 0, 64, 0.001, 2.5), Branch(16, 0, 32, 0.0014142, 2.5625)]
    >>> print(critical_table(CriticalBatchSize.of(branches, samples=512, tolerance=0.01)))
    batch size  steps  learning rate    loss   excess
             8     64          0.001  2.5000           the yardstick
            16     32       0.001414  2.5625  +0.0625  cannot be told (one seed)
    """
    rows = [HEADS, *(_cells(row, found) for row in found.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(
            [*(cell.rjust(width) for cell, width in zip(row[:5], widths, strict=True)), row[5]]
        ).rstrip()
        for row in rows
    )


def _cells(row: SizeRow, found: CriticalBatchSize) -> tuple[str, ...]:
    is_yardstick = row is found.rows[0]
    said, excess = _SAID[row.verdict], f"{row.excess:+.4f}"
    if is_yardstick:
        said, excess = "the yardstick", ""
    elif math.isinf(row.excess):
        said, excess = "diverges", ""
    elif math.isinf(row.reach):
        is_single = sum(branch.size == row.size for branch in found.branches) == 1
        said += " (one seed)" if is_single else " (the same with every seed)"
    else:
        excess += f" +- {row.reach:.4f}"
    rate = f"{row.learning_rate:.4g}"
    loss = f"{row.loss:.4f}" if abs(row.loss) < 1e6 else f"{row.loss:.3g}"
    return f"{row.size:,}", f"{row.steps:,}", rate, loss, excess, said


def draw_critical(found: CriticalBatchSize, path: Path) -> None:
    """Draw by how much the loss of each size is above that of the smallest, and the tolerance.

    Args:
        found: what branches have come to.
        path: a name that ends in `.png`, `.svg` or `.pdf`.

    Raises:
        ConfigError: the file cannot be written, or is of another kind.
        MissingPackageError: matplotlib is not installed.
    """
    check_format(path)
    with import_optional("matplotlib", "plot").rc_context(STYLE):
        figure, (axes,) = panels([3.6], str(found).partition(" (")[0])
        _draw_branches(axes, found)
        _draw_answer(axes, found)
        _finish(axes, found)
        save(figure, path)


def _draw_branches(axes: Axes, found: CriticalBatchSize) -> None:
    base = {
        branch.seed: branch.loss for branch in found.branches if branch.size == found.rows[0].size
    }
    diverged = {row.size for row in found.rows if math.isinf(row.excess)}
    for branch in (one for one in found.branches if one.size not in diverged):
        above = branch.loss - base[branch.seed]
        axes.plot([branch.size], [above], "o", color=MUTED, markersize=3.5)
    rows = [row for row in found.rows if math.isfinite(row.excess)]
    reaches = [row.reach if math.isfinite(row.reach) else 0.0 for row in rows]
    axes.errorbar(
        [row.size for row in rows],
        [row.excess for row in rows],
        yerr=reaches,
        color=BLUE,
        marker="o",
        markersize=5,
        capsize=3,
        linewidth=1.6,
    )


def _draw_answer(axes: Axes, found: CriticalBatchSize) -> None:
    axes.axhline(found.tolerance, color=INK, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"tolerance {found.tolerance:g}",
        (found.rows[0].size, found.tolerance),
        (0, 4),
        textcoords="offset points",
    )
    right = found.rows[-1].size if found.high is None else found.high
    if right > found.low:
        axes.axvspan(found.low, right, color=ORANGE, alpha=0.12, linewidth=0)
        axes.annotate(
            "cannot be told",
            (math.sqrt(found.low * right), 0),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=MUTED,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
        )
    if found.size is not None:
        axes.axvline(found.size, color=ORANGE, linewidth=1.4)


def _finish(axes: Axes, found: CriticalBatchSize) -> None:
    ticker = import_optional("matplotlib.ticker", "plot")
    axes.set_title(f"loss above that of batches of {found.rows[0].size:,}")
    axes.set_xlabel(f"batch size, over {found.samples:,} samples each")
    axes.set_xscale("log", base=2)
    axes.set_xticks([row.size for row in found.rows])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
