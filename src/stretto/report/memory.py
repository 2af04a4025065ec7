"""Tables and a picture of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.errors import FitError
from stretto.memory import Answer
from stretto.memory.amounts import show_bytes
from stretto.report.drawing import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    drawn,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


HEADS = ("batch size", "peak", "headroom", "")


def memory_table(answer: Answer) -> str:
    """Return one line for each size around an answer; empty if it comes from trials.

    >>> from stretto.memory.measuring.limits import MemoryLimit
    >>> from stretto.memory.finding.result import Cost
    >>> answer = Answer(8, "exact", 9, MemoryLimit(1024, "as stated"), 24, 990, Cost(),
    ...                 peaks={4: 500, 8: 990, 9: 1110})
    >>> print(memory_table(answer))
    batch size      peak  headroom
             4     500 B     500 B
             8     990 B      10 B  the largest that fits
             9  1.08 KiB    -110 B
    """
    if not answer.peaks:
        return ""
    rows = [HEADS]
    for row in answer.rows():
        mark = answer.bound if row.size == answer.size else ""
        rows.append((f"{row.size:,}", show_bytes(row.peak), show_bytes(row.headroom), mark))
    return _aligned(rows)


def ranks_table(answers: Mapping[int, Answer]) -> str:
    """Return one line for each number of ranks."""
    rows = [("ranks", "micro-batch", "batch", "peak of a rank")]
    for ranks, answer in answers.items():
        peak = "" if answer.peak is None else show_bytes(answer.peak)
        rows.append((f"{ranks:,}", f"{answer.size:,}", f"{ranks * answer.size:,}", peak))
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(
            [*(cell.rjust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]
        ).rstrip()
        for row in rows
    )


POINTS = 48
"""Sizes that are drawn; the curve between them is nearly straight."""
FEW_POINTS = 8
"""Sizes that are drawn if each of them has to be traced."""
BEYOND = 1.25
"""How far the picture reaches beyond the answer."""
KINDS = {
    "parameters": (("parameters", "buffers"), BLUE),
    "optimizer": (("optimizer",), GREEN),
    "gradients": (("gradients",), PURPLE),
    "activations": (("activations", "batch"), ORANGE),
    "temporaries": (("temporaries", "other"), MUTED),
}
"""The areas from the bottom up, and their colours."""


def draw_memory(answer: Answer, path: Path) -> None:
    """Draw the memory of a step for each size, by kind at the peak, with the limit.

    Args:
        answer: what a finder has found.
        path: a name that ends in `.png`, `.svg` or `.pdf`.

    Raises:
        ConfigError: the file cannot be written, or is of another kind.
        FitError: the answer comes from trials, which know no other sizes.
        MissingPackageError: matplotlib is not installed.
    """
    if answer.estimator is None:
        why = "the answer comes from trials, which know no other size"
        raise FitError.cannot("draw an answer", why=why, instead="use --method predict or probe")
    sizes, areas = memory_areas(answer)
    with drawn(path, [3.6], answer.headline) as (axes,):
        colors = [KINDS[name][1] if name in KINDS else INK for name in areas]
        axes.stackplot(sizes, *areas.values(), labels=list(areas), colors=colors, alpha=0.45)
        axes.plot(sizes, [sum(column) for column in zip(*areas.values(), strict=True)], color=INK)
        _draw_limit(axes, answer)
        axes.set_title("memory at the peak of a step")
        axes.set_xlabel("samples in a micro-batch")
        axes.set_xlim(0, sizes[-1])
        axes.set_ylim(0, answer.limit.bytes * 1.22)
        # Binary units at round numbers.
        unit = max(1, 1 << (max(answer.limit.bytes.bit_length() - 3, 0)))
        axes.set_yticks(range(0, int(answer.limit.bytes * 1.22) + 1, unit))
        axes.yaxis.set_major_formatter(lambda value, _: show_bytes(int(value)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)


def memory_areas(answer: Answer) -> tuple[list[int], dict[str, list[int]]]:
    """Return the drawn sizes, and for each kind of memory its bytes at the peak.

    Memory beyond tensors is a separate kind: what CUDA's allocator reserves, and what was
    measured.
    """
    top = max(int(answer.size * BEYOND), answer.size + 1, 4)
    is_costly = answer.estimator.guess(answer.limit.bytes) is not None
    step = max(1, top // (FEW_POINTS if is_costly else POINTS))
    sizes = sorted({*range(1, top, step), answer.size, top})
    areas: dict[str, list[int]] = {name: [] for name in KINDS}
    extra = []
    for size in sizes:
        by_category = answer.estimator.at(size).by_category
        for name, (categories, _) in KINDS.items():
            areas[name].append(sum(by_category.get(one, 0) for one in categories))
        total = sum(values[-1] for values in areas.values())
        extra.append(max(0, answer.needs(size) - total) if answer.needs else 0)
    if any(extra):
        areas["beyond tensors"] = extra
    return sizes, {name: values for name, values in areas.items() if any(values)}


def _draw_limit(axes: Axes, answer: Answer) -> None:
    usable = answer.limit.bytes - answer.reserve
    label = f"limit: {show_bytes(answer.limit.bytes)}"
    if answer.reserve:
        label += f", {show_bytes(answer.reserve)} left free"
        axes.axhspan(usable, answer.limit.bytes, color=INK, alpha=0.08, linewidth=0)
    axes.axhline(usable, color=INK, linestyle="--", linewidth=1.2, label=label)
    if answer.peak is not None:
        label = f"{answer.size:,} samples"
        axes.plot([answer.size], [answer.peak], "o", color=INK, markersize=6, label=label)
