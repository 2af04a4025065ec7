"""Allocates the optimizer's state before the first step.

An update that runs out of memory cannot be repeated, because some weights have changed already. A
forward or backward pass can be. So the state of the first update is allocated before both.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stretto.errors import TrainingError
from stretto.runtime.out_of_memory import is_out_of_memory

_NAMES = ("Adadelta", "Adafactor", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop")
_KINDS = tuple(
    kind
    for kind in (getattr(torch.optim, name, None) for name in _NAMES)
    if hasattr(kind, "_init_group")
)
"""Optimizers whose first state does not depend on the gradient or the learning rate."""


def allocate_state(optimizer: Optimizer, *, leave_out: Collection[int] = ()) -> None:
    """Allocate the state of the first update, if that changes no result.

    It calls the code of torch's own optimizers. Adagrad allocates its state when it is made. Other
    optimizers, derived classes and parameters of lazy modules without a shape are skipped.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.Adam([weight])
    >>> allocate_state(optimizer)
    >>> optimizer.state[weight]["exp_avg"], float(optimizer.state[weight]["step"])
    (tensor([0., 0.]), 0.0)

    Args:
        optimizer: the optimizer.
        leave_out: the ids of parameters with sparse gradients.

    Raises:
        TrainingError: there is not enough memory.
    """
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                is_trained = parameter.requires_grad and id(parameter) not in leave_out
                has_shape = not is_lazy(parameter)
                if is_trained and has_shape and not optimizer.state.get(parameter):
                    _allocate(optimizer, group, parameter)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise no_memory(
            f"allocate the state of {type(optimizer).__name__}",
            "memory ran out",
            error,
            instead="use an optimizer that keeps less state, such as SGD or Adafactor, or a "
            "smaller model",
        ) from error


def no_memory(what: str, why: str, error: Exception, *, instead: str) -> TrainingError:
    """Return the error for running out of memory in work that cannot be repeated."""
    message = " ".join(str(error).split())[:200] or type(error).__name__
    return TrainingError.cannot(what, why=f"{why} ({message})", instead=instead)


def _allocate(optimizer: Optimizer, group: dict[str, Any], parameter: torch.nn.Parameter) -> None:
    kind: Any = type(optimizer)
    if kind is torch.optim.SGD:
        if group["momentum"] and not group["dampening"]:
            # The first update keeps a copy of the gradient. -0.0 is the number that times a factor
            # plus the gradient is the gradient, its sign of zero included.
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(
                parameter, -0.0, requires_grad=False
            )
        return
    if kind not in _KINDS:
        return
    start = kind._init_group
    lists = len(inspect.signature(start).parameters) - 2  # beside itself and the group
    before = parameter.grad
    parameter.grad = torch.zeros_like(parameter)
    try:
        start(optimizer, {**group, "params": [parameter]}, *([] for _ in range(lists)))
    finally:
        parameter.grad = before
