"""The files of tensors that each rank writes."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from stretto._location import open_plain
from stretto.checkpoint.manifest import DamagedError, Entry
from stretto.checkpoint.sharding import Box, Shard
from stretto.errors import CheckpointError


class FilePart(NamedTuple):
    """The part of a tensor in one file."""

    file: str
    box: Box


class TensorEntry(NamedTuple):
    """The type, shape and files of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[FilePart, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorInfo(NamedTuple):
    """What one file has of a tensor."""

    dtype: torch.dtype
    length: tuple[int, ...]
    shape: tuple[int, ...]
    """That of the whole tensor."""
    offset: tuple[int, ...]


def stored_entry(parts: Mapping[str, TensorInfo]) -> TensorEntry:
    """Return the entry of a tensor from its parts by file.

    Raises:
        DamagedError: they do not make a tensor.
    """
    boxes = {file: Box(part.offset, part.length) for file, part in parts.items()}
    kinds = {(part.dtype, part.shape) for part in parts.values()}
    if len(kinds) > 1 or not tile(next(iter(kinds))[1], tuple(boxes.values())):
        raise DamagedError("the files do not describe whole tensors")
    dtype, shape = next(iter(kinds))
    return TensorEntry(dtype, shape, tuple(map(FilePart, boxes, boxes.values())))


def tile(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether boxes cover a tensor of that shape, each element once.

    They do if their volumes add up and each corner belongs to an even number of them, but for those
    of the whole: then an odd number of boxes covers each element.

    >>> tile((4, 2), [Box((0, 0), (1, 2)), Box((1, 0), (3, 2))])
    True
    """
    rank = len(shape)
    if any(len(at) != rank or len(length) != rank for at, length in boxes):
        return False
    whole = Box((0,) * rank, tuple(shape))
    cut = [dim for dim in range(rank) if any(box.length[dim] != shape[dim] for box in boxes)]
    corners: set[tuple[int, ...]] = set()
    for box in (whole, *boxes):
        if math.prod(box.length):
            ends = [(box.offset[dim], box.offset[dim] + box.length[dim]) for dim in cut]
            corners ^= set(itertools.product(*ends))
        if any(at < 0 or at + n > m for (at, n, m) in zip(*box, shape, strict=True)):
            return False
    # Uncut dimensions begin at 0: a box as long as the tensor fits nowhere else.
    volume = sum(math.prod(box.length) for box in boxes)
    return not corners and volume == math.prod(shape)


PLACES = "places"
"""What the metadata of a file call the shapes and offsets of its tensors."""
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


def write_tensors(file: Path, tensors: Mapping[str, Tensor | Shard]) -> Entry:
    """Write contiguous tensors in host memory to a new file, with fsync.

    Raises:
        CheckpointError: the format cannot hold one of them.
        OSError: the disk is full, or the file exists.
    """
    shards = {name: one for name, one in tensors.items() if isinstance(one, Shard)}
    plain = {name: one.local if isinstance(one, Shard) else one for name, one in tensors.items()}
    for name, tensor in plain.items():
        check_tensor(name, tensor)
    places = {name: (one.shape, one.offset) for name, one in shards.items()}
    metadata = {PLACES: json.dumps(places, separators=(",", ":"))} if places else None
    try:
        save_plain(plain, file, metadata)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))  # it has no other place for it
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number) if code else str(error)) from error
    with open_plain(file, buffering=0) as opened:
        os.fsync(opened.fileno())
        digest = hashlib.file_digest(opened, "sha256").hexdigest()  # type: ignore[arg-type]
    return Entry(file.stat().st_size, digest)


def save_plain(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None) -> None:
    """Write tensors to a new file that has the mode of any other new file.

    safetensors 0.8 writes a temporary file that is readable for its owner alone, and renames it.

    Raises:
        OSError: the file exists, or cannot be created.
        SafetensorError: it cannot be written.
    """
    with open_plain(file, "xb") as new:
        mode = os.fstat(new.fileno()).st_mode
    save_file(dict(tensors), file, metadata)
    with suppress(PermissionError):  # some mounts have one mode for all files
        file.chmod(stat.S_IMODE(mode))


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


ShardEntry: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Shape of a tensor; offset and length of one rank's shard of it."""


class RankPart(NamedTuple):
    """The files and shards that one rank wrote; JSON keeps it as a list."""

    files: dict[str, tuple[int, str]]
    aliases: Mapping[str, Mapping[str, str]]
    shards: dict[str, dict[str, ShardEntry]]
    """By group and name."""


def merge(parts: Sequence[RankPart]) -> dict[str, Any]:
    """Return the aliases of the whole checkpoint; parts are in rank order.

    Raises:
        CheckpointError: the shards of a tensor are incomplete or overlap.
    """
    aliases = {group: named for group, named in parts[0].aliases.items() if named}
    gathered: dict[tuple[str, str], list[ShardEntry]] = {}
    for part in parts:
        for group, named in part.shards.items():
            for name, entry in named.items():
                gathered.setdefault((group, name), []).append(entry)
    for (group, name), entries in gathered.items():
        shape = entries[0][0]
        boxes = [Box(tuple(offset), tuple(length)) for _, offset, length in entries]
        if any(entry[0] != shape for entry in entries) or not tile(shape, boxes):
            raise CheckpointError.cannot(
                f"save {name!r} of {group}",
                why=f"the shards of the ranks do not form a tensor of shape {tuple(shape)}",
                instead="save from every rank that has a shard, all at the same step",
            )
    return aliases
