"""Write files in the safetensors format in one pass.

The safetensors library would need a second pass over the file for the checksum, and does not call
fsync.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.checkpoint.manifest import Entry
from stretto.errors import CheckpointError

_CHUNK_BYTES = 32 << 20
"""Bytes hashed and written at a time, without the GIL. Taking the GIL back can take 5 ms, so chunks
are large."""
_LONGEST_HEADER = 100_000_000
"""Bytes; safetensors refuses longer headers."""

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
    header, ordered = _header(tensors)
    digest = hashlib.sha256()
    size = 0
    with file.open("xb", buffering=0) as opened:
        for chunk in _chunks(header, ordered):
            digest.update(chunk)
            size += len(chunk)
            rest = chunk
            while rest:
                rest = rest[opened.write(rest) :]
        os.fsync(opened.fileno())
    return Entry(size, digest.hexdigest())


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    # Largest item size first, so that each tensor is aligned for its type.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    entries: dict[str, Any] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise CheckpointError.cannot(
            f"save {len(names)} tensors in one file",
            why="their names and shapes are too long for the safetensors format",
            instead="save them as fewer tensors",
        )
    return len(text).to_bytes(8, "little") + text, [tensors[name] for name in names]


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


def _chunks(header: bytes, tensors: list[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a file without copying them."""
    yield memoryview(header)
    for tensor in tensors:
        assert tensor.is_contiguous()
        if not tensor.nbytes:
            continue
        whole = memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
        whole = whole.cast("B")
        for start in range(0, len(whole), _CHUNK_BYTES):
            yield whole[start : start + _CHUNK_BYTES]
