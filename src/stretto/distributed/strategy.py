"""How a model trains on the ranks of a run: alone, with DDP, fully sharded, or in your own way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from stretto.checkpoint import Shard
from stretto.checkpoint.sharding import to_shard
from stretto.data.containers import nodes
from stretto.distributed.mesh import Mesh, as_mesh
from stretto.errors import TrainingError
from stretto.runtime.compiled import uncompiled
from stretto.runtime.micro_gradients import MicroGradients
from stretto.runtime.ranks import Ranks
from stretto.runtime.sharded import (
    check_shapes,
    fully_shard_blocks,
    is_dtensor,
    is_fully_sharded,
    is_sharded,
    touching_all,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

_NOTHING = contextlib.nullcontext()


class Strategy:
    """Places and wraps a model, and says when gradients are averaged over ranks.

    The trainer calls `of`, `place` and `wrap` once, and runs each forward and backward pass in
    `sync`. Override what should be different, for example `wrap` of `Ddp` to register a
    communication hook, and pass the result as `Trainer(strategy=...)`.
    """

    averaging: Literal["none", "last", "each", "after"] = "none"
    """When gradients are averaged: "none": there is no other rank; "last": in the last pass of a
    step; "each": in those passes for which `sync` says so; "after": in `average`, which is then
    called after the last pass."""
    is_sharded: bool = False
    """Whether each rank has a part of the model, and writes it in checkpoints. All ranks must then
    run the same number of forward passes."""
    has_equal_weights: bool = True
    """Whether ranks that have the same part of the model have equal weights when a checkpoint is
    written. If not, as between the averages of local SGD, the checkpoint has those of the first
    rank, and a resumed run continues from them on all ranks. It may be a property."""
    ranks: Ranks
    """The processes of the run, set by `of`."""
    mesh: Mesh | None = None
    """Their mesh, set by `of`; None: all of them share out the samples."""
    model: nn.Module
    """What `wrap` has returned."""

    def of(self, ranks: Ranks, mesh: Mesh | None = None) -> Self:
        """Return this strategy, for the processes of a run.

        Override it, and call `ranks.share_samples` there, if ranks have the same samples without a
        mesh that says so.
        """
        self.ranks, self.mesh = ranks, mesh
        if mesh is not None:
            mesh.tell(ranks)
        return self

    def place(self, model: nn.Module) -> nn.Module:
        """Return `model` on the device of this rank, before its step is built.

        Raises:
            TrainingError: it cannot be trained in this way.
        """
        if any(one.is_meta for one in model.parameters()):
            raise _refused(
                model,
                "its weights are on the meta device",
                "call model.to_empty(device=...) and load its weights",
            )
        return model.to(self.ranks.device)

    def wrap(self, model: nn.Module, *, is_called: bool) -> nn.Module:
        """Return what the step calls instead of `model`.

        Args:
            model: what was placed; compiled if the step compiles it.
            is_called: whether the step calls the result. If not, gradients are averaged after the
                last pass.
        """
        del is_called
        self.model = model
        return model

    def sync(self, *, averages: bool, is_empty: bool) -> AbstractContextManager[Any]:
        """Return the context of one forward and backward pass.

        Args:
            averages: whether to average in it what was accumulated.
            is_empty: whether it has no samples, and runs because other ranks wait for it. Then no
                gradient may come from it: a mean over nothing is nan.
        """
        del averages, is_empty
        return _NOTHING

    def average(self) -> None:
        """Average over ranks what each has accumulated."""

    def check(self) -> None:
        """Refuse weights that are trained since the model was wrapped, if nothing averages them."""

    def attach(self, gradients: MicroGradients) -> None:
        """Let `gradients` see the gradient of this rank before it is averaged."""

    def part_of_state(self, tensor: Tensor) -> Tensor | Shard:
        """Return what this rank writes of a tensor; every rank calls it for the same ones."""
        return to_shard(tensor)


class Single(Strategy):
    """One process."""


class Ddp(Strategy):
    """Copies of the model on all ranks, in `DistributedDataParallel`.

    Args:
        find_unused_parameters: whether a step may leave out parameters, as torch's argument.
    """

    model: nn.parallel.DistributedDataParallel
    _frozen: Sequence[tuple[str, nn.Parameter]] = ()
    """The parameters that were frozen when the model was wrapped."""

    def __init__(self, *, find_unused_parameters: bool = False) -> None:
        self.find_unused_parameters = find_unused_parameters

    def place(self, model: nn.Module) -> nn.Module:
        """Return `model` on the device of this rank.

        Raises:
            TrainingError: the mesh shares out the model, too.
        """
        if self.mesh is not None and self.mesh.dp_world_size < self.ranks.world_size:
            raise _unaveraged(model, self.mesh)
        return super().place(model)

    def wrap(self, model: nn.Module, *, is_called: bool) -> nn.Module:
        """Return the model in `DistributedDataParallel`."""
        check_shapes(model, "wrap in DistributedDataParallel")
        self.averaging = "last" if is_called else "after"
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module  # another run has wrapped it
        self._frozen = [pair for pair in model.named_parameters() if not pair[1].requires_grad]
        device = self.ranks.device
        with self.ranks.monitor.watch(inside_a_pass=True):
            self.model = nn.parallel.DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                find_unused_parameters=self.find_unused_parameters,
            )
        return self.model

    def check(self) -> None:
        """Refuse weights that are trained since the model was wrapped.

        Raises:
            TrainingError: there is one.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise TrainingError.cannot(
                    f"train {name} on {self.ranks.world_size} ranks",
                    why="it was frozen when the model was wrapped, so no rank averages its "
                    "gradient",
                    instead="leave it trainable, and drop its gradient in on_gradient until then",
                )

    def sync(self, *, averages: bool, is_empty: bool) -> AbstractContextManager[Any]:
        """Return a context without averaging, or without any gradient."""
        if averages and not is_empty:
            return _NOTHING
        context = contextlib.ExitStack()
        if not averages:
            context.enter_context(self.model.no_sync())
        if is_empty:
            is_called = self.averaging == "last"
            context.enter_context(zero_gradient(self.model if is_called else self.model.module))
        return context

    def average(self) -> None:
        """Average in a pass with nothing to learn, so in the order in which any pass sums."""
        inner = self.model.module
        self.model.module = _NothingToLearn(inner)
        try:
            self.model(torch.zeros((), device=self.ranks.device)).backward()
        finally:
            self.model.module = inner

    def attach(self, gradients: MicroGradients) -> None:
        """Let `gradients` see the gradient of this rank before it is averaged."""
        gradients.attach(self.model)


