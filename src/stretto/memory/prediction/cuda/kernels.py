"""Run a step on fake CPU tensors as CUDA would run it.

Fake tensors on CUDA need a GPU. So a step is traced on fake CPU tensors, while the kernels of torch
that decide by device are replaced by those that decide as CUDA does: which attention runs, what
dropout and RMSNorm save, which types autocast computes in, whether optimizers update all tensors at
once. The replacements are registered with torch's dispatcher, so they are also used inside other
operations, in backward passes and in recomputation. They concern fake tensors only.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from stretto.memory.prediction.cuda.attention import attention
from stretto.memory.prediction.cuda.gpu import Gpu
from stretto.memory.prediction.cuda.scratch import ROWS_PER_PARTIAL, sums_in_two_kernels

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_LOCK = threading.RLock()
"""Held while kernels are replaced, for that concerns all threads."""
_AUTOCAST_CPU = DispatchKeySet(DispatchKey.AutocastCPU)
_PROMOTED = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
"""Autocast computes these in the widest type of their arguments (ATen/autocast_mode.h)."""
_IN_LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution
    cudnn_convolution_transpose
"""
"""Autocast computes these in bf16 or fp16, on a CPU as on CUDA."""
_WITH_TYPE_APPENDED = {"norm.Scalar", "norm.ScalarOpt_dim"}
"""Autocast calls another overload, whose memory is the same."""


@contextlib.contextmanager
def cuda_kernels(gpu: Gpu) -> Iterator[None]:
    """Run fake CPU tensors through the kernels of CUDA while the context is active."""
    with _LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library = torch.library.Library("aten", "IMPL")
        try:
            for name, kernel in _by_device(gpu).items():
                library.impl(name, _for_fakes(name, kernel), "AutogradCPU")
            for name, autocast_kernel in _autocast_kernels():
                library.impl(name, autocast_kernel, "AutocastCPU")
            with _many_at_once(), _autocast_by_any_name():
                yield
        finally:
            library._destroy()


def _by_device(gpu: Gpu) -> dict[str, Callable[..., Any]]:
    """Return what replaces composite operations that look at the device."""
    return {
        "scaled_dot_product_attention": attention(gpu),
        "dropout": _dropout,
        "rms_norm": functools.partial(_rms_norm, gpu=gpu),
        "softmax.int": _softmax(_aten._softmax.default),
        "log_softmax.int": _softmax(_aten._log_softmax.default),
    }


def _for_fakes(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that leaves real tensors, as those of other threads, to torch."""
    packet, _, overload = name.partition(".")
    original = getattr(getattr(_aten, packet), overload or "default")

    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, FakeTensor):
            return kernel(tensor, *args, **kwargs)
        return original.decompose(tensor, *args, **kwargs)

    return run


# Kernels


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:  # noqa: FBT001  as in ATen
    """Save a mask of one byte per element; a CPU saves one of the input's type."""
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    result: Tensor = _aten.native_dropout(tensor, p, train)[0]
    return result


def _softmax(kernel: Any) -> Callable[..., Tensor]:
    """Return a softmax that casts fp16 to float32 in the same kernel; bf16 is cast before."""

    def run(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        is_fused = tensor.dtype == torch.float16 and dtype == torch.float32
        if dtype is not None and not is_fused:
            tensor = tensor.to(dtype)
        result: Tensor = kernel(tensor, dim, is_fused)
        return result

    return run


def _rms_norm(
    tensor: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: Any = None,
    *,
    gpu: Gpu,
) -> Tensor:
    """Save the input and one number per row; a CPU saves each step of the formula."""
    if weight is not None and weight.dtype != tensor.dtype:  # then CUDA is not fused either
        composite: Tensor = _aten.rms_norm.default.decompose(tensor, normalized_shape, weight, eps)
        return composite
    normalized: Tensor = _RmsNorm.apply(tensor, weight, len(normalized_shape), gpu)  # type: ignore[no-untyped-call]
    return normalized


class _RmsNorm(torch.autograd.Function):
    """The memory of `_fused_rms_norm`, which only CUDA has; there are no values."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor | None, dims: int, gpu: Gpu) -> Tensor:
        ctx.gpu = gpu
        rows = tensor.shape[: tensor.dim() - dims]
        result = torch.empty_like(tensor.contiguous())
        scale = tensor.new_empty((*rows, *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(tensor, weight, scale)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        tensor, weight, scale = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_tensor = torch.empty_like(tensor.contiguous())
        if weight is None:
            return of_tensor, None, None, None
        of_weight = torch.empty_like(weight)
        rows, columns = scale.numel(), weight.numel()
        if sums_in_two_kernels(rows, columns, ctx.gpu):
            tensor.new_empty((-(-rows // ROWS_PER_PARTIAL), columns), dtype=torch.float32).sum(0)
        return of_tensor, of_weight, None, None


# Autocast


def _autocast_kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield what autocast does on CUDA, by the operations that torch has registered for it."""
    on_cuda, on_cpu = (
        {
            name.removeprefix("aten::")
            for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
            if name.startswith("aten::")
        }
        for key in ("AutocastCUDA", "AutocastCPU")
    )
    for name in on_cpu - on_cuda:
        yield name, torch.library.fallthrough_kernel
    promoted = set(_PROMOTED.split())
    for name in on_cuda - set(_IN_LOWER_PRECISION.split()) - _WITH_TYPE_APPENDED:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(_aten, packet), overload or "default")
        if name in promoted:
            yield name, _promoting(operation)
        else:
            has_dtype = any(one.name == "dtype" for one in operation._schema.arguments)
            yield name, _in_float32(operation, has_dtype=has_dtype)


def _in_float32(operation: Any, *, has_dtype: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            if has_dtype:
                is_half = args[0].dtype in _HALF
                if is_half and kwargs.get("dtype") is None and not _has_type(args):
                    kwargs["dtype"] = torch.float32
                return operation(*args, **kwargs)
            return operation(*map(_float32, args), **{k: _float32(v) for k, v in kwargs.items()})

    return run


def _has_type(args: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, torch.dtype) for argument in args)


def _promoting(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if any(tensor.dtype == torch.float32 for tensor in tensors):
            args = tuple(map(_float32, args))
            kwargs = {name: _float32(value) for name, value in kwargs.items()}
        with _ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            return operation(*args, **kwargs)

    return run


def _float32(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.dtype in _HALF:
        return argument.float()
    return argument


@contextlib.contextmanager
def _autocast_by_any_name() -> Iterator[None]:
    """Let `torch.autocast("cuda")` in a user's code concern the fake CPU tensors."""
    original = torch.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and not args and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.get_autocast_dtype("cuda")
        original(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    with patch.object(torch.autocast, "__init__", init):
        yield


@contextlib.contextmanager
def _many_at_once() -> Iterator[None]:
    """Let optimizers and clipping treat fake CPU tensors with `foreach`, the default on CUDA."""

    def supported() -> list[str]:
        return ["cpu", "cuda"]

    name = "_get_foreach_kernels_supported_devices"
    types = _foreach_utils._foreach_supported_types
    with (
        patch.object(_foreach_utils, name, supported),
        patch.object(_optimizer, name, supported),
        patch.object(_foreach_utils, "_foreach_supported_types", [*types, FakeTensor]),
        patch.object(_optimizer, "_foreach_supported_types", [*types, FakeTensor]),
    ):
        yield
