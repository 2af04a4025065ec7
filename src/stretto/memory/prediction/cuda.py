"""The habits of CUDA's kernels, for steps that are followed where there is no GPU.

A step for a GPU is followed on fakes that say they are on the CPU: fake tensors on CUDA do not work
without it. So operations that keep other tensors there than on a CPU are replaced by what they are
there, as far as that is known from the source of torch 2.13. Not validated on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

# What autocast to a lower precision leaves in float32 on CUDA, and does not on a CPU.
_IN_FLOAT32 = {
    functional.layer_norm,
    torch.layer_norm,
    functional.group_norm,
    functional.softmax,
    torch.softmax,
    Tensor.softmax,
    functional.log_softmax,
    torch.log_softmax,
    Tensor.log_softmax,
    functional.cross_entropy,
    functional.nll_loss,
    functional.mse_loss,
    functional.normalize,
    torch.exp,
    Tensor.exp,
    torch.log,
    Tensor.log,
    torch.pow,
    Tensor.pow,
    torch.sum,
    Tensor.sum,
    torch.norm,
    Tensor.norm,
    torch.rsqrt,
    Tensor.rsqrt,
}


@final
class CudaKernels(TorchFunctionMode):
    """While a step runs: functions become what they are on CUDA."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout or func is torch.dropout:
            return _dropout(*args, **kwargs)
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(_float32(argument) for argument in args)
        return func(*args, **kwargs)


def use_foreach(optimizers: Iterable[Optimizer]) -> None:
    """Let optimizers update all tensors at once, as they do on CUDA unless told otherwise."""
    for group in (group for one in optimizers for group in one.param_groups):
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _dropout(
    input: Tensor,  # noqa: A002  as torch has it
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002
    inplace: bool = False,  # noqa: FBT001, FBT002, ARG001
    train: bool | None = None,  # noqa: FBT001
) -> Tensor:
    """Keep a mask of one byte an element, where the CPU keeps one of the input's type."""
    is_training = training if train is None else train
    if not is_training or p == 0:
        return input
    result: Tensor = torch.native_dropout(input, p, train=True)[0]
    return result


def _float32(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.dtype in {torch.bfloat16, torch.float16}:
        return argument.float()
    return argument