class FullyShard(Strategy):
    """A model that `fully_shard` (FSDP2) or `replicate` manages, on all ranks or on a mesh."""

    averaging = "each"
    is_sharded = True

    def place(self, model: nn.Module) -> nn.Module:
        """Return the model, which `fully_shard` has placed.

        Raises:
            TrainingError: it is sharded over other ranks than those of the run, or only in part.
        """
        averaged = _averaged_over(model)
        for name, parameter in model.named_parameters():
            over = averaged.get(id(parameter), frozenset())
            if is_dtensor(parameter) or self.ranks.dp_world_size > 1:
                _check_averaging(model, name, parameter, over, self)
        _limit_waiting(model, self.ranks)
        return model

    def sync(self, *, averages: bool, is_empty: bool) -> AbstractContextManager[Any]:
        """Say whether the backward pass sums gradients over ranks."""
        sharded = cast("FSDPModule", self.model)
        sharded.set_requires_gradient_sync(averages)
        sharded.set_is_last_backward(averages)
        return zero_gradient(self.model) if is_empty else _NOTHING


class ModelParallel(Strategy):
    """A model that the ranks share on a mesh with one data rank, for example by tensors alone."""

    is_sharded = True

    def place(self, model: nn.Module) -> nn.Module:
        """Return the model on the device of this rank."""
        _limit_waiting(model, self.ranks)
        return super().place(model)

    def sync(self, *, averages: bool, is_empty: bool) -> AbstractContextManager[Any]:
        """Return a context without any gradient if the pass has no samples."""
        del averages
        return zero_gradient(self.model) if is_empty else _NOTHING


