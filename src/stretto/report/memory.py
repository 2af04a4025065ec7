"""Tables of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.memory import Answer
from stretto.memory.amounts import show_bytes

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
