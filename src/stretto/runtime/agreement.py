"""Whether all ranks of a run say the same, before one of them waits for another in vain."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeAlias

from torch import Tensor

from stretto.batching import Tokens
from stretto.errors import TrainingError
from stretto.runtime.ranks import Ranks

Plain: TypeAlias = bool | int | float | str | None
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LONGEST_TEXT = 100


def check_agreement(settings: Mapping[str, str | None], ranks: Ranks, *, call: str) -> None:
    """Refuse to go on if `settings` are not the same on every rank, which must all call it.

    Ranks with different settings would train on wrong samples, or wait for each other without end.
    They compare a digest; only if it differs do they exchange the settings.

    Args:
        settings: by name; None: this rank does not know it.
        ranks: the processes of the run.
        call: what the user has called.

    Raises:
        TrainingError: they are not; it names the first that differs, on every rank.
    """
    texts = ranks.differing(json.dumps(settings), call=call)
    difference = first_difference([json.loads(one) for one in texts])
    if difference is None:
        return
    raise TrainingError.cannot(
        f"train on {ranks.world_size} ranks with different settings",
        why=difference,
        instead="write the same settings on every rank",
    )


def first_difference(records: Sequence[Mapping[str, str | None]]) -> str | None:
    """Return the first setting that differs, its values, and who has them; None: none does.

    >>> first_difference([{"seed": "1"}, {"seed": "2"}, {"seed": "1"}])
    'seed is 1 on ranks 0, 2 and 2 on rank 1'
    """
    for name in {name: None for record in records for name in record}:
        values = [record.get(name, "missing") for record in records]
        if len(set(values) - {None}) > 1:
            return f"{name} is {_listed([str(value) for value in values])}"
    return None


def in_batch(number: int, values: Mapping[str, object]) -> dict[str, str]:
    """Return what functions, which are compared by name only, or streams may have set apart.

    >>> in_batch(3, {"lr": 0.1})
    {'lr in batch 3': '0.1'}
    """
    return {
        f"{name} in batch {number}": f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
    }


def plain(value: Any) -> Plain:
    """Return a setting as JSON keeps it: None, a number, a flag or text."""
    if isinstance(value, Tokens):
        return str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return value if isinstance(value, float) and isfinite(value) else as_text(value)


def as_text(value: Any) -> str:
    """Return a setting as it is compared and shown: a function by its name, else its repr."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Tensor):
        value = value.tolist() if value.numel() == 1 else list(value.shape)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={as_text(one)}" for name, one in value.items())
    return _ADDRESS.sub("", repr(value))


def _listed(values: Sequence[str]) -> str:
    """Return the different values, each with its ranks; of a long one, the part that differs."""
    letters = enumerate(zip(*values, strict=False))
    first = next((place for place, several in letters if len(set(several)) > 1), 0)
    start = max(0, first - _LONGEST_TEXT // 4)
    by_value: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(str(rank))
    parts = []
    for value, ranks in by_value.items():
        part = value[start : start + _LONGEST_TEXT]
        shown = value if len(value) <= _LONGEST_TEXT else f"...{part}..."
        listed = ", ".join(ranks[:8]) + (" ..." if len(ranks) > 8 else "")
        parts.append(f"{shown} on rank{'s' if len(ranks) > 1 else ''} {listed}")
    return " and ".join(parts[:3]) + (" (and more)" if len(parts) > 3 else "")
