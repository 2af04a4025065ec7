"""What a gradient is taken of: a scalar loss, and the parameters of a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.errors import TrainingError
from stretto.runtime.compiled import uncompiled


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


def scalar(loss: object) -> Tensor:
    """Return the loss, if it is one.

    Raises:
        TrainingError: it is no scalar tensor.
    """
    if isinstance(loss, Tensor) and not loss.dim():
        return loss
    shape = list(loss.shape) if isinstance(loss, Tensor) else None
    raise TrainingError.cannot(
        f"learn from a loss of type {type(loss).__name__}",
        why="it is no tensor" if shape is None else f"its shape is {shape}",
        instead="return a scalar tensor, such as losses.mean()",
    )


def detached(loss: Tensor) -> Tensor:
    """Return a loss that can be kept: without its graph, in memory of its own.

    `mse_loss`, `smooth_l1_loss` and `soft_margin_loss` return a scalar in memory as large as the
    output of the model, and losses are kept until they are logged.

    >>> loss = nn.functional.mse_loss(torch.ones(1024), torch.zeros(1024))
    >>> loss.untyped_storage().nbytes(), detached(loss).untyped_storage().nbytes()
    (4096, 4)
    """
    loss = loss.detach()
    return loss.clone() if loss.untyped_storage().nbytes() > loss.nbytes else loss


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


def local_part(tensor: Tensor) -> Tensor:
    """Return the memory of this rank's part of a tensor: torch mixes no meshes in one call.

    >>> local_part(torch.ones(1))
    tensor([1.])
    """
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def is_spread(model: nn.Module) -> bool:
    """Return whether ranks share the parameters of a model.

    >>> is_spread(nn.Linear(1, 1))
    False
    """
    return is_fully_sharded(model) or any(hasattr(p, "to_local") for p in model.parameters())


def touching_all(model: nn.Module, loss: Tensor) -> Tensor:
    """Return `loss` with every parameter added, so that all have a gradient, each of its kind.

    >>> layer, loss = nn.Linear(1, 1), torch.zeros(())
    >>> (0.0 * touching_all(layer, loss)).backward()
    >>> layer.weight.grad
    tensor([[0.]])
    """
    sparse = sparse_tables(model)
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


def sparse_tables(model: nn.Module) -> set[int]:
    """Return the ids of the weights whose gradients are sparse.

    >>> sparse_tables(nn.Embedding(2, 3))
    set()
    """
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    return {id(one.weight) for one in tables if one.sparse}


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
