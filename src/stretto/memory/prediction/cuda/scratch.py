"""Memory that CUDA kernels allocate for themselves, which fake tensors do not show.

Each function returns groups of blocks. The blocks of a group are allocated together and freed
before the next group. The sizes follow the source of torch 2.13; `bench/cuda_memory.py` holds them
against its allocator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stretto.memory.prediction.cuda.attention import num_splits
from stretto.memory.prediction.cuda.gpu import Gpu
from stretto.memory.prediction.cuda.reductions import reduction_scratch

_aten = torch.ops.aten
Groups: TypeAlias = list[list[int]]
ROWS_PER_PARTIAL = 32
"""Rows that a partial gradient of normalization weights sums."""
_Kernel: TypeAlias = Callable[[Sequence[Any], Any, Gpu], Groups]


def kernel_scratch(func: Any, args: Sequence[Any], result: Any, gpu: Gpu) -> Groups:
    """Return the groups of blocks that the kernel of an operation allocates for itself."""
    kernel = _KERNELS.get(func)
    groups = [] if kernel is None else kernel(args, result, gpu)
    copies = [_copy_if(not args[i].is_contiguous(), args[i]) for i in _COPIED_LATE.get(func, ())]
    return [[*copies, *group] for group in groups or [[]]] if copies else groups


def argument_copies(func: Any, args: Sequence[Any]) -> list[int]:
    """Return the bytes of the arguments that a kernel copies before it allocates its result."""
    if func in _MATRICES:
        return [_copy_if(_is_scattered(args[i]), args[i]) for i in _MATRICES[func]]
    if func in _HEADS:
        return [
            _copy_if(not args[i].transpose(1, 2).is_contiguous(), args[i]) for i in _HEADS[func]
        ]
    if func in _CONVOLUTIONS:
        return _columns(func, args)
    return [_copy_if(not args[i].is_contiguous(), args[i]) for i in _COPIED.get(func, ())]


def result_bytes(func: Any, args: Sequence[Any]) -> int | None:
    """Return the bytes of a result's storage if they differ from those of its elements."""
    # The mean is written over the losses of the elements.
    if func in _MEANS_IN_PLACE and _reduction(args):
        return int(args[0].nbytes)
    return None


def multiplies(func: Any) -> bool:
    """Return whether an operation calls cuBLAS; convolutions do without cuDNN."""
    is_convolution = func in _CONVOLUTIONS and not torch.backends.cudnn.enabled
    return func in _PRODUCTS or is_convolution


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _copy_if(is_needed: bool, tensor: Tensor) -> int:  # noqa: FBT001
    """Return the bytes of a contiguous copy, or 0."""
    return tensor.numel() * tensor.element_size() if is_needed else 0


def _is_scattered(tensor: Tensor) -> bool:
    """Return whether cuBLAS cannot read a matrix, or a batch of them, where it is."""
    rows, columns = tensor.shape[-2:]
    row, column = tensor.stride()[-2:]
    is_row_major = column == 1 and row >= max(1, columns)
    is_column_major = row == 1 and column >= max(1, rows)
    return not (is_row_major or is_column_major) and tensor.numel() > 1


# Reductions


def _reduced(args: Sequence[Any], _result: Any, gpu: Gpu) -> Groups:
    tensor: Tensor = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple, int)) else None
    copy = 8 * tensor.numel() if tensor.dtype == torch.bool else 0
    return [[copy, *_sum_over(tensor, dims, gpu)]]


def _norm(args: Sequence[Any], _result: Any, gpu: Gpu) -> Groups:
    dims = args[2] if len(args) > 2 else None
    return [_sum_over(args[0], dims, gpu)]


def _sum_over(tensor: Tensor, dims: Any, gpu: Gpu) -> list[int]:
    chosen = [dims] if isinstance(dims, int) else dims or range(tensor.dim())
    return reduction_scratch(
        tensor.shape,
        tensor.stride(),
        [dim % tensor.dim() for dim in chosen] if tensor.dim() else [],
        item_bytes=tensor.element_size(),
        gpu=gpu,
    )


def _rows_of_sums(rows: int, columns: int, gpu: Gpu) -> list[int]:
    return reduction_scratch((rows, columns), (columns, 1), [0], item_bytes=4, gpu=gpu)


