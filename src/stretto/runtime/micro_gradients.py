"""The gradients of single micro-batches: their squared norms, and their sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.runtime.sharded import local_part

_LARGE = 2**17
"""Larger tensors are summed in chunks on the CPU. `torch.linalg.vector_norm` sums in float32:
with 20 million elements its error is 0.2 percent; with chunks of this size it is 0.0001 percent, at
the same speed. The variance is a small difference of such squares."""
_WIDE = (torch.float32, torch.float64)


class Norms:
    """Norms of parts of a gradient, still on their device.

    Reading a value waits for the device, so `read_squares` reads all at once.
    """

    __slots__ = ("norms",)

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Add more parts."""
        single: list[Tensor] = []
        half: list[Tensor] = []
        for part in tensors:
            is_plain = type(part) is Tensor and part.layout is torch.strided
            tensor = part if is_plain else _values(part)
            is_large = tensor.numel() > _LARGE and tensor.device.type == "cpu"
            pieces = tensor.reshape(-1).split(_LARGE) if is_large else (tensor,)
            is_wide = tensor.dtype in _WIDE or tensor.is_complex()
            (single if is_wide else half).extend(pieces)
        if single:
            self.norms += torch._foreach_norm(single)  # no public spelling of it
        if half:
            # By default the sum is in float32 but the result is rounded to half precision.
            self.norms += torch._foreach_norm(half, 2, torch.float32)


def read_squares(parts: Sequence[Norms]) -> list[float]:
    """Return the squared norms, all read at once.

    >>> norms = Norms()
    >>> norms.add([torch.ones(3), torch.full((2, 2), 2.0)])
    >>> [round(square, 4) for square in read_squares([norms])]
    [19.0]
    """
    scalars = [norm for part in parts for norm in part.norms]
    if len({scalar.device for scalar in scalars}) > 1:
        scalars = [scalar.cpu() for scalar in scalars]
    norms = iter(torch.stack(scalars).tolist() if scalars else ())
    return [total(norm * norm for norm in islice(norms, len(part.norms))) for part in parts]


def total(values: Iterable[float]) -> float:
    """Return the sum, rounded once; inf if it overflows.

    >>> total([0.1] * 10), total([1.7e308, 1.7e308]), total([math.inf, -math.inf])
    (1.0, inf, nan)
    """
    try:
        return math.fsum(values)
    except OverflowError:  # of finite gradients in float64
        return math.inf
    except ValueError:
        return math.nan


def _values(gradient: Tensor) -> Tensor:
    """Return the local part of a gradient as a dense tensor."""
    placements = getattr(gradient, "placements", None)
    if placements is not None:
        if any(place.is_partial() for place in placements):  # as a norm's of sequence parallelism
            from torch.distributed.tensor import Replicate

            whole = [Replicate() if place.is_partial() else place for place in placements]
            gradient = gradient.redistribute(placements=whole)  # type: ignore[attr-defined]
        gradient = local_part(gradient)
    return gradient.coalesce().values() if gradient.is_sparse else gradient.detach()


