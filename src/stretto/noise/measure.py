"""The squared norm of the gradient of each micro-batch, out of a step that accumulates them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.noise.norms import Norms, read_squares


@final
class MicroGradients:
    """Lets each backward pass begin without a gradient, measures what it leaves, and adds it up.

    What is added up is, to the last bit, what accumulating would have given. It needs room for one
    more gradient. Call `begin` before the first backward pass of a step, and run each in `watch`.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> gradients = MicroGradients([weight])
    >>> gradients.begin()
    >>> for factor in (1.0, 2.0):
    ...     with gradients.watch(is_last=factor == 2.0):
    ...         (factor * weight).sum().backward()
    >>> [round(square, 4) for square in gradients.read()], weight.grad
    ([2.0, 8.0, 18.0], tensor([3., 3.]))

    Args:
        parameters: those whose gradients are measured.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list({id(p): p for p in parameters}.values())
        self._own = {id(parameter) for parameter in self._parameters}
        self._aside: dict[int, Tensor] = {}
        self._in_buckets: Norms | None = None
        self._world_size = 1
        self._has_unused = False
        self._measured: list[Norms] = []

    def attach(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Look at the gradients of a rank before they are averaged over ranks.

        They are averaged as without it, to the last bit.
        """
        self._world_size = dist.get_world_size(model.process_group)
        self._has_unused = model.find_unused_parameters

        # A function without annotations: torch would compare those with types, and ours are text.
        def hook(group, bucket):  # type: ignore[no-untyped-def]
            return self._average(group, bucket)

        model.register_comm_hook(model.process_group, hook)

    def begin(self) -> None:
        """Forget the step before, and the gradient that it left."""
        for parameter in self._parameters:
            parameter.grad = None  # not zeroed: it may be the bucket that the next one is put into
        self._measured = []
        self._aside = {}
        self._in_buckets = None

    @contextmanager
    def watch(self, *, is_last: bool, is_averaged: bool = False) -> Iterator[None]:
        """Measure what the backward pass within leaves, and add it to what was there before it.

        Args:
            is_last: whether the gradient is complete after it; it lies in the parameters then.
            is_averaged: whether ranks average the gradient in it, and it is the last.
        """
        if is_averaged:
            self._in_buckets = Norms()
            if self._has_unused:
                # torch reads the gradient of a parameter that this pass may not reach.
                for parameter in self._parameters:
                    before = self._aside.get(id(parameter))
                    parameter.grad = None if before is None else torch.zeros_like(before)
        try:
            yield
        except BaseException:
            self.begin()  # or torch would add what lies aside to the next gradient that it averages
            raise
        self._take(is_last=is_last)

    def read(self) -> list[float]:
        """Return the squared norm of what each pass left; and last that of the gradient now."""
        whole = Norms()
        whole.add([p.grad for p in self._parameters if p.grad is not None])
        return read_squares([*self._measured, whole])

    def _take(self, *, is_last: bool) -> None:
        if self._in_buckets is not None:
            self._measured.append(self._in_buckets)
            self._in_buckets, self._aside = None, {}
            return
        found = [(p, p.grad) for p in self._parameters if p.grad is not None]
        norms = Norms()
        norms.add([gradient for _, gradient in found])
        self._measured.append(norms)
        self._add(found)
        for parameter in self._parameters:
            parameter.grad = self._aside.get(id(parameter)) if is_last else None
        if is_last:
            self._aside = {}

    def _add(self, found: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        into, more = [], []
        for parameter, gradient in found:
            before = self._aside.setdefault(id(parameter), gradient)
            if before is gradient:
                continue
            if before.is_sparse or gradient.is_sparse:
                self._aside[id(parameter)] = before + gradient
            else:
                into.append(before)
                more.append(gradient)
        if into:
            torch._foreach_add_(into, more)

    def _average(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        """Average a bucket of gradients over ranks: what torch calls while it runs backward."""
        buffer: Tensor = bucket.buffer()
        if self._in_buckets is not None:
            buffer = self._measured_bucket(bucket, self._in_buckets)
        buffer.mul_(1.0 / self._world_size)  # as torch does where there is no hook
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def _measured_bucket(self, bucket: Any, norms: Norms) -> Tensor:
        """Add the bucket to `norms`, and return it with what was there before it."""
        buffer: Tensor = bucket.buffer()
        parameters, views = bucket.parameters(), _views(bucket)
        own = [id(parameter) in self._own for parameter in parameters]
        views_of_own = [view for view, is_own in zip(views, own, strict=True) if is_own]
        norms.add([buffer] if all(own) else views_of_own)
        before = [self._aside.get(id(parameter)) for parameter in parameters]
        pairs = [(view, one) for view, one in zip(views, before, strict=True) if one is not None]
        if buffer.is_sparse:
            # In the order of accumulating, which decides how entries of a row are rounded.
            return pairs[0][1] + buffer if pairs else buffer
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [one for _, one in pairs])
        return buffer


def _views(bucket: Any) -> list[Tensor]:
    """The gradients of a bucket, each in the shape of its parameter, in the bucket's memory.

    Those of `bucket.gradients()` (torch 2.13) have the elements in another order where a parameter
    is not row by row (channels last), and are half of a complex one, and none of a sparse one.
    """
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if buffer.is_sparse:  # such a bucket has a single parameter
        return [buffer]
    # A bucket is of one type; a complex one is of pairs of real numbers.
    whole = torch.view_as_complex(buffer.view(-1, 2)) if parameters[0].is_complex() else buffer
    parts = whole.split([parameter.numel() for parameter in parameters])
    return [_as_laid_out(part, like) for part, like in zip(parts, parameters, strict=True)]


def _as_laid_out(part: Tensor, like: Tensor) -> Tensor:
    """A flat part of a bucket in the shape of a parameter, with its strides where it is dense.

    Only what is dense keeps its strides in `empty_like`.
    """
    if like.is_contiguous() or torch.empty_like(like, device="meta").stride() != like.stride():
        return part.view(like.shape)
    return part.as_strided(like.shape, like.stride())
