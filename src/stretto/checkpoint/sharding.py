"""Convert DTensors (FSDP2) to shards in a checkpoint, and back.

A checkpoint describes whole tensors. Each rank writes its shard with its offset. A reader takes
its part for any number of ranks. Neither needs communication.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
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

    A tensor sharded over a one-dimensional mesh, as by `fully_shard`, becomes a `Shard`. A
    replicated tensor becomes a plain tensor. A tensor with any other placement is gathered, so
    every rank must call this.

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
    """Return a tensor of a checkpoint, replicated over the mesh of `reference`."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    whole = stored if isinstance(stored, Tensor) else stored.read(None)
    mesh = reference.device_mesh
    return distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)


def _is_cut(placement: object) -> bool:
    # Not isinstance: a subclass shards in strides (tensor parallelism under FSDP).
    from torch.distributed.tensor import Shard as Cut

    return type(placement) is Cut


def _part(tensor: DTensor) -> TensorSlice:
    """Return the slice of this rank, as `torch.chunk` splits; the last ranks may have none."""
    mesh = tensor.device_mesh
    dim = getattr(tensor.placements[0], "dim") % tensor.dim()  # noqa: B009  of a cut alone
    size = tensor.shape[dim]
    chunk = -(-size // mesh.size())
    offset = min(size, chunk * mesh.get_local_rank())
    return TensorSlice(dim, offset, min(size, offset + chunk) - offset)
