"""Values and shapes that fake tensors do not have.

If a step reads a value (`.item()`, `if tensor.any()`), it gets 0. If a shape depends on values
(`nonzero`, a boolean mask), it gets the largest possible shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import FitError

_aten = torch.ops.aten


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operation on fake tensors, with 0 for values and the largest possible shapes."""
    if func is _aten.equal.default:
        return False
    if func is _aten._local_scalar_dense.default:
        try:
            return func(*args, **kwargs)  # known, such as the step count of an optimizer
        except RuntimeError:  # of fake tensors: the value is not known
            kind = args[0].dtype
            return 0.0 if kind.is_floating_point else kind != torch.bool and 0
    if func is _aten.mkldnn_rnn_layer.default:
        raise FitError.cannot(
            "estimate an LSTM on a CPU",
            why="its kernels keep a workspace that fake tensors leave out",
            instead="use method='try', or ask about a GPU",
        )
    largest = _LARGEST.get(func)
    found = None if largest is None else largest(func, args, kwargs)
    return func(*args, **kwargs) if found is None else found[0]


# Each returns the largest possible result in a tuple, or None if nothing depends on values.


def _nonzero(_func: Any, args: Sequence[Any], _kwargs: Any) -> tuple[Any]:
    tensor: Tensor = args[0]
    return (tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.long),)


def _masked_select(_func: Any, args: Sequence[Any], _kwargs: Any) -> tuple[Any]:
    tensor, mask = torch.broadcast_tensors(args[0], args[1])
    return (tensor.new_empty(mask.numel()),)


def _unique(_func: Any, args: Sequence[Any], _kwargs: Any) -> tuple[Any]:
    tensor: Tensor = args[0]
    counts = tensor.new_empty(tensor.numel(), dtype=torch.long)
    inverse = tensor.new_empty(tensor.shape, dtype=torch.long)
    return ((tensor.new_empty(tensor.numel()), inverse, counts),)


def _indexed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """Index by as many integers as the mask has elements."""
    if not any(map(_is_mask, args[1])):
        return None
    numbers: list[Tensor | None] = []
    for index in args[1]:
        if index is not None and _is_mask(index):
            numbers += [index.new_empty(index.numel(), dtype=torch.long)] * index.dim()
        else:
            numbers.append(index)
    return (func(args[0], numbers, *args[2:], **kwargs),)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in {torch.bool, torch.uint8}


_LARGEST: dict[Any, Callable[[Any, Sequence[Any], dict[str, Any]], tuple[Any] | None]] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _unique,
    _aten.unique_consecutive.default: _unique,
    _aten.index.Tensor: _indexed,
    _aten.index_put.default: _indexed,
    _aten.index_put_.default: _indexed,
    _aten._index_put_impl_.default: _indexed,
}
