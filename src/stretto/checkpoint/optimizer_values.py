"""Check saved hyperparameters of an optimizer against its present ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stretto.errors import CheckpointError, shown

_IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
"""How torch computes a step on the present device; taken from the present run."""
_MOST = 2**63
"""Larger integers do not fit into tensors."""


def check_groups(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Check that an optimizer can compute with saved groups, which torch checks only in a step.

    Flags that an older torch did not save keep their present values.

    Raises:
        CheckpointError: a value is missing, or has another type than the present one.
    """
    numbers = [number for group in groups for number in group["params"]]
    if numbers != list(range(len(numbers))) or any(type(number) is not int for number in numbers):
        raise _wrong(optimizer, "param_groups.params", numbers)
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        for name in optimizer.defaults.keys() & own.keys():
            where = f"param_groups.{number}.{name}"
            if name in _IMPLEMENTATION_FLAGS:
                saved[name] = own[name]
            if name in saved and not (
                _is_compatible(saved[name], own[name]) and _are_below_one(name, saved[name])
            ):
                raise _wrong(optimizer, where, saved[name])
            if name not in saved and not (own[name] is None or isinstance(own[name], bool)):
                raise _wrong(optimizer, where)
            saved.setdefault(name, own[name])


def check_value(optimizer: Optimizer, key: str, value: object) -> None:
    """Check a plain value of a parameter's state, for optimizers of torch only.

    Raises:
        CheckpointError: it is neither a finite number nor None.
    """
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    if is_known and not (value is None or isinstance(value, bool) or _is_compatible(value, 0)):
        raise _wrong(optimizer, f"values.{key}", value)


def has_shape_of(optimizer: Optimizer, parameter: Tensor, value: Any) -> bool:
    """Return whether a value has the shape of its parameter, or is a single number.

    It is checked for optimizers of torch only. Some of these have state of other shapes.
    """
    shape = getattr(value, "shape", ())
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    is_free = not is_known or type(optimizer).__name__ in ("Adafactor", "LBFGS")
    return is_free or math.prod(shape) == 1 or tuple(shape) == tuple(parameter.shape)


def _is_compatible(saved: Any, own: Any) -> bool:
    """Return whether a saved value has the type of the present one."""
    if isinstance(own, Tensor) or isinstance(saved, Tensor):
        sizes = [one.numel() if isinstance(one, Tensor) else 1 for one in (own, saved)]
        plain = saved if isinstance(own, Tensor) else own
        is_plain = isinstance(plain, Tensor) or _is_compatible(plain, 0.0)
        return sizes[0] == sizes[1] and is_plain
    if own is None:
        return saved is None or isinstance(saved, (bool, int, float, str))
    if isinstance(own, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(own, (int, float)):
        if isinstance(saved, bool) or not isinstance(saved, (int, float)):
            return False
        is_signed = saved >= 0 or own < 0  # a negative momentum can divide by zero
        return is_signed and (abs(saved) < _MOST or (math.isinf(own) and isinstance(saved, float)))
    if isinstance(own, (tuple, list)):
        return (
            isinstance(saved, (tuple, list))
            and len(saved) == len(own)
            and all(map(_is_compatible, saved, own))
        )
    return isinstance(saved, type(own)) or not isinstance(own, (str, Mapping))


def _are_below_one(name: str, value: Any) -> bool:
    """Return whether betas are below 1; otherwise a step divides by zero."""
    return name != "betas" or all(float(one) < 1 for one in value)


def _wrong(optimizer: Optimizer, where: str, *value: object) -> CheckpointError:
    problem = f"is {shown(value[0])}" if value else "is missing"
    return CheckpointError.cannot(
        f"load the saved state into {type(optimizer).__name__}",
        why=f"{where} {problem}",
        instead="resume from another checkpoint",
    )