def adopted(model: nn.Module, ranks: Ranks) -> Strategy:
    """Return how a model trains that a framework has wrapped."""
    strategy: Strategy = FullyShard() if is_fully_sharded(model) else Single()
    if isinstance(model, nn.parallel.DistributedDataParallel):
        strategy = Ddp()
        strategy.averaging = "last"
    strategy.model = model
    return strategy.of(ranks)


def strategy_for(model: nn.Module, ranks: Ranks, mesh: Mesh | None = None) -> Strategy:
    """Return how to train a model that is as the user has built it.

    Raises:
        TrainingError: only parts of it are sharded, or nothing would average its gradients.
    """
    if is_fully_sharded(model):
        return FullyShard()
    if ranks.world_size == 1:
        return Single()
    if mesh is not None and mesh.dp_world_size < ranks.world_size:
        if mesh.dp_world_size > 1:
            raise _unaveraged(model, mesh)
        return ModelParallel()
    if is_sharded(model) or any(map(is_fully_sharded, model.modules())):
        raise _refused(
            model,
            "parts of it are spread over ranks and the model itself is not",
            "call fully_shard(model) on the whole after its parts, or pass mesh=mesh",
        )
    return Ddp()


def strategy_on(
    mesh: DeviceMesh | Mesh | None, strategy: Strategy | None, model: nn.Module, ranks: Ranks
) -> Strategy:
    """Return `strategy`, or that of the model if there is none, for the processes of a run."""
    named = as_mesh(mesh)
    chosen = strategy_for(model, ranks, named) if strategy is None else strategy
    return chosen.of(ranks) if named is None else chosen.of(ranks, named)


