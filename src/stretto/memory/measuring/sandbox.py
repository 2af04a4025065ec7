"""A place to take steps in that leave no trace."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stretto.errors import FitError, cannot
from stretto.memory.measuring.copies import Copies, parts_of
from stretto.runtime.random_state import RandomState


@contextlib.contextmanager
def sandbox(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scaler: GradScaler | None = None,
    also: Iterable[object] = (),
    on_disk: bool = False,
) -> Iterator[Callable[[], None]]:
    """Let steps be taken that leave no trace: afterwards every bit is as it was before.

    That is: parameters, buffers and other attributes of all modules; the gradients, which are set
    aside meanwhile; the state, the groups and the attributes of the optimizer; the scaler; the
    random state of torch, of all accelerators, of Python and of NumPy. Tensors keep their identity
    and their memory. Objects of other classes that modules refer to are left alone.

    Args:
        model: what is trained.
        optimizer: what trains it.
        scaler: what scales its loss.
        also: what else to put back: modules, optimizers, generators, a `DataLoader` (its
            generator), and whatever has `state_dict` and `load_state_dict`.
        on_disk: whether what lies in host memory is kept on the disk meanwhile, so that steps have
            as much memory as without a sandbox.

    Yields:
        A function that goes back to the beginning at once, as the end of the sandbox does.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> before = model.weight.clone()
    >>> with sandbox(model, optimizer):
    ...     model(torch.ones(4, 2)).sum().backward()
    ...     optimizer.step()
    >>> torch.equal(model.weight, before), model.weight.grad, len(optimizer.state)
    (True, None, 0)

    Raises:
        FitError: something cannot be put back.
    """
    copies = Copies(on_disk=on_disk)
    try:
        kept = _Snapshot(copies)
        for one in (model, optimizer, scaler, *also):
            kept.add_root(one)
        state = RandomState.now()

        def undo() -> None:
            kept.restore()
            copies.restore()
            state.restore()

        try:
            kept.set_gradients_aside()
            yield undo
        finally:
            undo()
    finally:
        copies.close()


@final
class _Snapshot:
    """Walks through what is to be kept, and knows how to put each thing back."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._seen: dict[int, object] = {}
        self._undo: list[Callable[[], object]] = []
        self._parameters: list[nn.Parameter] = []

    def restore(self) -> None:
        for undo in self._undo:
            undo()

    def set_gradients_aside(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def add_root(self, root: Any) -> None:
        """Keep something that was named."""
        if root is None or self._add_known(root):
            return
        if isinstance(root, torch.utils.data.DataLoader):
            self._add(root.generator)
        elif hasattr(root, "state_dict") and hasattr(root, "load_state_dict"):
            state = copy.deepcopy(root.state_dict())
            self._undo.append(lambda: root.load_state_dict(copy.deepcopy(state)))
        else:
            raise FitError(
                cannot(
                    f"put back what is of type {type(root).__name__} after a trial",
                    why="it has no state_dict and load_state_dict",
                    instead="leave it out of 'also', or put it back yourself",
                )
            )

    def _add(self, value: Any) -> None:
        """Keep something that was found; what is of no known kind is left alone."""
        self._add_known(value)

    def _add_known(self, value: Any) -> bool:
        # Most of what is found; asked first, as there are hundreds in every module.
        if value is None or isinstance(value, (str, int, float, type)):
            return True
        if id(value) in self._seen:
            return True
        add = self._kind(value)
        if add is None:
            return False
        self._seen[id(value)] = value  # held, so that nothing else gets its id
        add(value)
        return True

    def _kind(self, value: Any) -> Callable[[Any], None] | None:
        table: tuple[tuple[Any, Callable[[Any], None]], ...] = (
            (Tensor, self._add_tensor),
            ((nn.Module, Optimizer, GradScaler), lambda one: self._add(vars(one))),
            (dict, self._add_dict),
            ((list, deque), self._add_sequence),
            (set, self._add_set),
            ((tuple, frozenset), self._add_items),
            (np.ndarray, self._add_array),
            (torch.Generator, lambda one: self._set(one.set_state, one.get_state())),
            (random.Random, lambda one: self._set(one.setstate, one.getstate())),
            (np.random.Generator, self._add_numpy_generator),
            (np.random.RandomState, lambda one: self._set(one.set_state, one.get_state())),
        )
        return next((add for kinds, add in table if isinstance(value, kinds)), None)

    def _add_tensor(self, tensor: Tensor) -> None:
        if is_lazy(tensor):
            raise FitError(
                cannot(
                    "put back a model with parameters that have no shape yet",
                    why="they get one in the first forward pass, for good",
                    instead="run one batch through the model first",
                )
            )
        self._copies.keep(tensor)
        memory, needs_gradient = tensor.detach(), tensor.requires_grad
        if isinstance(tensor, nn.Parameter):
            self._parameters.append(tensor)
            gradient = tensor.grad
            if gradient is not None:
                self._add(gradient)
            self._undo.append(lambda: setattr(tensor, "grad", gradient))

        def undo() -> None:
            # Unless something has put other memory behind it, as `p.data = ...` does.
            if tensor.layout is torch.strided and not _is_same_memory(tensor, memory):
                tensor.data = memory
            if tensor.is_leaf and tensor.requires_grad != needs_gradient:
                tensor.requires_grad_(needs_gradient)

        self._undo.append(undo)

    def _add_dict(self, value: dict[Any, Any]) -> None:
        items = list(value.items())

        def undo() -> None:
            if not _is_same(list(value.items()), items):
                value.clear()
                value.update(items)

        self._undo.append(undo)
        for _, item in items:
            self._add(item)

    def _add_sequence(self, value: list[Any] | deque[Any]) -> None:
        items = list(value)

        def undo() -> None:
            if len(value) != len(items) or any(
                a is not b for a, b in zip(value, items, strict=True)
            ):
                value.clear()
                value.extend(items)

        self._undo.append(undo)
        self._add_items(items)

    def _add_set(self, value: set[Any]) -> None:
        items = set(value)

        def undo() -> None:
            if value != items:
                value.clear()
                value.update(items)

        self._undo.append(undo)

    def _add_items(self, value: Iterable[Any]) -> None:
        for item in value:
            self._add(item)

    def _add_array(self, value: Any) -> None:
        if value.flags.writeable:
            kept = value.copy()
            self._undo.append(lambda: np.copyto(value, kept))

    def _add_numpy_generator(self, value: np.random.Generator) -> None:
        bits = value.bit_generator
        self._set(lambda state: setattr(bits, "state", state), bits.state)

    def _set(self, write: Callable[[Any], object], state: Any) -> None:
        self._undo.append(lambda: write(state))


def _is_same_memory(tensor: Tensor, memory: Tensor) -> bool:
    if parts_of(tensor) is not None or tensor.device != memory.device:
        return tensor.device == memory.device
    return (
        tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        and tensor.shape == memory.shape
        and tensor.stride() == memory.stride()
        and tensor.storage_offset() == memory.storage_offset()
    )


def _is_same(items: list[tuple[Any, Any]], others: list[tuple[Any, Any]]) -> bool:
    if len(items) != len(others):
        return False
    return all(a is c and b is d for (a, b), (c, d) in zip(items, others, strict=True))
