"""Convert the state of a torch optimizer to named tensors and JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stretto.checkpoint.optimizer_values import check_groups, check_value, has_shape_of
from stretto.checkpoint.sharding import LazyTensor, is_dtensor, replicate_like, shard_like
from stretto.errors import CheckpointError
from stretto.runtime.packing import packed, unpack


def pack_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name, and the rest as JSON.

    The tensors are not copied. They are DTensors if the parameters are.

    >>> import torch
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> weight.sum().backward(); optimizer.step()
    >>> tensors, record = pack_optimizer(optimizer)
    >>> list(tensors), record["param_groups"][0]["lr"]
    (['0.momentum_buffer'], 0.1)
    """
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            key = f"{index}.{name}"
            if isinstance(value, Tensor):
                tensors[key] = value
            else:
                values[key] = value
    groups = []
    for number, group in enumerate(state["param_groups"]):
        plain = {}
        for name, value in group.items():
            if isinstance(value, Tensor):
                tensors[f"group.{number}.{name}"] = value
            else:
                plain[name] = value
        groups.append(plain)
    kind = type(optimizer).__name__
    rest = packed(
        {"values": values, "param_groups": groups}, f"the state of {kind}", CheckpointError
    )
    return tensors, {"type": kind, **rest}


def unpack_optimizer(
    optimizer: Optimizer, tensors: Mapping[str, Tensor | LazyTensor], record: Mapping[str, Any]
) -> None:
    """Load the state that `pack_optimizer` returned into an optimizer.

    The state of a parameter is sharded like the parameter, however it was sharded before.

    Args:
        optimizer: an optimizer with the same number and order of parameters.
        tensors: whole tensors, in memory or read lazily.
        record: the JSON part.

    Raises:
        CheckpointError: the state is from another optimizer.
    """
    try:
        if record["type"] != type(optimizer).__name__:
            raise _other(optimizer, f"it was saved from {str(record['type'])[:80]}")
        groups = unpack(record["param_groups"])
        state = _states(optimizer, groups, tensors, unpack(record["values"]))
        check_groups(optimizer, groups)
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _other(optimizer, f"{type(error).__name__}: {error}") from error


def _states(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    tensors: Mapping[str, Tensor | LazyTensor],
    values: Mapping[str, Any],
) -> dict[int, dict[str, Any]]:
    """Return the state of each parameter; put values of groups into `groups`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        check_value(optimizer, key, value)
    for key, value in (*tensors.items(), *values.items()):
        head, name = key.split(".", 1)
        if head == "group":
            number, name = name.split(".", 1)
            groups[int(number)][name] = _whole(value)
        elif int(head) >= len(parameters):
            raise _other(optimizer, f"it has more than {len(parameters)} parameters")
        else:
            parameter = parameters[int(head)]
            if not has_shape_of(optimizer, parameter, value):
                shapes = f"shape {tuple(value.shape)}, and its parameter {tuple(parameter.shape)}"
                raise _other(optimizer, f"{key[:80]} has {shapes}")
            state.setdefault(int(head), {})[name] = _laid_out(parameter, value)
    return state


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
