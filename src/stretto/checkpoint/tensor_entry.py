"""Where the values of a stored tensor are: in one file, or in several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from stretto.checkpoint.manifest import RECORDS, DamagedError
from stretto.errors import shown


class FilePart(NamedTuple):
    """The part of a tensor in one file."""

    file: str
    offset: int
    length: int


class TensorEntry(NamedTuple):
    """The type, shape and files of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int
    """The dimension along which it is sharded."""
    parts: tuple[FilePart, ...]
    """In order; a single part if it is not sharded."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


TensorInfo: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""The type and shape of what one file has of a tensor."""


def single_entry(name: str, parts: Mapping[str, TensorInfo]) -> TensorEntry:
    """Return the entry of a tensor that is in one file.

    Raises:
        DamagedError: several files have it.
    """
    if len(parts) != 1:
        raise DamagedError(f"{shown(name)} is there {len(parts)} times")
    ((file, (dtype, shape)),) = parts.items()
    return TensorEntry(dtype, shape, 0, (FilePart(file, 0, shape[0] if shape else 1),))


def sharded_entry(name: str, parts: Mapping[str, TensorInfo], shard: Any) -> TensorEntry:
    """Return the entry of a tensor in several files, as `shard` lists them.

    Raises:
        DamagedError: parts are missing, overlap, or leave gaps.
    """
    match shard:
        case {"shape": [*shape], "dim": int(dim), "pieces": [*listed]}:
            numbers = [dim, *shape]
        case _:
            raise DamagedError(f"{RECORDS} does not say how {shown(name)} is sharded")
    are_counts = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    if not are_counts or dim >= len(shape) or len(listed) != len(parts):
        raise DamagedError(f"{RECORDS} does not say how {shown(name)} is sharded")
    placed: list[FilePart] = []
    end = 0
    for entry in listed:
        match entry:
            case [str(file), int(offset)] if file in parts and type(offset) is int:
                dtype, part = parts[file]
            case _:
                raise DamagedError(f"{RECORDS} does not say where the parts of {shown(name)} are")
        whole = [*part[:dim], shape[dim], *part[dim + 1 :]]
        same = dtype == parts[listed[0][0]][0] and len(part) == len(shape) and whole == shape
        if not same or offset != end or file in {part.file for part in placed}:
            raise DamagedError(f"the parts of {shown(name)} are incomplete or overlap")
        placed.append(FilePart(file, offset, part[dim]))
        end += part[dim]
    if end != shape[dim] or not placed:
        raise DamagedError(f"the parts of {shown(name)} are incomplete or overlap")
    return TensorEntry(dtype, tuple(shape), dim, tuple(placed))