@final
class MicroGradients:
    """Measures the gradient of each backward pass and accumulates them.

    The sum is bitwise equal to normal accumulation. It needs memory for one more gradient. Call
    `begin` before the first backward pass of a step, and run each pass in `watch`.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> gradients = MicroGradients([weight])
    >>> gradients.begin()
    >>> for factor in (1.0, 2.0):
    ...     with gradients.watch(is_last=factor == 2.0):
    ...         (factor * weight).sum().backward()
    >>> [round(square, 4) for square in gradients.read()], weight.grad
    ([2.0, 8.0, 18.0], tensor([3., 3.]))

    Args:
        parameters: the parameters whose gradients are accumulated.
        measured: those of them whose norms count here; None: all. Of a parameter that several ranks
            have, one rank measures the gradient.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], measured: Iterable[nn.Parameter] | None = None
    ) -> None:
        self._parameters = list({id(p): p for p in parameters}.values())
        self._own = {id(parameter) for parameter in self._parameters}
        self._counted = self._own if measured is None else {id(parameter) for parameter in measured}
        self._aside: dict[int, Tensor] = {}
        self._in_buckets: Norms | None = None
        self._world_size = 1
        self._has_unused = False
        self._measured: list[Norms] = []

    def attach(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Measure the gradients of a rank before DDP averages them over ranks.

        The averages are bitwise equal to those of DDP alone.
        """
        self._world_size = dist.get_world_size(model.process_group)
        self._has_unused = model.find_unused_parameters

        # No annotations: torch compares them with types, and ours are strings.
        def hook(group, bucket):  # type: ignore[no-untyped-def]
            return self._average(group, bucket)

        model.register_comm_hook(model.process_group, hook)

    def begin(self) -> None:
        """Start a step: drop the gradients of the previous one."""
        for parameter in self._parameters:
            parameter.grad = None  # not zeroed: it may be a view of a bucket of DDP
        self._measured = []
        self._aside = {}
        self._in_buckets = None

    @contextmanager
    def watch(self, *, is_last: bool, is_averaged: bool = False) -> Iterator[None]:
        """Measure the gradient of the backward pass inside, and accumulate it.

        Args:
            is_last: whether this is the last pass; the parameters then have the whole gradient.
            is_averaged: whether DDP averages gradients in this pass, which must be the last.
        """
        if is_averaged:
            self._in_buckets = Norms()
            if self._has_unused:
                # DDP reads the gradients of unused parameters, too.
                for parameter in self._parameters:
                    before = self._aside.get(id(parameter))
                    parameter.grad = None if before is None else torch.zeros_like(before)
        try:
            yield
        except BaseException:
            self.begin()  # otherwise DDP would add the stored gradients to the next average
            raise
        self._accumulate(is_last=is_last)

    def read(self) -> list[float]:
        """Return the squared gradient norm of each pass; the last entry is the whole gradient."""
        whole = Norms()
        own = [p for p in self._parameters if id(p) in self._counted]
        whole.add([p.grad for p in own if p.grad is not None])
        return read_squares([*self._measured, whole])

    def _accumulate(self, *, is_last: bool) -> None:
        if self._in_buckets is not None:
            self._measured.append(self._in_buckets)
            self._in_buckets, self._aside = None, {}
            return
        found = [(p, p.grad) for p in self._parameters if p.grad is not None]
        norms = Norms()
        norms.add([gradient for p, gradient in found if id(p) in self._counted])
        self._measured.append(norms)
        self._add(found)
        for parameter in self._parameters:
            parameter.grad = self._aside.get(id(parameter)) if is_last else None
        if is_last:
            self._aside = {}

    def _add(self, found: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        into: list[Tensor] = []
        more: list[Tensor] = []
        for parameter, gradient in found:
            before = self._aside.setdefault(id(parameter), gradient)
            if before is gradient:
                continue
            places = [getattr(each, "placements", None) for each in (before, gradient)]
            if before.is_sparse or gradient.is_sparse or places[0] != places[1]:
                self._aside[id(parameter)] = before + gradient
            else:
                into.append(local_part(before))
                more.append(local_part(gradient))
        if into:
            torch._foreach_add_(into, more)

    def _average(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        """Average a bucket of gradients over ranks; the communication hook of DDP."""
        buffer: Tensor = bucket.buffer()
        if self._in_buckets is not None:
            buffer = self._measured_bucket(bucket, self._in_buckets)
        buffer.mul_(1.0 / self._world_size)  # as DDP does without a hook
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def _measured_bucket(self, bucket: Any, norms: Norms) -> Tensor:
        """Add the bucket to `norms`; return the bucket plus earlier gradients."""
        buffer: Tensor = bucket.buffer()
        parameters, views = bucket.parameters(), _views(bucket)
        own = [id(parameter) in self._own for parameter in parameters]
        views_of_own = [view for view, is_own in zip(views, own, strict=True) if is_own]
        norms.add([buffer] if all(own) else views_of_own)
        before = [self._aside.get(id(parameter)) for parameter in parameters]
        both = zip(views, before, strict=True)
        pairs = [(view, earlier) for view, earlier in both if earlier is not None]
        if buffer.is_sparse:
            # The order of accumulation decides how entries of a row are rounded.
            return pairs[0][1] + buffer if pairs else buffer
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [earlier for _, earlier in pairs])
        return buffer


def _views(bucket: Any) -> list[Tensor]:
    """Return views of a bucket, one per parameter and in its shape.

    `bucket.gradients()` (torch 2.13) has another element order for channels-last parameters, only
    half of complex ones, and nothing for sparse ones.
    """
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if buffer.is_sparse:  # such a bucket has a single parameter
        return [buffer]
    # A bucket has one dtype; a complex bucket stores pairs of real numbers.
    whole = torch.view_as_complex(buffer.view(-1, 2)) if parameters[0].is_complex() else buffer
    parts = whole.split([parameter.numel() for parameter in parameters])
    return [_as_laid_out(part, like) for part, like in zip(parts, parameters, strict=True)]


def _as_laid_out(part: Tensor, like: Tensor) -> Tensor:
    """Return a flat part of a bucket in the shape of a parameter, with its strides if dense.

    `empty_like` keeps strides only of dense tensors.
    """
    if like.is_contiguous() or torch.empty_like(like, device="meta").stride() != like.stride():
        return part.view(like.shape)
    return part.as_strided(like.shape, like.stride())
