"""What `DistributedDataParallel` allocates: buckets of gradients that it averages together.

Its reducer is written in C++ and does not run on fake tensors. So what it does with memory is done
here by hooks, as torch 2.13 does it with default settings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

_assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
_FIRST_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20


def replicate(model: nn.Module, *, as_views: bool = False, finds_unused: bool = False) -> None:
    """Give a model the buckets that `DistributedDataParallel` would allocate for it.

    Args:
        model: the model, on fake tensors.
        as_views: whether gradients are views of the buckets (`gradient_as_bucket_view`).
        finds_unused: whether it looks for parameters without a gradient
            (`find_unused_parameters`). Then the first buckets stay.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    buckets = _Buckets(parameters, as_views=as_views, is_final=finds_unused)
    model.register_forward_pre_hook(lambda *_: buckets.rebuild())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(buckets.take)


@final
class _Buckets:
    """Buckets of gradients: at first one, then many, in the order in which gradients come."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, as_views: bool, is_final: bool
    ) -> None:
        self._as_views = as_views
        self._order: dict[nn.Parameter, None] = {}
        self._number = len(parameters)
        self._is_final = is_final
        self._views: dict[nn.Parameter, Tensor] = {}
        self._allocate(parameters, [_FIRST_BYTES, _BUCKET_BYTES] if is_final else [sys.maxsize])

    def take(self, parameter: Tensor) -> None:
        """Copy a gradient into its bucket."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self._order.setdefault(parameter)
        view = self._views[parameter]
        view.copy_(parameter.grad)
        if self._as_views:
            parameter.grad = view

    def rebuild(self) -> None:
        """Before the second forward pass, allocate buckets in the order of the gradients."""
        if not self._is_final and len(self._order) == self._number:
            self._is_final = True
            self._allocate(list(self._order), [_FIRST_BYTES, _BUCKET_BYTES])

    def _allocate(self, parameters: Sequence[nn.Parameter], limits: Sequence[int]) -> None:
        self._views.clear()
        groups, _ = _assign(list(parameters), list(limits))
        for group in groups:
            self._views.update(_views([parameters[index] for index in group]))


def _views(parameters: Sequence[nn.Parameter]) -> Iterable[tuple[nn.Parameter, Tensor]]:
    """Allocate a bucket, and return a view of it for each parameter."""
    counts = [one.numel() for one in parameters]
    bucket = torch.empty(sum(counts), dtype=parameters[0].dtype, device=parameters[0].device)
    ends = accumulate(counts)
    for parameter, count, end in zip(parameters, counts, ends, strict=True):
        yield parameter, bucket[end - count : end].view(parameter.shape)
