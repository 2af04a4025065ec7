"""Models whose parameters several ranks share, and what that means for their gradients."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.errors import TrainingError
from stretto.runtime.compiled import uncompiled

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def check_shapes(model: nn.Module, what: str) -> None:
    """Refuse a model with lazy layers, whose weights have no shape before the first pass.

    Raises:
        TrainingError: it has some; `what` cannot be done then.
    """
    if any(map(is_lazy, model.parameters())):
        why, instead = "it has lazy layers", "run one batch through the model first: model(inputs)"
        raise TrainingError.cannot(f"{what} {type(model).__name__}", why=why, instead=instead)


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a model; a compiled one counts as what it is of.

    >>> is_fully_sharded(nn.Linear(1, 1))
    False
    """
    # If it is not imported, no model is sharded; importing it takes a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    return isinstance(model, fsdp.FSDPModule) or isinstance(uncompiled(model), fsdp.FSDPModule)


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


def local_part(tensor: Tensor) -> Tensor:
    """Return the memory of this rank's part of a tensor: torch mixes no meshes in one call.

    >>> local_part(torch.ones(1))
    tensor([1.])
    """
    return tensor.to_local() if is_dtensor(tensor) else tensor


def is_spread(model: nn.Module) -> bool:
    """Return whether ranks share the parameters of a model.

    >>> is_spread(nn.Linear(1, 1))
    False
    """
    return is_fully_sharded(model) or is_sharded(model)


def touching_all(model: nn.Module, loss: Tensor) -> Tensor:
    """Return `loss` with every parameter added, so that all have a gradient, each of its kind.

    >>> layer, loss = nn.Linear(1, 1), torch.zeros(())
    >>> (0.0 * touching_all(layer, loss)).backward()
    >>> layer.weight.grad
    tensor([[0.]])
    """
    layers, tables = model.modules(), nn.Embedding | nn.EmbeddingBag
    sparse = {id(table.weight) for table in layers if isinstance(table, tables) and table.sparse}
    row = torch.zeros(1, dtype=torch.int64, device=loss.device)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in sparse:
            loss = loss + nn.functional.embedding(row, parameter, sparse=True).sum()
        else:
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            loss = loss + real.sum()
    return loss


def fully_shard_blocks(model: nn.Module, mesh: Any, dtype: torch.dtype | None = None) -> None:
    """Shard each block of a `ModuleList`, then the rest, over a mesh with FSDP2.

    Args:
        model: the model.
        mesh: the mesh.
        dtype: what it computes in, if not as it is; gradients are summed, and the output of the
            model is, in 32 bits.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    wide = None if dtype is None else torch.float32
    inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
    outer = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=wide)
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                if any(True for _ in block.parameters()):
                    fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=outer)
