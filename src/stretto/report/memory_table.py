"""A finder's answer as a table: peak and headroom of each size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.memory import Answer
from stretto.memory.amounts import show_bytes

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
