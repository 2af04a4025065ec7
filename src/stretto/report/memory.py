"""Tables and a picture of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.errors import FitError
from stretto.memory import Answer
from stretto.memory.amounts import show_bytes
from stretto.report.drawing import BLUE, INK, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes


HEADS = ("batch size", "peak", "headroom", "")


def memory_table(answer: Answer) -> str:
    """Return one line for each size around an answer; empty if it comes from trials.

    >>> from stretto.memory.answer import Cost
    >>> from stretto.memory.limits import MemoryLimit
    >>> answer = Answer(8, "phantom", 9, MemoryLimit(1024, "as stated"), 24, Cost(),
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
    for size, peak in answer.peaks.items():
        mark = answer.bound if size == answer.size else ""
        headroom = answer.limit.bytes - answer.reserve - peak
        rows.append((f"{size:,}", show_bytes(peak), show_bytes(headroom), mark))
    return _aligned(rows)


def answers_table(rows: Sequence[tuple[Mapping[str, object], Answer | None]]) -> str:
    """Return one line for each answer, after what was asked; then the notes of all of them.

    Args:
        rows: what was asked, such as `{"ranks": 8}`, and the answer; None: nothing fits.
    """
    table = [(*rows[0][0], "micro-batch", "batch", "peak of a rank", "by")]
    for asked, answer in rows:
        shown = (f"{one:,}" if isinstance(one, int) else str(one) for one in asked.values())
        cells = ("none fits", "", "", "")
        if answer is not None:
            peak = "" if answer.peak is None else show_bytes(answer.peak)
            batch = answer.size * int(str(asked.get("ranks", 1)))
            cells = (f"{answer.size:,}", f"{batch:,}", peak, answer.certainty)
        table.append((*shown, *cells))
    notes = dict.fromkeys(note for _, answer in rows if answer for note in answer.notes)
    return "\n".join([_aligned(table), *notes])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    *columns, _ = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  ".join(
            [*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    )


def draw_memory(answer: Answer, path: Path) -> None:
    """Draw the peak memory of the sizes that were looked at, with the limit.

    Args:
        answer: what a finder has found.
        path: a name that ends in `.png`, `.svg` or `.pdf`.

    Raises:
        ConfigError: the file cannot be written, or is of another kind.
        FitError: the answer comes from trials alone.
        MissingPackageError: matplotlib is not installed.
    """
    if not answer.peaks:
        why = "it comes from trials, which only say what fits"
        raise FitError.cannot(
            "draw an answer", why=why, instead="ask about a kind of GPU: --gpu h100"
        )
    with drawn(path, [3.6], answer.headline) as (axes,):
        sizes = list(answer.peaks)
        axes.plot(sizes, list(answer.peaks.values()), "o-", color=BLUE, markersize=4, label="peak")
        _draw_limit(axes, answer)
        axes.set_title("memory at the peak of a step")
        axes.set_xlabel("samples in a micro-batch")
        axes.set_xlim(0, max(sizes) * 1.05)
        axes.set_ylim(0, answer.limit.bytes * 1.22)
        # Binary units at round numbers.
        unit = max(1, 1 << (max(answer.limit.bytes.bit_length() - 3, 0)))
        axes.set_yticks(range(0, int(answer.limit.bytes * 1.22) + 1, unit))
        axes.yaxis.set_major_formatter(lambda value, _: show_bytes(int(value)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


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
