"""How a model is spread over ranks: by a name, or by a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from stretto.errors import FitError
from stretto.memory.estimate import Category, Estimate
from stretto.runtime import TrainStep
from stretto.runtime.gradients import fully_shard_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stretto.memory.phantom import Question

Shard: TypeAlias = Callable[[nn.Module, "DeviceMesh"], nn.Module | None]
"""Shards a model over the ranks of a mesh, in place or by returning another one."""
_STATE: tuple[Category, ...] = ("parameters", "gradients", "optimizer")


def least_ranks(shard: str | Shard) -> int:
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


def share_of(question: Question, estimate: Estimate) -> int:
    """Return what one rank needs of an estimate for one device.

    Fully sharded, a rank has its part of the parameters, gradients and state, and whole blocks only
    for a while; the allowance is for these.

    Raises:
        FitError: the model is spread in a way of its own.
    """
    if question.ranks == 1:
        return estimate.bytes
    if not isinstance(question.shard, str):
        raise FitError.cannot(
            "estimate what a rank needs",
            why="the model is spread by a function",
            instead="set up the phantom, which runs it: phantomgpu setup",
        )
    least = least_ranks(question.shard)
    if question.shard == "ddp":
        return estimate.bytes + estimate.by_category.get("parameters", 0)  # buckets of gradients
    over = least if least > 1 else question.ranks
    peaks = []
    for phase, parts in estimate.by_phase.items():
        kinds = (*_STATE, "temporaries") if phase == "optimizer" else _STATE
        state = sum(parts.get(kind, 0) for kind in kinds)
        peaks.append(sum(parts.values()) - state + -(-state // over))
    return max(peaks)


def apply(step: TrainStep, shard: str | Shard, ranks: int) -> None:
    """Spread the model of a step over ranks, and let its optimizers update the shards.

    Args:
        step: the step, which is changed.
        shard: how.
        ranks: all ranks of the process group.

    Raises:
        FitError: the optimizers refer to parameters that the sharded model does not have.
    """
    from torch.distributed.device_mesh import init_device_mesh

    before, device = step.model, step.device.type
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
        fully_shard_blocks(before, init_device_mesh(device, shape, mesh_dim_names=dims))
        after = before
    after = before if after is None else after
    for name, value in list(vars(step).items()):
        if value is before and after is not before:
            setattr(step, name, after)
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
