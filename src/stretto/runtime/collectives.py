"""Collectives of a group of processes. Each process must make the same calls.

A group of None is the default one of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_started() -> bool:
    """Return whether this process has others to talk to.

    >>> is_started()
    False
    """
    return dist.is_available() and dist.is_initialized()


def all_sum(values: Sequence[float], group: Any = None) -> list[float]:
    """Return the sums of numbers over all processes; exact for integers up to 2^53."""
    packed = torch.tensor(values, dtype=torch.float64, device=_device(group))
    dist.all_reduce(packed, group=group)
    sums: list[float] = packed.tolist()
    return sums


def all_gather_rows(row: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensors of all processes, in their order, which have the same shape and type."""
    row = row.to(_device(group))
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return rows


def all_gather_texts(text: str, group: Any = None) -> list[str]:
    """Return the texts of all processes, in their order."""
    content = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = [int(length) for length in all_gather_rows(torch.tensor(content.numel()), group)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: content.numel()] = content
    rows = zip(all_gather_rows(padded, group), lengths, strict=True)
    return [bytes(row[:length].tolist()).decode() for row, length in rows]


def marks(number: int) -> tuple[int, int]:
    """Return two numbers whose sums over ranks show whether `number` is the same on all of them."""
    mark = number % 2**20  # so that sums of squares are exact
    return mark, mark * mark


def all_same(sums: Sequence[float], world_size: int) -> bool:
    """Return whether all ranks had the same marks, from their sums; equal on every rank.

    >>> all_same([3 + 3, 9 + 9], 2), all_same([1 + 2 + 3, 1 + 4 + 9], 3)
    (True, False)
    """
    total, squares = map(int, sums)
    return squares * world_size == total**2  # by Cauchy-Schwarz, of whole numbers


def _device(group: Any) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"
