"""How a model is spread over ranks: by a name, or by a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from stretto.errors import FitError
from stretto.runtime import SupervisedStep, TrainStep
from stretto.runtime.sharded import fully_shard_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ShardFunction: TypeAlias = Callable[[nn.Module, "DeviceMesh"], nn.Module | None]
"""Shards a model over the ranks of a mesh, in place or by returning another one."""


def least_ranks(shard: str | ShardFunction) -> int:
    """Return how many ranks hold one copy of the model at least.

    >>> least_ranks("fsdp"), least_ranks("hsdp:8")
    (1, 8)

    Raises:
        FitError: there is no such way.
    """
    if not isinstance(shard, str) or shard in ("fsdp", "ddp"):
        return 1
    name, _, number = shard.partition(":")
    if name != "hsdp" or not number.isdecimal() or not int(number):
        raise FitError.bad(
            "shard", shard, "there is no such way", "write 'fsdp', 'hsdp:8', 'ddp' or a function"
        )
    return int(number)


def apply(step: TrainStep, shard: str | ShardFunction, ranks: int, *, device: str) -> None:
    """Spread the model of a step over ranks, and let its optimizers update the shards.

    Parameters on the meta device get memory when they are shards. What we shard computes in bf16
    by FSDP2's mixed precision, as in a run, and not by autocast.

    Args:
        step: the step, which is changed.
        shard: how.
        ranks: all ranks of the process group.
        device: where the shards are.

    Raises:
        FitError: the optimizers refer to parameters that the sharded model does not have.
    """
    from torch.distributed.device_mesh import init_device_mesh

    before = step.model
    names = {id(parameter): _plain(name) for name, parameter in before.named_parameters()}
    after: nn.Module | None
    if not isinstance(shard, str):
        after = shard(before, init_device_mesh(device, (ranks,)))
    elif shard == "ddp":
        after = nn.parallel.DistributedDataParallel(before)
    else:
        least = least_ranks(shard)
        shape = (ranks // least, least) if least > 1 else (ranks,)
        dims = ("replicate", "shard")[-len(shape) :]
        casts = isinstance(step, SupervisedStep) and step.dtype is torch.bfloat16
        mesh = init_device_mesh(device, shape, mesh_dim_names=dims)
        fully_shard_blocks(before, mesh, torch.bfloat16 if casts else None)
        if isinstance(step, SupervisedStep) and casts:
            step.dtype = None
        after = before
    after = before if after is None else after
    for name, value in list(vars(step).items()):
        if value is before and after is not before:
            setattr(step, name, after)
    after._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one)
    found = {_plain(name): parameter for name, parameter in after.named_parameters()}
    for optimizer in step.optimizers:
        for group in optimizer.param_groups:
            lost = [one for one in group["params"] if names.get(id(one)) not in found]
            if lost:
                raise FitError.cannot(
                    "give the optimizer the sharded parameters",
                    why=f"the sharded model has none named {names.get(id(lost[0]))!r}",
                    instead="keep the names of parameters in shard(model, mesh)",
                )
            group["params"] = [found[names[id(one)]] for one in group["params"]]
        optimizer.state.clear()


def _plain(name: str) -> str:
    for part in ("_orig_mod.", "_checkpoint_wrapped_module.", "module."):
        name = name.replace(part, "")
    return name
