"""Convert the state of a torch optimizer to named tensors and JSON, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stretto.checkpoint.sharding import LazyTensor, is_dtensor, replicate_like, shard_like
from stretto.errors import CheckpointError, shown
from stretto.runtime.packing import packed, unpack

_IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
"""How torch computes a step on the present device; taken from the present run."""


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
        _check_groups(optimizer, groups)
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
        _check_value(optimizer, key, value)
    for key, value in (*tensors.items(), *values.items()):
        head, name = key.split(".", 1)
        if head == "group":
            number, name = name.split(".", 1)
            groups[int(number)][name] = _whole(value)
        elif int(head) >= len(parameters):
            raise _other(optimizer, f"it has more than {len(parameters)} parameters")
        else:
            parameter = parameters[int(head)]
            if not _has_shape_of(optimizer, parameter, value):
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


def _check_groups(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Check that an optimizer can compute with saved groups, which torch checks only in a step.

    Flags that an older torch did not save keep their present values.

    Raises:
        CheckpointError: a value is missing, or has another type than the present one.
    """
    numbers = [number for group in groups for number in group["params"]]
    if numbers != list(range(len(numbers))) or any(type(number) is not int for number in numbers):
        raise _other(optimizer, f"param_groups.params is {shown(numbers)}")
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        for name in optimizer.defaults.keys() & own.keys():
            where = f"param_groups.{number}.{name}"
            if name in _IMPLEMENTATION_FLAGS:
                saved[name] = own[name]
            if name in saved and not _is_compatible(saved[name], own[name]):
                raise _other(optimizer, f"{where} is {shown(saved[name])}")
            if name not in saved and not (own[name] is None or isinstance(own[name], bool)):
                raise _other(optimizer, f"{where} is missing")
            saved.setdefault(name, own[name])


def _check_value(optimizer: Optimizer, key: str, value: object) -> None:
    """Check a plain value of a parameter's state, for optimizers of torch only.

    Raises:
        CheckpointError: it is neither a finite number nor None.
    """
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    if is_known and not (value is None or isinstance(value, bool) or _is_compatible(value, 0)):
        raise _other(optimizer, f"values.{key} is {shown(value)}")


def _has_shape_of(optimizer: Optimizer, parameter: Tensor, value: Any) -> bool:
    """Return whether a value has the shape of its parameter, or is a single number.

    It is checked for optimizers of torch only. Some of these have state of other shapes.
    """
    shape = getattr(value, "shape", ())
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    is_free = not is_known or type(optimizer).__name__ in ("Adafactor", "LBFGS")
    return is_free or math.prod(shape) == 1 or tuple(shape) == tuple(parameter.shape)


def _is_compatible(saved: Any, own: Any) -> bool:
    """Return whether a saved value has the type and size of the present one."""
    if isinstance(own, Tensor) or isinstance(saved, Tensor):
        sizes = [one.numel() if isinstance(one, Tensor) else 1 for one in (own, saved)]
        plain = saved if isinstance(own, Tensor) else own
        return sizes[0] == sizes[1] and isinstance(plain, (Tensor, int, float))
    if own is None:
        return saved is None or isinstance(saved, (bool, int, float, str))
    if isinstance(own, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(own, (int, float)):
        return isinstance(saved, (int, float)) and not isinstance(saved, bool)
    if isinstance(own, (tuple, list)):
        same = isinstance(saved, (tuple, list)) and len(saved) == len(own)
        return same and all(map(_is_compatible, saved, own))
    return isinstance(saved, type(own)) or not isinstance(own, (str, Mapping))
