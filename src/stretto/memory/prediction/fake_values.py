"""Values and shapes that fake tensors do not have.

A fake tensor has no values. If a step reads one (`.item()`, `if tensor.any()`), it gets 0 or 1; the
step is run once with each. If a shape depends on values (`nonzero`, a boolean mask), it gets the
largest possible shape. Scratch memory of kernels is estimated in `scratch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from stretto.errors import FitError
from stretto.memory.prediction.recording import Place
from stretto.memory.prediction.scratch import CONVOLUTIONS

_aten = torch.ops.aten

_READS = {_aten._local_scalar_dense.default, _aten.equal.default}

_REFUSED = {
    # The fake kernel has an empty workspace: measured 27 percent below the real peak.
    _aten.mkldnn_rnn_layer.default: "the kernels of LSTMs keep a workspace that fakes leave out",
}


@final
class FakeValues:
    """Supplies values for fake tensors, and records where.

    Args:
        value: the value of every element that is read.
    """

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.reads: dict[str, Place] = {}
        self.worst_cases: dict[str, Place] = {}
        self.scratch: dict[str, Place] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: Place) -> Any:
        """Call an operation on fakes, or return a worst-case result."""
        worst = _WORST.get(func)
        if worst is not None:
            answer = worst(func, args, kwargs)
            if answer is not None:
                self.worst_cases.setdefault(str(func), place)
                return answer[0]
        if func in _READS:
            try:
                return func(*args, **kwargs)
            except DataDependentOutputException:
                self.reads.setdefault(str(func), place)
                return self._value_of(func, args[0])
        if func in CONVOLUTIONS:
            self.scratch.setdefault(str(func), place)
        elif func in _REFUSED:
            raise FitError.cannot(
                f"follow {place.module or 'a module'} on fake tensors",
                why=_REFUSED[func],
                instead="probe with real steps",
            )
        return func(*args, **kwargs)

    def _value_of(self, func: Any, tensor: Tensor) -> bool | int | float:
        if func is _aten.equal.default or tensor.dtype == torch.bool:
            return bool(self.value)
        if tensor.dtype.is_floating_point:
            return float(self.value)
        return self.value


# Operations whose output shape depends on values. Each returns the largest possible result in a
# tuple, or None if nothing depends on values. They run on fakes, so their tensors cost nothing.


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
    indices = args[1]
    if not any(_is_mask(index) for index in indices):
        return None
    numbers: list[Tensor | None] = []
    for index in indices:
        if _is_mask(index):
            each = index.new_empty(index.numel(), dtype=torch.long)
            numbers += [each] * index.dim()
        else:
            numbers.append(index)
    return (func(args[0], numbers, *args[2:], **kwargs),)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in {torch.bool, torch.uint8}


_WORST: dict[Any, Callable[[Any, Sequence[Any], dict[str, Any]], tuple[Any] | None]] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _unique,
    _aten.unique_consecutive.default: _unique,
    _aten.index.Tensor: _indexed,
    _aten.index_put.default: _indexed,
    _aten.index_put_.default: _indexed,
    _aten._index_put_impl_.default: _indexed,
}
