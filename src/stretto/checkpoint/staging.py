"""Copies of a run's tensors in host memory, from which a checkpoint is written at leisure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor

from stretto.checkpoint.sharding import Shard
from stretto.errors import CheckpointError, cannot

Tensors = Mapping[str, Mapping[str, Tensor | Shard]]
"""Tensors by group and name; of one that is spread over ranks, this rank's part."""


class Staged(NamedTuple):
    """What one rank has to write: contiguous tensors in host memory."""

    tensors: dict[str, dict[str, Tensor | Shard]]
    """By group and name; each memory once."""
    aliases: dict[str, dict[str, str]]
    """By group: names that stand for the same memory as another one."""


@final
class HostCopies:
    """Copies tensors to host memory, into buffers that are used again for the next checkpoint.

    So only the first copy pays for allocation. What `take` returned is valid until the next call.

    >>> import torch
    >>> weight = torch.ones(2)
    >>> staged = HostCopies().take({"model": {"head": weight, "embedding": weight}})
    >>> weight.zero_().tolist(), staged.tensors["model"]["head"].tolist(), staged.aliases
    ([0.0, 0.0], [1.0, 1.0], {'model': {'embedding': 'head'}})
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, tensors: Tensors) -> Staged:
        """Return copies of `tensors` as they are now; those of an accelerator in pinned memory.

        Raises:
            CheckpointError: one of them is not a plain tensor in memory.
        """
        before, self._buffers = self._buffers, {}
        copies: dict[Hashable, Tensor] = {}
        devices: set[torch.device] = set()
        staged = Staged({}, {})
        for group, named in tensors.items():
            own, aliases = staged.tensors.setdefault(group, {}), staged.aliases
            first: dict[Hashable, str] = {}
            aliases[group] = {}
            for name, entry in named.items():
                local = (entry.local if isinstance(entry, Shard) else entry).detach()
                memory = _memory(local, group, name)
                place = (memory, *entry[1:]) if isinstance(entry, Shard) else (memory,)
                original = first.setdefault(place, name) if local.numel() else name
                if original != name:
                    aliases[group][name] = original
                    continue
                if memory not in copies or not local.numel():
                    copy = _buffer(before.pop((group, name), None), local)
                    copy.copy_(local, non_blocking=copy.is_pinned())
                    self._buffers[group, name] = copies[memory] = copy
                    if local.device.type != "cpu":
                        devices.add(local.device)
                copy = copies[memory]
                own[name] = entry._replace(local=copy) if isinstance(entry, Shard) else copy
        for device in devices:
            torch.accelerator.synchronize(device)
        return staged


def _memory(tensor: Tensor, group: str, name: str) -> Hashable:
    """What two tensors have in common exactly if they show the same values of the same memory."""
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
        raise CheckpointError(
            cannot(
                f"save {name!r} of {group}",
                why="its values do not lie in memory one by one (it is sparse, quantized or meta)",
                instead="save plain tensors that it can be made from",
            )
        )
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _buffer(before: Tensor | None, like: Tensor) -> Tensor:
    """A contiguous tensor in host memory: the one from before, if it fits."""
    is_remote = like.device.type == "cuda"
    if (
        before is not None
        and before.shape == like.shape
        and before.dtype == like.dtype
        and (before.is_pinned() or not is_remote)
    ):
        return before
    if is_remote and like.numel():
        # Without pinned memory the copy goes through a small buffer of the driver's, in pieces.
        try:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        except RuntimeError:  # the system allows no more of it
            pass
    return torch.empty(like.shape, dtype=like.dtype)
