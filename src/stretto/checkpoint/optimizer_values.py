"""What may stand in the saved groups of an optimizer, judged by what stands in those it has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stretto.errors import CheckpointError, cannot, shown

_IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
"""How torch computes a step on the devices there are: those of the present run hold."""
_MOST = 2**63
"""Integers of this size and above are no floats and no tensors."""


def check_groups(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Check that an optimizer can compute with saved groups; torch finds out in the next step.

    Flags that the torch that saved them did not know yet keep their present values.

    Raises:
        CheckpointError: a value is missing, or of another kind than the present one.
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
    """Check a plain value of the state of a parameter; only torch's own optimizers are known.

    Raises:
        CheckpointError: it is neither a finite number nor None.
    """
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    if is_known and not (value is None or isinstance(value, bool) or _is_compatible(value, 0)):
        raise _wrong(optimizer, f"values.{key}", value)


def has_shape_of(optimizer: Optimizer, parameter: Tensor, value: Any) -> bool:
    """Whether a part of a parameter's state has its shape, or is a single number.

    Only torch's own optimizers are known, and some of them keep other shapes.
    """
    shape = getattr(value, "shape", ())
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    is_free = not is_known or type(optimizer).__name__ in ("Adafactor", "LBFGS")
    return is_free or math.prod(shape) == 1 or tuple(shape) == tuple(parameter.shape)


def _is_compatible(saved: Any, own: Any) -> bool:
    """Whether a saved value is of the kind of the present one."""
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
        is_signed = saved >= 0 or own < 0  # a negative momentum divides by zero one day
        return is_signed and (abs(saved) < _MOST or (math.isinf(own) and isinstance(saved, float)))
    if isinstance(own, (tuple, list)):
        return (
            isinstance(saved, (tuple, list))
            and len(saved) == len(own)
            and all(map(_is_compatible, saved, own))
        )
    return isinstance(saved, type(own)) or not isinstance(own, (str, Mapping))


def _are_below_one(name: str, value: Any) -> bool:
    """Whether betas are: with others a step divides by zero."""
    return name != "betas" or all(float(one) < 1 for one in value)


def _wrong(optimizer: Optimizer, where: str, *value: object) -> CheckpointError:
    told = f"is {shown(value[0])}" if value else "is missing"
    return CheckpointError(
        cannot(
            f"give the saved state to {type(optimizer).__name__}",
            why=f"{where} {told}",
            instead="resume from another checkpoint",
        )
    )
