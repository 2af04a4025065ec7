"""Shards of DTensors in a checkpoint, and their copies in host memory.

A checkpoint describes whole tensors. Each rank writes the boxes that it owns. A reader takes its
box on any mesh. Neither needs communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.errors import CheckpointError
from stretto.runtime.sharded import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class Box(NamedTuple):
    """The indices `[offset, offset + length)` of each dimension of a tensor.

    >>> Box((2, 0), (1, 4)).slices
    (slice(2, 3, None), slice(0, 4, None))
    """

    offset: tuple[int, ...]
    length: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index."""
        return tuple(slice(at, at + n) for at, n in zip(self.offset, self.length, strict=True))


class Shard(NamedTuple):
    """This rank's shard of a tensor.

    >>> import torch
    >>> Shard(torch.zeros(1, 4), shape=(3, 4), offset=(2, 0))
    Shard(local=tensor([[0., 0., 0., 0.]]), shape=(3, 4), offset=(2, 0))
    """

    local: Tensor
    """The shard; it is empty if this rank has nothing to write."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where the shard begins in each dimension."""

    @property
    def box(self) -> Box:
        """The indices that it has."""
        return Box(self.offset, tuple(self.local.shape))


class LazyTensor(NamedTuple):
    """A tensor in a checkpoint that is read only as far as needed.

    >>> import torch
    >>> whole = torch.arange(6)
    >>> stored = LazyTensor((6,), lambda box: whole if box is None else whole[box.slices])
    >>> stored.read(Box((4,), (2,)))
    tensor([4, 5])
    """

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    read: Callable[[Box | None], Tensor]
    """Reads one box; with None, the whole tensor."""


def to_shard(tensor: Tensor) -> Tensor | Shard:
    """Return what this rank writes of `tensor`, without a copy if possible.

    A `DTensor` that is cut over any dimensions of a mesh, as by `fully_shard` or
    `parallelize_module`, becomes a `Shard`; of ranks with the same box, one has it and the others'
    are empty. A replicated tensor becomes a plain tensor. A tensor with any other placement is
    gathered, so every rank must call this.

    >>> import torch
    >>> to_shard(torch.ones(2))
    tensor([1., 1.])
    """
    tensor = tensor.detach()
    if not is_dtensor(tensor):
        return tensor
    box = _box(tensor)
    if box is None:
        return tensor.full_tensor()
    local, shape = tensor.to_local(), tuple(tensor.shape)
    if box.length == shape and all(one.is_replicate() for one in tensor.placements):
        return local
    if tensor.device_mesh.size() == 1:
        return local
    return Shard(local if is_owner(tensor) else local.flatten()[:0], shape, box.offset)


def is_owner(tensor: DTensor) -> bool:
    """Return whether this rank is the first of those that have the same part of a tensor.

    Of meshes that each have a copy of the tensor, the one with rank 0 comes first.
    """
    mesh = tensor.device_mesh
    places = zip(tensor.placements, _coordinate(mesh), strict=True)
    is_first = not any(number for one, number in places if one.is_replicate())
    return is_first and bool((mesh.mesh == 0).any())


def shard_like(reference: Tensor, stored: Tensor | LazyTensor) -> Tensor:
    """Return a tensor of a checkpoint, sharded like `reference`.

    Every rank reads only its own part. If `reference` is a plain tensor, or has another shape, the
    result is the whole tensor.

    Args:
        reference: a parameter or buffer of the resumed run.
        stored: the saved tensor, in memory or read lazily.

    >>> import torch
    >>> shard_like(torch.zeros(2), LazyTensor((2,), lambda box: torch.ones(2)))
    tensor([1., 1.])
    """
    if isinstance(stored, Tensor):
        whole = stored
        stored = LazyTensor(
            tuple(whole.shape), lambda box: whole if box is None else whole[box.slices].clone()
        )
    if not is_dtensor(reference) or tuple(reference.shape) != stored.shape:
        return stored.read(None)
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = reference.device_mesh, reference.placements
    box = _box(reference)
    if box is None:
        return distribute_tensor(stored.read(None), mesh, placements, src_data_rank=None)
    return DTensor.from_local(
        stored.read(None if box.length == stored.shape else box),
        mesh,
        placements,
        run_check=False,
        shape=reference.shape,
        stride=reference.stride(),
    )


def replicate_like(reference: DTensor, stored: Tensor | LazyTensor) -> Tensor:
    """Return a tensor of a checkpoint, replicated over the mesh of `reference`."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    whole = stored if isinstance(stored, Tensor) else stored.read(None)
    mesh = reference.device_mesh
    return distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)


def replicas(model: nn.Module) -> dict[str, int]:
    """Return sums over this rank's parameters, by the part that it has of sharded ones.

    Ranks that have the same part have equal sums, unless their weights differ.

    >>> replicas(nn.ParameterList([torch.zeros(2)]))
    {'whole': 0}
    """
    sums: dict[str, list[Tensor]] = {}
    absent = [name for name, one in model.named_parameters() if one.is_meta]  # on other ranks
    plain = f"all but {absent}" if absent else "whole"
    for parameter in model.parameters():
        if parameter.is_meta:
            continue
        tensor, part = parameter.detach(), plain
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            places = zip(tensor.placements, _coordinate(mesh), strict=True)
            place = [None if one.is_replicate() else number for one, number in places]
            part = f"part {place} of {mesh.mesh_dim_names or tuple(mesh.shape)}"
            tensor = tensor.to_local()
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        whole = tensor.contiguous().view(_INTEGERS[tensor.itemsize])
        sums.setdefault(part, []).append(whole.sum(dtype=torch.int64))
    # Read in one transfer, and of different weight, so that exchanged tensors show.
    totals = {part: torch.stack([one.cpu() for one in found]) for part, found in sums.items()}
    return {
        part: int((found * torch.arange(1, len(found) + 1)).sum()) for part, found in totals.items()
    }


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _box(tensor: DTensor) -> Box | None:
    """Return what this rank has of a tensor, as `torch.chunk` cuts; None: it is no box."""
    # Not isinstance: a subclass cuts in strides, where a later dimension has cut before.
    from torch.distributed.tensor import Shard as Cut

    mesh, placements = tensor.device_mesh, tensor.placements
    place = _coordinate(mesh)
    cuts = [axis for axis, one in enumerate(placements) if not one.is_replicate()]
    plain = [axis for axis in cuts if type(placements[axis]) is Cut]
    strided = [axis for axis in reversed(cuts) if axis not in plain]
    offset, length = [0] * tensor.dim(), list(tensor.shape)
    for axis in (*plain, *strided):
        cut: Any = placements[axis]
        if cut.is_partial():
            return None
        dim = cut.dim % tensor.dim()
        later = [(one, getattr(placements[one], "dim", None)) for one in cuts if one > axis]
        before = [mesh.size(one) for one, other in later if other == cut.dim]
        if axis in strided and getattr(cut, "split_factor", 0) != math.prod(before):
            return None
        chunk = -(-length[dim] // mesh.size(axis))
        start = min(length[dim], chunk * place[axis])
        length[dim] = min(length[dim], start + chunk) - start
        offset[dim] += start
    is_as_torch_cuts = tuple(tensor.to_local().shape) == tuple(length)
    return Box(tuple(offset), tuple(length)) if is_as_torch_cuts else None


def _coordinate(mesh: DeviceMesh) -> list[int]:
    """Return where in a mesh this rank is."""
    place: list[int] = (mesh.mesh == dist.get_rank()).nonzero()[0].tolist()
    return place


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
