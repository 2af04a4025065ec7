"""Upper bounds of the scratch memory of kernels, which fake tensors do not show.

Found by recording real steps with torch 2.13 on a CPU (`tests/memory/test_scratch.py`):

- oneDNN copies inputs and outputs of convolutions into blocks of 8 or 16 channels.
- If oneDNN does not support a type (float64; bf16 and fp16 on CPUs without instructions for them),
  PyTorch unfolds the input: one column of the kernel's size for each element of the output.
- On a CPU, means of bf16 or fp16 and gradients of biases use a float32 copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

_aten = torch.ops.aten
_BLOCK = 16
"""Channels are padded to a multiple of this."""
_HALF = {torch.bfloat16, torch.float16}
_MEANS = {_aten.mean.default, _aten.mean.dim}

CONVOLUTIONS = {
    # The argument positions of weight, dilation and transposed.
    _aten.convolution.default: (1, 5, 6),
    _aten.convolution_backward.default: (2, 6, 7),
}


@final
class Cpu:
    """The memory of operations on a CPU; see `TracedDevice`."""

    def scratch(self, func: Any, args: Sequence[Any], result: Any) -> Sequence[Sequence[int]]:
        """Return upper bounds of the scratch memory of an operation, in bytes."""
        count = scratch_bytes(func, args, result)
        return [[count]] if count else []

    def copies(self, _func: Any, _args: Sequence[Any]) -> Sequence[int]:
        """Return nothing: copies of arguments are part of the scratch memory."""
        return ()

    def result_bytes(self, _func: Any, _args: Sequence[Any]) -> None:
        """Return None: results have the size of their elements."""

    def kept(self, _func: Any, _phase: str) -> None:
        """Return None: no operation keeps memory."""

    def is_on_host(self, _func: Any, _tensor: Tensor) -> bool:
        """Return False: all tensors are on the same device."""
        return False

    def stream(self) -> int:
        """Return 0: a CPU has one stream."""
        return 0


def scratch_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return an upper bound of the scratch memory of an operation on a CPU, in bytes.

    Args:
        func: the operation.
        args: its arguments.
        result: its result.

    >>> x, weight = torch.ones(2, 16, 8, 8), torch.ones(16, 16, 1, 1)
    >>> call = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    >>> conv = torch.ops.aten.convolution.default
    >>> scratch_bytes(conv, call, conv(*call)) == 4 * (2 * x.numel() + 16 * 16)
    True
    """
    if func in _MEANS and args[0].dtype in _HALF:
        return 4 * int(args[0].numel())
    if func not in CONVOLUTIONS:
        return 0
    results = result if isinstance(result, tuple) else (result,)
    tensors = [one for one in (*args[:3], *results) if isinstance(one, Tensor)]
    weight, dilation, transposed = (args[position] for position in CONVOLUTIONS[func])
    if _is_blocked(weight.dtype):
        return sum(map(_in_blocks, tensors)) + _unfolded(func, args)
    # The unfolding path; sample by sample if dilated or transposed.
    is_forward = func is _aten.convolution.default
    out = results[0] if is_forward else args[0]
    source, image = (args[0], out) if is_forward else (args[1], out)
    places = math.prod((source if transposed else image).shape[2:])
    samples = 1 if transposed or any(step > 1 for step in dilation) else out.size(0)
    columns = samples * places * math.prod(weight.shape[1:]) * weight.element_size()
    as_float = 4 * out.numel() if weight.dtype in _HALF and not is_forward else 0
    return int(columns + as_float)


def _unfolded(func: Any, args: Sequence[Any]) -> int:
    """Return the bytes of unfolded channels, for kernels that are larger than the picture.

    Some CPUs (measured on one with AMX) unfold these for the gradient of a grouped convolution.
    """
    if func is not _aten.convolution_backward.default or args[9] == 1:
        return 0
    gradient, _, weight = args[:3]
    kernel, places = weight.shape[2:], gradient.shape[2:]
    if all(size <= place for size, place in zip(kernel, places, strict=True)):
        return 0
    as_float = 4 if weight.dtype in _HALF else 0
    columns = int(gradient.numel() * math.prod(weight.shape[1:]))
    return columns * (int(weight.element_size()) + as_float)


_SUPPORTED: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: lambda: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    torch.float16: lambda: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
}


def _is_blocked(dtype: torch.dtype) -> bool:
    """Return whether oneDNN supports a type on this machine."""
    return torch.backends.mkldnn.is_available() and _SUPPORTED.get(dtype, lambda: False)()


def _in_blocks(tensor: Tensor) -> int:
    """Return the bytes of a copy with its channels padded."""
    channels = -(-tensor.size(1) // _BLOCK) * _BLOCK if tensor.dim() > 1 else 0
    others = math.prod(tensor.shape) // max(1, tensor.size(1)) if tensor.dim() > 1 else 0
    return max(channels * others, tensor.numel()) * tensor.element_size()
