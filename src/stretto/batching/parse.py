"""Batch size policies as they are written in Python: numbers, text, times, functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from stretto.batching.functions import SizeCallable, SizeFunction
from stretto.batching.policy import BatchSizePolicy
from stretto.batching.steps import Fixed, Steps
from stretto.errors import BatchSizeError, shown
from stretto.timing import Time

PolicyLike: TypeAlias = BatchSizePolicy | int | str | Mapping[str | Time, int] | SizeCallable
"""Anything that `as_policy` reads as a batch size policy."""


def as_policy(value: object) -> BatchSizePolicy:
    """Return `value` as a batch size policy.

    A number is the size of the whole run. Text is a number or steps. A mapping from times is
    steps. A function `(timestamp, current) -> size` is called before every batch.

    >>> as_policy(64), as_policy("0ep:32 2ep:64"), as_policy({"0ep": 32, "2ep": 64})
    (Fixed(64), Steps('0ep:32 2ep:64'), Steps('0ep:32 2ep:64'))

    Raises:
        BatchSizeError: it is none of these; the message says what to write.
        TimeError: a time cannot be read.
    """
    if isinstance(value, BatchSizePolicy):
        return value
    if isinstance(value, Mapping):
        if not value or any(isinstance(key, str) and key.isidentifier() for key in value):
            raise BatchSizeError.cannot(
                f"use {shown(dict(value))} as a batch size",
                why="its keys are no times",
                instead="write {'0ep': 8, '1ep': 16}, or a policy such as "
                "DoublingRamp(8, 64, over='40%')",
            )
        return Steps(value)
    if isinstance(value, str):
        if value == "auto":
            raise BatchSizeError.cannot(
                "use 'auto' as the batch size",
                why="the batch size decides what is trained, and is not found by trying",
                instead="write a number such as 256, and micro_batch_size='auto'",
            )
        text = value.strip().replace("_", "")
        is_number = text.isascii() and text.isdigit() and len(text) <= 18
        return Fixed(int(text)) if is_number else Steps(value)
    if callable(value) and not isinstance(value, type):
        return SizeFunction(value)
    if hasattr(value, "policy") and hasattr(value, "schedule"):
        raise BatchSizeError.cannot(
            f"take {value!r} for batch sizes",
            why="it is a pair of those and a schedule",
            instead="pass its policy as the batch size, and schedules={'lr': its schedule}",
        )
    return Fixed(value)  # type: ignore[arg-type]
