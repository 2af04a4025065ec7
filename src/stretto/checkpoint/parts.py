"""The files of tensors that each rank writes."""

from __future__ import annotations

import errno
import hashlib
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
from stretto.errors import CheckpointError


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


def stored_entry(parts: Mapping[str, TensorInfo], shard: Any) -> TensorEntry:
    """Return the entry of a tensor from its parts by file; `shard` lists several of them.

    Raises:
        DamagedError: they are not what `shard` lists.
    """
    if shard is None:
        ((file, (dtype, shape)),) = parts.items()
        return TensorEntry(dtype, shape, 0, (FilePart(file, 0, shape[0] if shape else 1),))
    shape, dim, pieces = tuple(shard["shape"]), shard["dim"], shard["pieces"]
    placed = tuple(FilePart(file, at, parts[file][1][dim]) for file, at in pieces)
    if sum(part.length for part in placed) != shape[dim]:
        raise DamagedError(f"{RECORDS} does not describe the tensors")
    return TensorEntry(parts[placed[0].file][0], shape, dim, placed)


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
        why, instead = f"the safetensors format has no {tensor.dtype}", "store it as another type"
    elif name == "__metadata__" or name != name.encode(errors="ignore").decode():
        why, instead = "the safetensors format cannot hold that name", "give it another name"
    else:
        return
    raise CheckpointError.cannot(f"save the tensor {name!r}", why=why, instead=instead)


ShardEntry: TypeAlias = tuple[Sequence[int], int, int, int, str]
"""One rank's shard of a tensor: shape of the whole, dimension, offset, length and file."""


class RankPart(NamedTuple):
    """The files and shards that one rank wrote; JSON keeps it as a list."""

    files: dict[str, tuple[int, str]]
    aliases: Mapping[str, Mapping[str, str]]
    shards: dict[str, dict[str, ShardEntry]]
    """By group and name."""


def merge(parts: Sequence[RankPart]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the aliases and shards of the whole checkpoint; parts are in rank order.

    Raises:
        CheckpointError: the shards of a tensor are incomplete or overlap.
    """
    aliases = {group: named for group, named in parts[0].aliases.items() if named}
    shards: dict[str, dict[str, Any]] = {}
    for group in dict.fromkeys(group for part in parts for group in part.shards):
        gathered: dict[str, list[ShardEntry]] = {}
        for part in parts:
            for name, entry in part.shards.get(group, {}).items():
                gathered.setdefault(name, []).append(entry)
        for name, entries in gathered.items():
            entries.sort(key=lambda entry: entry[2])
            shape, dim, *_ = entries[0]
            ends = [offset + length for _, _, offset, length, _ in entries]
            starts = [offset for _, _, offset, _, _ in entries]
            is_same = all(entry[:2] == entries[0][:2] for entry in entries)
            if not is_same or starts != [0, *ends[:-1]] or ends[-1] != shape[dim]:
                raise CheckpointError.cannot(
                    f"save {name!r} of {group}",
                    why=f"the shards of the ranks do not form a tensor of shape {tuple(shape)}",
                    instead="save from every rank that has a shard, all at the same step",
                )
            pieces = [[file, offset] for _, _, offset, _, file in entries]
            shards.setdefault(group, {})[name] = {"shape": shape, "dim": dim, "pieces": pieces}
    return aliases, shards
