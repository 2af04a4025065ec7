"""Convert the state of a torch optimizer to named tensors and plain values, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stretto.checkpoint.sharding import LazyTensor, replicate_like, shard_like
from stretto.errors import CheckpointError
from stretto.runtime.packing import number
from stretto.runtime.sharded import is_dtensor

_OF_THIS_RUN = ("foreach", "fused", "capturable", "differentiable", "name")
"""How torch computes a step on the present device, and what a group is called now."""


def pack_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer with its tensors by name, beside plain values.

    The tensors are not copied. They are DTensors if the parameters are.

    >>> import torch
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> weight.sum().backward(); optimizer.step()
    >>> state = pack_optimizer(optimizer)
    >>> list(state), state["param_groups"][0]["lr"]
    (['type', 'values', 'param_groups', '0.momentum_buffer'], 0.1)
    """
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            (tensors if isinstance(value, Tensor) else values)[f"{index}.{name}"] = value
    groups: list[dict[str, Any]] = [{} for _ in state["param_groups"]]
    for place, group in enumerate(state["param_groups"]):
        for name, value in group.items():
            if isinstance(value, Tensor):
                tensors[f"group.{place}.{name}"] = value
            else:
                groups[place][name] = value
    kind = type(optimizer).__name__
    return {"type": kind, "values": values, "param_groups": groups, **tensors}


def unpack_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state that `pack_optimizer` returned into an optimizer.

    The state of a parameter is sharded like the parameter, however it was sharded before.

    Args:
        optimizer: an optimizer with the same number and order of parameters.
        state: the state; its tensors are whole, in memory or read lazily.

    Raises:
        CheckpointError: the state is from another optimizer.
    """
    if state["type"] != type(optimizer).__name__:
        raise _other(optimizer, f"it was saved from {state['type']}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    groups = [dict(group) for group in state["param_groups"]]
    entries: dict[int, dict[str, Any]] = {}
    for key, value in {**state, **state["values"]}.items():
        head, _, name = key.partition(".")
        if head == "group":
            place, _, name = name.partition(".")
            groups[int(place)][name] = _whole(value)
        elif head.isdecimal():
            if int(head) >= len(parameters):
                raise _other(optimizer, f"it has more than {len(parameters)} parameters")
            parameter = parameters[int(head)]
            if not _has_shape_of(optimizer, parameter, value):
                shapes = f"shape {tuple(value.shape)}, and its parameter {tuple(parameter.shape)}"
                raise _other(optimizer, f"{key} has {shapes}")
            entries.setdefault(int(head), {})[name] = _laid_out(parameter, value)
    for own, saved in zip(optimizer.param_groups, groups, strict=False):
        _keep(own, saved, optimizer.defaults.keys() | {"name"})
    try:
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
    except ValueError as error:
        raise _other(optimizer, str(error)) from error


def _keep(own: Mapping[str, Any], saved: dict[str, Any], names: Set[str]) -> None:
    """Put those values of a group into its saved ones that a resume does not restore."""
    if "name" not in own:
        saved.pop("name", None)
    for name in names & own.keys():
        # An older torch has not saved all settings.
        if name not in saved or name in _OF_THIS_RUN:
            saved[name] = own[name]
        elif type(own[name]) in (int, float) and not isinstance(saved[name], Tensor):
            number(saved, name)


def _laid_out(parameter: Tensor, value: Any) -> Any:
    """Shard a value of the state like its parameter."""
    if not isinstance(value, (Tensor, LazyTensor)) or not is_dtensor(parameter):
        return _whole(value)
    shape = tuple(value.shape)
    if shape == tuple(parameter.shape):
        return shard_like(parameter, value)
    # Step counts stay plain tensors. Factored second moments are replicated DTensors.
    return replicate_like(parameter, value) if shape else _whole(value)


def _whole(value: Any) -> Any:
    return value.read(None) if isinstance(value, LazyTensor) else value


def _other(optimizer: Optimizer, why: str) -> CheckpointError:
    return CheckpointError.cannot(
        f"load the saved state into {type(optimizer).__name__}",
        why=why,
        instead="resume with the same optimizer and parameters as in the checkpoint",
    )


def _has_shape_of(optimizer: Optimizer, parameter: Tensor, value: Any) -> bool:
    """Return whether a value has the shape of its parameter, or is a single number.

    It is checked for optimizers of torch only. Some of these have state of other shapes.
    """
    shape = getattr(value, "shape", ())
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    is_free = not is_known or type(optimizer).__name__ in ("Adafactor", "LBFGS")
    return is_free or math.prod(shape) == 1 or tuple(shape) == tuple(parameter.shape)
