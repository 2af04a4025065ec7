"""Tensors that are spread over ranks (FSDP2), on their way into a checkpoint and back.

A checkpoint knows whole tensors. What is written of a sharded one are the pieces, each with its
place; what is read is cut for as many ranks as there are then. So neither needs the other ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Shard(NamedTuple):
    """This rank's part of a tensor that is spread over ranks.

    >>> import torch
    >>> Shard(torch.zeros(1, 4), shape=(3, 4), dim=0, offset=2)
    Shard(local=tensor([[0., 0., 0., 0.]]), shape=(3, 4), dim=0, offset=2)
    """

    local: Tensor
    """The part itself; where there are fewer rows than ranks it may have none."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int
    """The dimension that was cut."""
    offset: int
    """Where the part begins in that dimension."""


class TensorSlice(NamedTuple):
    """The indices `[offset, offset + length)` of a dimension."""

    dim: int
    offset: int
    length: int


class LazyTensor(NamedTuple):
    """A tensor that lies in a checkpoint, of which no more is read than is needed.

    >>> import torch
    >>> whole = torch.arange(6)
    >>> stored = LazyTensor((6,), lambda part: whole if part is None else whole.narrow(*part))
    >>> stored.read(TensorSlice(dim=0, offset=4, length=2))
    tensor([4, 5])
    """

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    read: Callable[[TensorSlice | None], Tensor]
    """Reads one part, or with None the whole."""


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is spread over ranks, as by `fully_shard`: each has parts to write.

    >>> is_sharded(nn.Linear(1, 1))
    False
    """
    return any(is_dtensor(parameter) for parameter in model.parameters())


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is spread over ranks, be it that each has all of it.

    >>> import torch
    >>> is_dtensor(torch.zeros(2))
    False
    """
    # Where nobody has imported it nothing can be one; importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_shard(tensor: Tensor) -> Tensor | Shard:
    """Return what this rank has to write of `tensor`; the memory stays the same where it can.

    A tensor that is cut over a mesh of one dimension, as `fully_shard` does, becomes a `Shard`;
    one that every rank has whole becomes a plain tensor, and so does one that is spread in any
    other way: that one is gathered, so every rank must call this.

    >>> import torch
    >>> to_shard(torch.ones(2))
    tensor([1., 1.])
    """
    tensor = tensor.detach()
    if not is_dtensor(tensor):
        return tensor
    placement = tensor.placements[0]
    if len(tensor.placements) > 1 or not (placement.is_replicate() or _is_cut(placement)):
        return tensor.full_tensor()
    local = tensor.to_local()
    if placement.is_replicate() or tensor.device_mesh.size() == 1:
        return local
    part = _part(tensor)
    return Shard(local, tuple(tensor.shape), part.dim, part.offset)


def shard_like(reference: Tensor, stored: Tensor | LazyTensor) -> Tensor:
    """Return a tensor of a checkpoint, laid out over ranks like `reference`.

    Every rank reads its own part and needs none of the others. A plain `reference`, or one of
    another shape, gives the whole tensor.

    Args:
        reference: a parameter or buffer of the run that goes on.
        stored: what was saved, in memory or to be read.

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
    if len(placements) > 1 or not _is_cut(placements[0]):
        return distribute_tensor(stored.read(None), mesh, placements, src_data_rank=None)
    return DTensor.from_local(
        stored.read(_part(reference)),
        mesh,
        placements,
        run_check=False,
        shape=reference.shape,
        stride=reference.stride(),
    )


def replicate_like(reference: DTensor, stored: Tensor | LazyTensor) -> Tensor:
    """Return a tensor of a checkpoint that every rank of `reference` has whole."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    whole = stored if isinstance(stored, Tensor) else stored.read(None)
    mesh = reference.device_mesh
    return distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)


def _is_cut(placement: object) -> bool:
    # Exactly: a kind of its own cuts in strides (tensor parallelism under FSDP).
    from torch.distributed.tensor import Shard as Cut

    return type(placement) is Cut


def _part(tensor: DTensor) -> TensorSlice:
    """The part of this rank: as `torch.chunk` cuts, so the last ranks may have none."""
    mesh = tensor.device_mesh
    dim = getattr(tensor.placements[0], "dim") % tensor.dim()  # noqa: B009  of a cut alone
    size = tensor.shape[dim]
    chunk = -(-size // mesh.size())
    offset = min(size, chunk * mesh.get_local_rank())
    return TensorSlice(dim, offset, min(size, offset + chunk) - offset)