def _elementwise_loss(args: Sequence[Any], _result: Any, gpu: Gpu) -> Groups:
    """The losses of the elements, then the scratch of their mean."""
    if not _reduction(args):
        return []
    tensor: Tensor = args[0]
    return [[tensor.nbytes, *_sum_over(tensor, None, gpu)]]


def _reduction(args: Sequence[Any]) -> int:
    """Return how a loss is reduced: 0 not at all, 1 by its mean, 2 by its sum."""
    return int(args[2]) if len(args) > 2 else 1


def _softmax_backward(args: Sequence[Any], _result: Any, _gpu: Gpu) -> Groups:
    """The product of the gradient and the output."""
    return [[int(args[0].nbytes)]]


def _logsumexp(args: Sequence[Any], result: Any, _gpu: Gpu) -> Groups:
    return [[args[0].nbytes, result.nbytes]]


# Attention


def _flash(args: Sequence[Any], _result: Any, gpu: Gpu) -> Groups:
    """Partial results, if there are too few blocks of queries to fill the GPU."""
    query, key = args[:2]
    dropout = args[3] if len(args) > 3 else 0.0
    if dropout:
        return [[16]]
    batch, heads, length, head = query.shape
    splits = num_splits(batch * heads * -(-length // 64), head, key.size(2), gpu)
    if splits == 1:
        return []
    rows = splits * batch * heads * length
    return [[4 * rows, 4 * rows * _up(head, 32)]]


def _flash_backward(args: Sequence[Any], _result: Any, _gpu: Gpu) -> Groups:
    query, key = args[1:3]
    batch, heads, length, head = query.shape
    rows = batch * heads * _up(length, 128)
    blocks = [4 * rows, 4 * rows * _up(head, 32)]
    if key.size(1) != heads:  # grouped heads: gradients of each query's keys and values
        blocks += [batch * heads * key.size(2) * head * key.element_size()] * 2
    return [blocks]


def _efficient(args: Sequence[Any], _result: Any, _gpu: Gpu) -> Groups:
    query, value = args[0], args[2]
    if query.element_size() == 4 or value.size(-1) <= 128:
        return []
    batch, heads, length, _ = query.shape
    return [[4 * batch * heads * length * value.size(-1)]]


def _efficient_backward(args: Sequence[Any], _result: Any, _gpu: Gpu) -> Groups:
    query, key = args[1:3]
    batch, heads, length, head = query.shape
    delta = 4 * batch * heads * length
    is_float = query.element_size() == 4
    rows = 64 if head <= 64 else 128
    columns = 128 if 64 < head <= 128 and not is_float else 64
    blocks = -(-length // rows) * -(-head // columns)
    workspace = blocks * (16 + 4 * rows * columns)
    if head > 128 and not is_float:
        workspace += 2 * 4 * _up(key.size(2), 64) * _up(head, 128)
    groups = [[4 * batch * heads * length * head, delta, delta]] if is_float else []
    return [*groups, [delta, batch * heads * workspace]]


# Normalization


def _layer_norm_backward(args: Sequence[Any], result: Any, gpu: Gpu) -> Groups:
    tensor, normalized = args[1], args[2]
    columns = math.prod(normalized)
    rows = tensor.numel() // max(columns, 1)
    num_weights = sum(isinstance(one, Tensor) for one in result[1:])
    if not sums_in_two_kernels(rows, columns, gpu):
        return []
    sums = -(-rows // ROWS_PER_PARTIAL)
    return [[*[4 * sums * columns] * num_weights, *_rows_of_sums(sums, columns, gpu)]]


def sums_in_two_kernels(rows: int, columns: int, gpu: Gpu) -> bool:
    """Return whether gradients of normalization weights are first summed in part."""
    return rows > 64 * 1024 and columns / 32 < gpu.num_processors / 2


# Indexing


def _sort_bytes(number: int) -> int:
    """Return about what a radix sort of pairs of 8 bytes takes."""
    return 16 * number + number // 4 + 6144


def _embedding_backward(args: Sequence[Any], _result: Any, _gpu: Gpu) -> Groups:
    gradient, indices, num_weights = args[:3]
    number, width = indices.numel(), gradient.size(-1)
    if number <= 3072:
        return []
    each = 8 * number
    segments = min(number, num_weights)
    partial = number // 10 + segments
    return [
        [each, each, each, _sort_bytes(number)],
        [each, each, 8 * segments, 8 * segments, 8 * partial, 4 * partial * _up(width, 32)],
    ]


def _index_put(args: Sequence[Any], _result: Any, _gpu: Gpu) -> Groups:
    if len(args) < 4 or not args[3]:
        return []
    shapes = [one.shape for one in args[1] if one is not None]
    number = math.prod(torch.broadcast_shapes(*shapes))
    return [[*[8 * number] * 4, _sort_bytes(number)]]


def _sort(args: Sequence[Any], _result: Any, _gpu: Gpu) -> Groups:
    number = args[0].numel()
    return [[8 * number, _sort_bytes(number)]] if args[0].dim() == 1 else []


def _nonzero(args: Sequence[Any], _result: Any, _gpu: Gpu) -> Groups:
    return [[args[0].numel() // 8 + 6144]]


# Many tensors at once, and convolutions


def _foreach_norm(args: Sequence[Any], _result: Any, _gpu: Gpu) -> Groups:
    tensors = args[0]
    chunks = max((-(-one.numel() // 65536) for one in tensors), default=0)
    return [[4 * len(tensors) * chunks]]


def _convolution(args: Sequence[Any], result: Any, _gpu: Gpu) -> Groups:
    """With cuDNN, which is not followed: copy the input or the output once."""
    if not torch.backends.cudnn.enabled:
        return []
    results = result if isinstance(result, tuple) else (result,)
    return [[max(one.nbytes for one in (args[0], *results) if one is not None)]]


def _columns(func: Any, args: Sequence[Any]) -> list[int]:
    """Return the bytes of one unfolded sample; convolutions without cuDNN take one at a time."""
    if torch.backends.cudnn.enabled:
        return []
    is_forward = func is _aten.convolution.default
    weight, source = (args[1], args[0]) if is_forward else (args[2], args[1])
    stride, padding, dilation = args[3:6] if is_forward else args[4:7]
    places = [
        (size + 2 * pad - step * (kernel - 1) - 1) // jump + 1
        for size, kernel, jump, pad, step in zip(
            source.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    return [math.prod(weight.shape[1:]) * math.prod(places) * int(weight.element_size())]


_CONVOLUTIONS = {_aten.convolution.default, _aten.convolution_backward.default}
_PRODUCTS = {
    getattr(_aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_addmm_activation")
}
_MATRICES = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
}
"""The positions of the factors."""
_HEADS = {
    _aten._scaled_dot_product_flash_attention_backward.default: (0, 4),
    _aten._scaled_dot_product_efficient_attention_backward.default: (0,),
}
"""The positions of arguments whose heads have to lie side by side for each token."""
_COPIED = {
    _aten.embedding.default: (1,),
    _aten.embedding_dense_backward.default: (0, 1),
    _aten.native_layer_norm.default: (0,),
    _aten.native_layer_norm_backward.default: (1,),
    _aten.gather.default: (2,),
}
"""The positions of arguments of which a kernel makes a contiguous copy."""
_COPIED_LATE = {
    _aten.native_layer_norm_backward.default: (0,),
    _aten._softmax.default: (0,),
    _aten._softmax_backward_data.default: (0, 1),
    _aten._log_softmax.default: (0,),
    _aten._log_softmax_backward_data.default: (0, 1),
    _aten.nll_loss_forward.default: (0,),
    _aten.nll_loss_backward.default: (1,),
    _aten.cumsum.default: (0,),
    _aten.topk.default: (0,),
}
"""The same, after the result has been allocated."""
_MEANS_IN_PLACE = {_aten.mse_loss.default, _aten.smooth_l1_loss.default}
_KERNELS: dict[Any, _Kernel] = {
    **dict.fromkeys((_aten.sum.default, _aten.sum.dim_IntList), _reduced),
    **dict.fromkeys((_aten.mean.default, _aten.mean.dim), _reduced),
    **dict.fromkeys((_aten.amax.default, _aten.amin.default), _reduced),
    _aten.linalg_vector_norm.default: _norm,
    **dict.fromkeys((*_MEANS_IN_PLACE, _aten.huber_loss.default), _elementwise_loss),
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.logsumexp.default: _logsumexp,
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: _efficient,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.index_put.default: _index_put,
    _aten.index_put_.default: _index_put,
    _aten._index_put_impl_.default: _index_put,
    _aten._unsafe_index_put.default: _index_put,
    _aten.sort.default: _sort,
    _aten.sort.stable: _sort,
    _aten.argsort.default: _sort,
    _aten.nonzero.default: _nonzero,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution,
}
