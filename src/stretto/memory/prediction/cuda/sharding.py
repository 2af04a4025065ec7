"""How a model is spread over ranks: strategies by name, or a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.data.containers import mapped
from stretto.errors import FitError, shown
from stretto.memory.prediction.cuda.data_parallel import replicate
from stretto.runtime import TrainStep

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Shard: TypeAlias = Callable[[nn.Module, "DeviceMesh"], nn.Module | None]
"""Shards a model over the ranks of a mesh, in place or by returning another one."""
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")
"""What modules that wrap another one add to the names of its parameters."""


@final
@dataclass(frozen=True, slots=True)
class Sharding:
    """A number of ranks, and how the model is spread over them."""

    ranks: int
    shard: str | Shard = "fsdp"
    """`fsdp`; `hsdp:8`, sharded over 8 ranks, with replicas; `ddp`; `ddp:views`, with
    `gradient_as_bucket_view`; or a function."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise FitError.cannot(
                f"predict for {self.ranks} ranks",
                why="there is no rank",
                instead="write world_size=1",
            )
        if isinstance(self.shard, str):
            _named(self.shard, self.ranks)

    def apply(self, step: TrainStep, mesh: DeviceMesh) -> None:
        """Shard the model of a step, and let its optimizers update the shards.

        Args:
            step: a step on fake tensors, which is changed.
            mesh: all ranks, in one dimension.

        Raises:
            FitError: the optimizers refer to parameters that the sharded model does not have.
        """
        shard = _named(self.shard, self.ranks) if isinstance(self.shard, str) else self.shard
        before = step.model
        names = {id(parameter): _plain(name) for name, parameter in before.named_parameters()}
        after = shard(before, mesh) or before
        if after is not before:
            for name, value in list(vars(step).items()):
                if value is before:
                    setattr(step, name, after)
        found = {_plain(name): parameter for name, parameter in after.named_parameters()}
        replaced = {key: found[name] for key, name in names.items() if name in found}
        _replace_parameters(step, names, replaced)


def fully_shard_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each block of a `ModuleList`, then the rest, with FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                if any(True for _ in block.parameters()):
                    fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _named(text: str, ranks: int) -> Shard:
    """Return the strategy of a name.

    Raises:
        FitError: there is none, or it does not suit the number of ranks.
    """
    if text in _STRATEGIES:
        return _STRATEGIES[text]
    name, _, number = text.partition(":")
    if name != "hsdp" or not number.isdigit() or int(number) < 1:
        raise FitError.cannot(
            f"shard a model by {shown(text)}",
            why="there is no such strategy",
            instead=f"write {', '.join(map(repr, [*_STRATEGIES, 'hsdp:8']))}, or pass a function "
            "shard(model, mesh)",
        )
    if ranks % int(number):
        raise FitError.cannot(
            f"shard a model by {shown(text)}",
            why=f"{ranks} ranks are no multiple of {number}",
            instead="write a divisor of the number of ranks",
        )
    return _hybrid(int(number))


def _hybrid(local: int) -> Shard:
    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        shape = (mesh.size() // local, local)
        names = ("replicate", "shard")
        fully_shard_blocks(model, init_device_mesh("cpu", shape, mesh_dim_names=names))

    return shard


def _plain(name: str) -> str:
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def _replace_parameters(
    step: TrainStep, names: dict[int, str], replaced: dict[int, nn.Parameter]
) -> None:
    """Replace parameters in the optimizers, and in lists that the step keeps."""

    def new(tensor: Tensor) -> Tensor:
        return replaced.get(id(tensor), tensor)

    for optimizer in step.optimizers:
        for group in optimizer.param_groups:
            missing = [names.get(id(p), "?") for p in group["params"] if id(p) not in replaced]
            if missing:
                raise FitError.cannot(
                    "give the optimizer the sharded parameters",
                    why=f"the sharded model has none named {missing[0]!r}"
                    if missing[0] != "?"
                    else "it updates parameters that are not in the model",
                    instead="keep the names of parameters when sharding, and optimize no others",
                )
            group["params"] = [new(parameter) for parameter in group["params"]]
        _replace_state(optimizer, replaced)
    for name, value in list(vars(step).items()):
        if isinstance(value, (list, tuple, dict)) and name != "optimizers":
            setattr(step, name, mapped(new, value))


def _replace_state(optimizer: Optimizer, replaced: dict[int, nn.Parameter]) -> None:
    """Shard the state of an optimizer as its parameters, or drop it to be made anew."""
    old = list(optimizer.state.items())
    optimizer.state.clear()
    for parameter, state in old:
        sharded = replaced.get(id(parameter))
        if sharded is None:
            continue
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        if all(one.shape == parameter.shape or one.numel() == 1 for one in tensors):
            optimizer.state[sharded] = {
                name: torch.empty_like(sharded, dtype=value.dtype, requires_grad=False)
                if isinstance(value, Tensor) and value.shape == parameter.shape
                else value
                for name, value in state.items()
            }


_STRATEGIES: dict[str, Shard] = {
    "fsdp": fully_shard_blocks,
    "ddp": lambda model, _mesh: replicate(model),
    "ddp:views": lambda model, _mesh: replicate(model, as_views=True),
}
"""Strategies without a number."""
