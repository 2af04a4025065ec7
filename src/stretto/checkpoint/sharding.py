"""Convert DTensors (FSDP2) to shards in a checkpoint, and back.

A checkpoint describes whole tensors. Each rank writes its shard with its offset. A reader takes
its part for any number of ranks. Neither needs communication.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class Shard(NamedTuple):
    """This rank's shard of a tensor.

    >>> import torch
    >>> Shard(torch.zeros(1, 4), shape=(3, 4), dim=0, offset=2)
    Shard(local=tensor([[0., 0., 0., 0.]]), shape=(3, 4), dim=0, offset=2)
    """

    local: Tensor
    """The shard; it can be empty if there are fewer rows than ranks."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int
    """The sharded dimension."""
    offset: int
    """Start of the shard in that dimension."""


class TensorSlice(NamedTuple):
    """The indices `[offset, offset + length)` of a dimension."""

    dim: int
    offset: int
    length: int


class LazyTensor(NamedTuple):
    """A tensor in a checkpoint that is read only as far as needed.

    >>> import torch
    >>> whole = torch.arange(6)
    >>> stored = LazyTensor((6,), lambda part: whole if part is None else whole.narrow(*part))
    >>> stored.read(TensorSlice(dim=0, offset=4, length=2))
    tensor([4, 5])
    """

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    read: Callable[[TensorSlice | None], Tensor]
    """Reads one slice; with None, the whole tensor."""


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is sharded over ranks, for example by `fully_shard`.

    >>> is_sharded(nn.Linear(1, 1))
    False
    """
    return any(is_dtensor(parameter) for parameter in model.parameters())


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a `DTensor`, sharded or replicated.

    >>> import torch
    >>> is_dtensor(torch.zeros(2))
    False
    """
    # If the module is not imported, there are no DTensors. Importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_shard(tensor: Tensor) -> Tensor | Shard:
    """Return what this rank writes of `tensor`, without a copy if possible.

    A tensor sharded over one dimension of a mesh, as by `fully_shard`, becomes a `Shard`; of equal
    ones (hybrid sharding), one rank has it, and the others' are empty. A replicated tensor becomes
    a plain tensor. A tensor with any other placement is gathered, so every rank must call this.

    >>> import torch
    >>> to_shard(torch.ones(2))
    tensor([1., 1.])
    """
    tensor = tensor.detach()
    if not is_dtensor(tensor):
        return tensor
    at, mesh = _cut_dimension(tensor), tensor.device_mesh
    if at is None:
        return tensor.full_tensor()  # without communication if all of it is replicated
    if mesh.size(at) == 1:
        return tensor.to_local()
    part, local = _part(tensor, at), tensor.to_local()
    if any(number for axis, number in enumerate(_coordinate(mesh)) if axis != at):
        local, part = local.narrow(part.dim, 0, 0), part._replace(offset=tensor.shape[part.dim])
    return Shard(local, tuple(tensor.shape), part.dim, part.offset)


def shard_like(reference: Tensor, stored: Tensor | LazyTensor) -> Tensor:
    """Return a tensor of a checkpoint, sharded like `reference`.

    Every rank reads only its own part. If `reference` is a plain tensor, or has another shape, the
    result is the whole tensor.

    Args:
        reference: a parameter or buffer of the resumed run.
        stored: the saved tensor, in memory or read lazily.

    >>> import torch
    >>> shard_like(torch.zeros(2), LazyTensor((2,), lambda part: torch.ones(2)))
    tensor([1., 1.])
    """
    if isinstance(stored, Tensor):
        whole = stored
        stored = LazyTensor(
            tuple(whole.shape), lambda part: whole if part is None else whole.narrow(*part).clone()
        )
    if not is_dtensor(reference) or tuple(reference.shape) != stored.shape:
        return stored.read(None)
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = reference.device_mesh, reference.placements
    at = _cut_dimension(reference)
    if at is None:
        return distribute_tensor(stored.read(None), mesh, placements, src_data_rank=None)
    return DTensor.from_local(
        stored.read(_part(reference, at)),
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
    for parameter in model.parameters():
        tensor, part = parameter.detach(), "whole"
        if is_dtensor(tensor):
            at, place = _cut_dimension(tensor), _coordinate(tensor.device_mesh)
            part = f"part {place if at is None else place[at]}"
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


def _cut_dimension(tensor: DTensor) -> int | None:
    """Return the only dimension of the mesh over which a tensor is sharded; None: no such one."""
    # Not isinstance: a subclass shards in strides (tensor parallelism under FSDP).
    from torch.distributed.tensor import Shard as Cut

    others = [at for at, one in enumerate(tensor.placements) if not one.is_replicate()]
    return others[0] if len(others) == 1 and type(tensor.placements[others[0]]) is Cut else None


def _coordinate(mesh: DeviceMesh) -> list[int]:
    """Return where in a mesh this rank is."""
    place: list[int] = (mesh.mesh == dist.get_rank()).nonzero()[0].tolist()
    return place


def _part(tensor: DTensor, at: int) -> TensorSlice:
    """Return the slice of this rank, as `torch.chunk` splits; the last ranks may have none."""
    mesh = tensor.device_mesh
    dim = getattr(tensor.placements[at], "dim") % tensor.dim()  # noqa: B009  of a cut alone
    size = tensor.shape[dim]
    chunk = -(-size // mesh.size(at))
    offset = min(size, chunk * _coordinate(mesh)[at])
    return TensorSlice(dim, offset, min(size, offset + chunk) - offset)
