"""Settings that must be the same on every rank, compared before ranks wait for each other."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from math import isfinite
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeAlias

from torch import Tensor

from stretto.distributed.ranks import Ranks
from stretto.errors import TrainingError

Plain: TypeAlias = bool | int | float | str | None
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LONGEST = 100


def check_agreement(settings: Mapping[str, str], ranks: Ranks, *, call: str) -> None:
    """Refuse to go on if `settings` are not the same on every rank, which must all call it.

    Ranks with different settings would train on wrong samples, or wait for each other without end.
    They compare a digest; only if it differs do they exchange the settings.

    Args:
        settings: by name.
        ranks: the processes of the run.
        call: what the user has called.

    Raises:
        TrainingError: they are not; it names the first that differs, on every rank.
    """
    if ranks.world_size == 1:
        return
    text = json.dumps(settings)
    if len(set(ranks.gather(hashlib.sha256(text.encode()).hexdigest(), call=call))) == 1:
        return
    difference = first_difference([json.loads(one) for one in ranks.gather(text)])
    raise TrainingError.cannot(
        f"train on {ranks.world_size} ranks with different settings",
        why=difference,
        instead="write the same settings on every rank",
    )


def first_difference(records: Sequence[Mapping[str, str]]) -> str:
    """Return the first setting that differs, its values, and who has them.

    >>> first_difference([{"seed": "1"}, {"seed": "2"}, {"seed": "1"}])
    'seed is 1 on ranks 0, 2 and 2 on rank 1'
    """
    for name in {name: None for record in records for name in record}:
        values = [record.get(name, "missing") for record in records]
        if len(set(values)) > 1:
            return f"{name} is {_listed(values)}"
    return "their order differs"


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
    """The different values, each with the ranks that have it."""
    pairs = takewhile(lambda letters: len(set(letters)) == 1, zip(*values, strict=False))
    start = sum(1 for _ in pairs)
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    shown = [f"{_cut(value, start)} on {_ranks(ranks)}" for value, ranks in by_value.items()]
    return " and ".join(shown[:3]) + (" (and more)" if len(shown) > 3 else "")


def _cut(value: str, start: int) -> str:
    """A value; of a long one, what is around the first difference."""
    if len(value) <= _LONGEST:
        return value
    first = max(0, min(start - _LONGEST // 4, len(value) - _LONGEST))
    part = value[first : first + _LONGEST]
    return f"{'...' if first else ''}{part}{'...' if first + _LONGEST < len(value) else ''}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = ", ".join(map(str, ranks[:8]))
    return f"ranks {listed}{' ...' if len(ranks) > 8 else ''}"
