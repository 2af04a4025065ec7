"""Replace operations by their CUDA versions when a step is traced without a GPU.

Fake tensors on CUDA need CUDA, so a step for a GPU is traced on fake CPU tensors. Operations that
save other tensors on CUDA than on a CPU are replaced, following the source of torch 2.13. This is
not validated on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

# Autocast keeps these in float32 on CUDA, but not on a CPU.
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
    """Runs functions as on CUDA while it is active."""

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
    """Set `foreach=True` on optimizers, which is the default on CUDA."""
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
    """Save a mask of one byte per element; the CPU saves one of the input's type."""
    is_training = training if train is None else train
    if not is_training or p == 0:
        return input
    result: Tensor = torch.native_dropout(input, p, train=True)[0]
    return result


def _float32(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.dtype in {torch.bfloat16, torch.float16}:
        return argument.float()
    return argument
