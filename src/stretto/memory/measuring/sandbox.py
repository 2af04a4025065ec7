"""Run steps and restore model, optimizer and random state afterwards."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stretto.errors import FitError
from stretto.memory.measuring.copies import Copies, parts_of
from stretto.runtime.random_state import RandomState


@contextlib.contextmanager
def sandbox(*objects: object, on_disk: bool = False) -> Iterator[Callable[[], None]]:
    """Restore every bit of the training state when the block ends.

    The state includes parameters, buffers and other attributes of all modules; gradients, which are
    removed inside the block; state, groups and attributes of the optimizer; the scaler; the random
    state of torch, accelerators, Python and NumPy. Tensors keep their identity and their memory.
    Other objects that modules refer to are not restored.

    Args:
        *objects: what to restore: modules, optimizers, gradient scalers, generators, a `DataLoader`
            (its generator), dicts and lists of these, and any object with `state_dict` and
            `load_state_dict`.
        on_disk: whether to store CPU tensors on disk, so that steps have as much memory as without
            a sandbox.

    Yields:
        A function that restores everything at once, as the end of the block does.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> before = model.weight.clone()
    >>> with sandbox(model, optimizer):
    ...     model(torch.ones(4, 2)).sum().backward()
    ...     optimizer.step()
    >>> torch.equal(model.weight, before), model.weight.grad, len(optimizer.state)
    (True, None, 0)

    Raises:
        FitError: an object cannot be restored.
    """
    copies = Copies(on_disk=on_disk)
    try:
        kept = _Snapshot(copies)
        for one in objects:
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
    """Walks through objects and records how to restore each of them."""

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
        """Add an object that the user named."""
        if self._add(root):
            return
        if isinstance(root, torch.utils.data.DataLoader):
            self._add(root.generator)
        elif hasattr(root, "state_dict") and hasattr(root, "load_state_dict"):
            state = copy.deepcopy(root.state_dict())
            self._undo.append(lambda: root.load_state_dict(copy.deepcopy(state)))
        else:
            raise FitError.cannot(
                f"restore an object of type {type(root).__name__} after a trial",
                why="it has no state_dict and load_state_dict",
                instead="leave it out, or restore it yourself",
            )

    def _add(self, value: Any) -> bool:
        """Add an object; return False if its type is not known."""
        # The most frequent types come first: every module has hundreds of these.
        if value is None or isinstance(value, (str, int, float, type)):
            return True
        if id(value) in self._seen:
            return True
        add = self._kind(value)
        if add is None:
            return False
        self._seen[id(value)] = value  # keep a reference, so that no other object gets its id
        add(value)
        return True

    def _kind(self, value: Any) -> Callable[[Any], object] | None:
        table: tuple[tuple[Any, Callable[[Any], object]], ...] = (
            (Tensor, self._add_tensor),
            ((nn.Module, Optimizer, GradScaler), lambda one: self._add(vars(one))),
            ((dict, list, deque, set), self._add_container),
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
            raise FitError.cannot(
                "restore a model with uninitialized (lazy) parameters",
                why="their shape is set in the first forward pass and cannot be undone",
                instead="run one batch through the model first",
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
            # The memory is replaced by code such as `p.data = ...`.
            if tensor.layout is torch.strided and not _is_same_memory(tensor, memory):
                tensor.data = memory
            if tensor.is_leaf and tensor.requires_grad != needs_gradient:
                tensor.requires_grad_(needs_gradient)

        self._undo.append(undo)

    def _add_container(self, value: Any) -> None:
        keys, inner = list(value), list(_values(value))

        def undo() -> None:
            if not (_is_same(value, keys) and _is_same(_values(value), inner)):
                value.clear()
                if isinstance(value, (list, deque)):
                    value.extend(inner)
                else:
                    value.update(zip(keys, inner, strict=True) if isinstance(value, dict) else keys)

        self._undo.append(undo)
        self._add_items(inner)

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


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _is_same(items: Iterable[Any], others: list[Any]) -> bool:
    """Return whether the same objects are still there."""
    now = list(items)
    return len(now) == len(others) and all(map(is_, now, others))
