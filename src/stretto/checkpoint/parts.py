"""The files of tensors that each rank writes."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from stretto.checkpoint.manifest import RECORDS, DamagedError, Entry
from stretto.errors import CheckpointError, shown


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


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> Entry:
    """Write contiguous tensors in host memory to a new file, with fsync.

    Raises:
        CheckpointError: the format cannot hold one of them.
        OSError: the disk is full, or the file exists.
    """
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    file.open("xb").close()
    try:
        save_file(dict(tensors), file)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))  # it has no other place for it
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number) if code else str(error)) from error
    with file.open("rb", buffering=0) as opened:
        os.fsync(opened.fileno())
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return Entry(file.stat().st_size, digest)


def check_tensor(name: str, tensor: Tensor) -> None:
    """Check that a file can hold a tensor.

    Raises:
        CheckpointError: the format does not support its type or name.
    """
    if tensor.dtype not in _NAMES:
        raise CheckpointError.cannot(
            f"save {name!r}",
            why=f"the safetensors format has no {tensor.dtype}",
            instead="store it as another type, such as a view of it as integers",
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        is_text = False
    else:
        is_text = name != "__metadata__"
    if not is_text:
        raise CheckpointError.cannot(
            f"save the tensor {name!r}",
            why="the safetensors format cannot hold that name",
            instead="give it another name",
        )


class ShardEntry(NamedTuple):
    """One rank's shard of a tensor, and its file."""

    shape: Sequence[int]
    """Shape of the whole tensor."""
    dim: int
    offset: int
    length: int
    file: str


class RankPart(NamedTuple):
    """The files and shards that one rank wrote."""

    files: dict[str, Entry]
    aliases: Mapping[str, Mapping[str, str]]
    entries: dict[str, dict[str, ShardEntry]]
    """By group and name."""

    def to_text(self) -> str:
        """Return it as JSON, for the first rank."""
        return json.dumps(self)

    @staticmethod
    def from_text(text: str) -> RankPart:
        """Read the text of `to_text`."""
        files, aliases, entries = json.loads(text)
        for named in entries.values():
            named.update((name, ShardEntry(*entry)) for name, entry in named.items())
        return RankPart({name: Entry(*one) for name, one in files.items()}, aliases, entries)


def merge(parts: Sequence[RankPart]) -> tuple[str, str]:
    """Return aliases and shards of the whole checkpoint as JSON; parts are in rank order.

    Raises:
        CheckpointError: the shards of a tensor are incomplete or overlap.
    """
    aliases = parts[0].aliases
    shards: dict[str, dict[str, Any]] = {group: {} for group in aliases}
    for group in aliases:
        gathered: dict[str, list[ShardEntry]] = {}
        for part in parts:
            for name, entry in part.entries.get(group, {}).items():
                gathered.setdefault(name, []).append(entry)
        for name, entries in gathered.items():
            entries.sort(key=lambda entry: entry.offset)
            shape, dim, *_ = entries[0]
            ends = [entry.offset + entry.length for entry in entries]
            if (
                any((entry.shape, entry.dim) != (shape, dim) for entry in entries)
                or [entry.offset for entry in entries] != [0, *ends[:-1]]
                or ends[-1] != shape[dim]
                or name in aliases[group]
            ):
                raise CheckpointError.cannot(
                    f"save {name!r} of {group}",
                    why=f"the shards of the ranks do not form a tensor of shape {tuple(shape)}",
                    instead="save from every rank that has a shard, all at the same step",
                )
            pieces = [[entry.file, entry.offset] for entry in entries]
            shards[group][name] = {"shape": shape, "dim": dim, "pieces": pieces}
    encode = json.JSONEncoder(separators=(",", ":")).encode
    return encode(aliases), encode(shards)
