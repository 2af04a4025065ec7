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
from stretto.runtime.random_state import RandomState


@contextlib.contextmanager
def sandbox(*objects: object) -> Iterator[Callable[[], None]]:
    """Restore every bit of the training state when the block ends.

    The state includes parameters, buffers and other attributes of all modules; gradients, which are
    removed inside the block; state, groups and attributes of the optimizer; the scaler; the random
    state of torch, accelerators, Python and NumPy. Tensors keep their identity and their memory.
    Other objects that modules refer to are not restored.

    Args:
        *objects: what to restore: modules, optimizers, gradient scalers, generators, a `DataLoader`
            (its generator), dicts and lists of these, and any object with `state_dict` and
            `load_state_dict`.

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
    kept = _Snapshot()
    for one in objects:
        kept.add_root(one)
    state = RandomState.now()

    def undo() -> None:
        kept.restore()
        state.restore()

    try:
        kept.set_gradients_aside()
        yield undo
    finally:
        undo()


@final
class _Snapshot:
    """Walks through objects and records how to restore each of them."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}
        """Storages as bytes, and their copies in host memory; shared ones are copied once."""
        self._seen: dict[int, object] = {}
        self._undo: list[Callable[[], object]] = []
        self._parameters: list[nn.Parameter] = []

    def restore(self) -> None:
        with torch.no_grad():
            for undo in self._undo:
                undo()
            for memory, copied in self._copies.values():
                memory.copy_(copied)

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
        self._keep_elements(tensor)
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

    def _keep_elements(self, tensor: Tensor) -> None:
        parts = _parts_of(tensor)
        for part in parts or ():
            self._keep_elements(part)
        if parts is None and tensor.layout is not torch.strided:
            copied = tensor.detach().clone()
            self._undo.append(lambda: tensor.copy_(copied))
        elif parts is None and tensor.device.type != "meta":
            storage: Any = tensor.untyped_storage()
            view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            memory = view.set_(storage, 0, (storage.nbytes(),), (1,))
            key = (str(memory.device), memory.data_ptr(), memory.numel())
            if memory.numel() and key not in self._copies:
                self._copies[key] = memory, memory.to("cpu", copy=True)

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


def _parts_of(tensor: Tensor) -> list[Tensor] | None:
    """Return the tensors inside a tensor subclass such as `DTensor`; None for a plain one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    named = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for part in named if isinstance(part, Tensor)]


def _is_same_memory(tensor: Tensor, memory: Tensor) -> bool:
    if _parts_of(tensor) is not None or tensor.device != memory.device:
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