def shard_blocks(
    model: nn.Module,
    *,
    device: str | None = None,
    mesh: DeviceMesh | Mesh | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> nn.Module:
    """Spread a model over the ranks with FSDP2: each block of a `ModuleList`, then the rest.

    One block at a time is whole on a rank while it computes. Build the optimizer afterwards, of
    the parameters that the model has then. On one rank the model stays as it is.

    >>> model = shard_blocks(nn.Sequential(nn.Linear(2, 2)))
    >>> type(model).__name__
    'Sequential'

    Args:
        model: the model, which is changed in place.
        device: where the ranks compute; None: this rank's CUDA device if there is one, else the
            CPU.
        mesh: shard over its data-parallel dimensions; of two, the first holds copies. None: over
            all ranks.
        precision: what it computes in, by the mixed precision of FSDP2: the trainer needs no
            `precision` then, and no cast weights are kept.

    Returns:
        The model.

    Raises:
        TrainingError: the dimensions of the mesh have another meaning.
    """
    ranks, named = Ranks.from_environment(device), as_mesh(mesh)
    dtype = torch.bfloat16 if precision == "bf16" else None
    if ranks.world_size == 1:
        return model
    if named is None:
        from torch.distributed.device_mesh import init_device_mesh

        fully_shard_blocks(model, init_device_mesh(ranks.device.type, (ranks.world_size,)), dtype)
        return model
    data = named.data
    copies, parts = data[:-1], data[-1:]
    is_other = not parts or "replicate" in parts[0] or any("shard" in name for name in copies)
    if is_other or len(copies) > 1:
        raise TrainingError.cannot(
            f"shard the blocks of a model over {named}",
            why="its data-parallel dimensions are not copies and then parts",
            instead="name them 'dp', or 'dp_replicate' and then 'dp_shard'",
        )
    part = named.mesh[data] if len(data) < named.mesh.ndim else named.mesh
    fully_shard_blocks(model, part, dtype)
    return model


def _averaged_over(model: nn.Module) -> dict[int, frozenset[int]]:
    """Return the ranks over which the gradient of each parameter is averaged, by its id.

    Its placements do not say so: tensor parallelism cuts in the same way.
    """
    found: dict[int, frozenset[int]] = {}
    for module in filter(is_fully_sharded, model.modules()):
        state = cast("Any", module)._get_fsdp_state()  # torch has no public way
        single = () if hasattr(state, "_fsdp_param_groups") else (state._fsdp_param_group,)
        for group in filter(None, getattr(state, "_fsdp_param_groups", single)):
            ranks = frozenset(group.mesh_info.mesh.mesh.flatten().tolist())
            found |= {id(parameter.sharded_param): ranks for parameter in group.fsdp_params}
    return found


def _check_averaging(
    model: nn.Module, name: str, parameter: Tensor, over: frozenset[int], strategy: Strategy
) -> None:
    """Refuse a parameter whose gradient is not averaged `over` all ranks that share data."""
    mesh, named = getattr(parameter, "device_mesh", None), strategy.mesh
    instead = "let fully_shard alone use all ranks, or pass mesh=mesh with the names of its parts"
    if mesh is not None and mesh.device_type != strategy.ranks.device.type:
        why = f"it is on {mesh.device_type} and the run computes on {strategy.ranks.device.type}"
        instead = "shard it on the device of the run"
    elif not parameter.requires_grad:
        return
    elif not over and strategy.ranks.dp_world_size > 1:
        why = f"fully_shard left out {name!r}, so no rank would average its gradient"
        instead = "shard it too, or freeze it with requires_grad_(False)"
    elif named is None and len(over) < strategy.ranks.dp_world_size:
        shape = "" if mesh is None else " x ".join(map(str, mesh.shape))
        why = f"{name!r} is spread over {shape} of {strategy.ranks.dp_world_size} ranks"
    elif named is not None and not named.peers <= over | {strategy.ranks.rank}:
        why = f"its gradients are averaged over ranks {sorted(over)[:8]}, and {named} shares "
        why += "samples over others"
        instead = f"call fully_shard(model, mesh=...) with the dimensions {named.data}"
    elif named is not None and mesh is not None and not named.has_order_of(mesh):
        why = f"torch wants the data-parallel dimensions of {named} before the others"
        instead = f"make a mesh whose first dimensions are {named.data}"
    else:
        return
    raise _refused(model, why, instead)


def _unaveraged(model: nn.Module, mesh: Mesh) -> TrainingError:
    return _refused(
        model,
        f"{mesh} shares out the model, too, so DistributedDataParallel cannot average gradients",
        f"call fully_shard or replicate on it with the dimensions {mesh.data} of the mesh",
    )


def _limit_waiting(model: nn.Module, ranks: Ranks) -> None:
    """Let ranks wait in the groups of a model only as long as in others."""
    meshes = {parameter.device_mesh for parameter in model.parameters() if is_dtensor(parameter)}
    for group in (group for mesh in meshes for group in mesh.get_all_groups()):
        ranks.limit_waiting(group)


def reshard(model: nn.Module) -> None:
    """Let go of whole parameters that a forward pass without a backward pass has left behind."""
    for module in model.modules():
        if is_fully_sharded(module):
            cast("FSDPModule", module).reshard()


@contextmanager
def zero_gradient(model: nn.Module) -> Iterator[None]:
    """While open, no gradient gets into the model through what its forward pass returns.

    A pass that must not count still has to run, and a mean over nothing has a gradient of nan,
    which no factor of 0 would take away.

    >>> model = nn.Linear(1, 1)
    >>> with zero_gradient(model):
    ...     (model(torch.ones(1, 1)) * torch.nan).sum().backward()
    >>> model.weight.grad
    tensor([[0.]])
    """

    def silence(module: nn.Module, _: object, output: object) -> None:
        del module
        for node in nodes(output):
            if isinstance(node, Tensor) and node.requires_grad:
                node.register_hook(torch.zeros_like)

    handle = model.register_forward_hook(silence)
    try:
        yield
    finally:
        handle.remove()


def _refused(model: nn.Module, why: str, instead: str) -> TrainingError:
    name = type(uncompiled(model)).__name__.removeprefix("FSDP")
    return TrainingError.cannot(f"train this {name}", why=why, instead=instead)


class _NothingToLearn(nn.Module):
    """Stands for a model: all its parameters have a gradient of zero."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model  # whose buffers go to all ranks with each pass

    def forward(self, loss: Tensor) -> Tensor:
        """Return a loss of zero that every parameter has a part in."""
        return 0.0 * touching_all(self.model, loss)
