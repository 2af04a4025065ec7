"""What a step needs to know of a model whose parameters are spread over ranks (FSDP2).

Each forward and backward pass of such a model is a collective: every rank must run the same number
of them, also one that has no samples left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from stretto.checkpoint.sharding import is_dtensor, is_sharded
from stretto.data.containers import mapped
from stretto.errors import TrainingError
from stretto.runtime.gradients import is_fully_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def check_sharding(model: nn.Module, *, world_size: int, device: torch.device) -> None:
    """Refuse a model that is spread over ranks in a way that this run could not train.

    Raises:
        TrainingError: only parts of it are sharded, or over other ranks than those of the run.
    """
    has_parts = any(is_fully_sharded(module) for module in model.modules())
    if not has_parts and not is_sharded(model):
        return
    if not is_fully_sharded(model):
        raise _refused(
            model,
            "parts of it are spread over ranks and the model itself is not",
            "call fully_shard(model) on the whole after its parts",
        )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            _check_mesh(model, name, parameter, world_size=world_size, device=device)
        elif parameter.requires_grad and world_size > 1:
            raise _refused(
                model,
                f"nobody would average the gradient of {name!r}, which fully_shard left out",
                "shard it too, or freeze it with requires_grad_(False)",
            )


def _check_mesh(
    model: nn.Module, name: str, parameter: Tensor, *, world_size: int, device: torch.device
) -> None:
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if mesh.device_type != device.type:
        raise _refused(
            model,
            f"it is spread over {mesh.device_type} and the run computes on {device.type}",
            f"write device={mesh.device_type!r}, or shard it over {device.type}",
        )
    # One dimension cuts; a second one before it holds copies of that (hybrid sharding).
    copies, cut = placements[:-1], placements[-1]
    is_plain = len(copies) <= 1 and all(one.is_replicate() for one in copies) and cut.is_shard()
    if not is_plain or mesh.size() != world_size:
        shape = " x ".join(map(str, mesh.shape))
        raise _refused(
            model,
            f"{name!r} is spread over {shape} ranks by {placements}, and each of the {world_size} "
            "ranks of the run has samples of its own",
            "let fully_shard use all ranks, and nothing but it",
        )


def sync_gradients(model: nn.Module, *, is_last: bool) -> None:
    """Say whether the next backward pass sums gradients over ranks: the last of a step does."""
    sharded = cast("FSDPModule", model)
    sharded.set_requires_gradient_sync(is_last)
    sharded.set_is_last_backward(is_last)


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
        mapped(_silenced, output)

    handle = model.register_forward_hook(silence)
    try:
        yield
    finally:
        handle.remove()


def _silenced(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(torch.zeros_like)
    return tensor


def _refused(model: nn.Module, why: str, instead: str) -> TrainingError:
    name = type(getattr(model, "_orig_mod", model)).__name__.removeprefix("FSDP")
    return TrainingError.cannot(f"train this {name}", why=why, instead=instead)
