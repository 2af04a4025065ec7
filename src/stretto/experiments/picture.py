"""Plot the excess loss over the batch size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto._optional import import_optional
from stretto.experiments.critical_batch_size import CriticalBatchSize
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_critical(found: CriticalBatchSize, path: Path) -> None:
    """Draw the excess loss of each size over the smallest, and the tolerance.

    Args:
        found: the result.
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
        sizes = [row.size for row in found.rows]
        axes.set_title(f"loss above that of batches of {sizes[0]:,}")
        axes.set_xlabel(f"batch size, over {found.samples:,} samples each")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.xaxis.minorticks_off()
        save(figure, path)


def _draw_branches(axes: Axes, found: CriticalBatchSize) -> None:
    rows = [row for row in found.rows if math.isfinite(row.excess)]
    base = {branch.seed: branch.loss for branch in found.branches if branch.size == rows[0].size}
    above = [
        (branch.size, branch.loss - base[branch.seed])
        for branch in found.branches
        if branch.size in {row.size for row in rows}
    ]
    axes.plot(*zip(*above, strict=True), "o", color=MUTED, markersize=3.5)
    axes.errorbar(
        [row.size for row in rows],
        [row.excess for row in rows],
        yerr=[row.reach if math.isfinite(row.reach) else 0.0 for row in rows],
        color=BLUE,
        marker="o",
        markersize=5,
        capsize=3,
        linewidth=1.6,
    )


def _draw_answer(axes: Axes, found: CriticalBatchSize) -> None:
    left, right = found.rows[0].size, found.high or found.rows[-1].size
    above: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points"}
    axes.axhline(found.tolerance, color=INK, linestyle="--", linewidth=1.2)
    axes.annotate(f"tolerance {found.tolerance:g}", (left, found.tolerance), **above)
    if right > found.low:
        axes.axvspan(found.low, right, color=ORANGE, alpha=0.12, linewidth=0)
        axes.annotate(
            "undecided",
            (math.sqrt(found.low * right), 0),
            **above,
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            color=MUTED,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
        )
    if found.size is not None:
        axes.axvline(found.size, color=ORANGE, linewidth=1.4)
