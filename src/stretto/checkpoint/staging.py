"""Copies of a run's tensors in host memory, for asynchronous checkpoints."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor

from stretto.checkpoint.sharding import Shard
from stretto.errors import CheckpointError

Tensors = Mapping[str, Mapping[str, Tensor | Shard]]
"""Tensors by group and name; of a sharded tensor, this rank's shard."""


class Staged(NamedTuple):
    """What one rank writes: contiguous tensors in host memory."""

    tensors: dict[str, dict[str, Tensor | Shard]]
    """By group and name; shared memory is copied once."""
    aliases: dict[str, dict[str, str]]
    """By group: names of tensors that share memory with another one."""


@final
class HostCopies:
    """Copies tensors to host memory, into buffers that the next checkpoint reuses.

    Only the first copy allocates. The result of `take` is valid until the next call.

    >>> import torch
    >>> weight = torch.ones(2)
    >>> staged = HostCopies().take({"model": {"head": weight, "embedding": weight}})
    >>> weight.zero_().tolist(), staged.tensors["model"]["head"].tolist(), staged.aliases
    ([0.0, 0.0], [1.0, 1.0], {'model': {'embedding': 'head'}})
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, tensors: Tensors) -> Staged:
        """Return copies of `tensors`; those of an accelerator are in pinned memory.

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

    def release(self) -> None:
        """Give the buffers back to the system; torch would keep pinned memory for later."""
        self._buffers = {}
        # Not in torch 2.7. Only with a device: without one there is nothing to empty.
        if torch.cuda.is_initialized() and hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()


def _memory(tensor: Tensor, group: str, name: str) -> Hashable:
    """A key that is equal for two tensors if they are the same view of the same memory."""
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
        raise CheckpointError.cannot(
            f"save {name!r} of {group}",
            why="it is sparse, quantized or on the meta device",
            instead="save dense tensors from which you can rebuild it",
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
    """Return a contiguous buffer in host memory: the previous one if it matches."""
    is_remote = like.device.type == "cuda"
    if (
        before is not None
        and before.shape == like.shape
        and before.dtype == like.dtype
        and (before.is_pinned() or not is_remote)
    ):
        return before
    if is_remote and like.numel():
        # Without pinned memory, the driver copies through a small buffer in chunks.
        try:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        except RuntimeError:  # the system allows no more pinned memory
            pass
    return torch.empty(like.shape, dtype=like.dtype)
