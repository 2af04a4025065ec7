"""Undoes what a pass has done to a model's buffers and to torch's random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.runtime.random_state import device_states, restore_devices

_ALWAYS_COPIED_BYTES = 1 << 20
"""Up to this size a buffer is copied without asking whether it has changed."""
_SEARCHES = 2
"""Number of steps before which all modules are searched for buffers: a first forward pass may
create some. A search through a thousand modules takes a millisecond."""


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore a model's buffers and torch's random state after a pass that must not count.

    >>> norm = nn.BatchNorm1d(3)
    >>> with kept_buffers(norm):
    ...     _ = norm(torch.randn(8, 3))
    >>> int(norm.num_batches_tracked)
    0
    """
    rewind = Rewind(model)
    rewind.save()
    try:
        yield
    finally:
        rewind.restore()


@final
class Rewind:
    """Saves torch's random state and a model's buffers before a step, and restores them.

    The generators of Python and NumPy are left alone: reading them would take longer than a small
    step. The copies lie beside the buffers and are overwritten at each `save`. A large buffer, such
    as a causal mask, is copied only when it was written to. A module that has its first buffer only
    after some steps is not noticed.

    Args:
        model: whose buffers are kept.

    >>> norm = nn.BatchNorm1d(3)
    >>> rewind = Rewind(norm)
    >>> rewind.save()
    >>> _ = norm(torch.randn(8, 3))
    >>> rewind.restore()
    >>> norm.running_mean.tolist(), int(norm.num_batches_tracked)
    ([0.0, 0.0, 0.0], 0)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_device = torch.accelerator.is_available()
        self._random = torch.default_generator.get_state()
        self._devices: dict[str, dict[int, Tensor]] = {}
        self._searches = 0
        self._owners: list[nn.Module] = []
        self._buffers: list[_Buffer] = []
        self._copies: list[Tensor] = []
        """Copies of the small buffers, which are overwritten each time."""
        self._tensors: list[Tensor] = []
        """These small buffers."""

    def save(self) -> None:
        """Save the present state."""
        self._random = torch.default_generator.get_state()
        if self._has_device:
            self._devices = device_states()
        if self._searches < _SEARCHES:
            self._searches += 1
            self._owners = [module for module in self._model.modules() if module._buffers]
        if not self._owners:
            return
        present = [tensor for owner in self._owners for tensor in owner._buffers.values()]
        known = [buffer.tensor for buffer in self._buffers]
        if len(present) != len(known) or not all(map(is_, present, known)):
            self._find()
        for buffer in self._buffers:
            if buffer.is_large:
                buffer.save()
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._tensors)  # no public spelling of it

    def restore(self) -> None:
        """Return to the last `save`; can be called repeatedly."""
        for buffer in self._buffers:
            buffer.restore()
        restore_devices(self._devices)
        torch.default_generator.set_state(self._random)

    def _find(self) -> None:
        """Find all buffers again; copies of those that are still there are kept."""
        known = {(id(buffer.owner), buffer.name): buffer for buffer in self._buffers}
        self._buffers, self._copies, self._tensors = [], [], []
        for owner in self._owners:
            for name, tensor in owner._buffers.items():
                buffer = known.get((id(owner), name))
                if buffer is None or buffer.tensor is not tensor:
                    buffer = _Buffer(owner, name, tensor)
                self._buffers.append(buffer)
                if tensor is not None and buffer.copy is not None and not buffer.is_large:
                    self._copies.append(buffer.copy)
                    self._tensors.append(tensor)


@final
class _Buffer:
    """A buffer and its copy."""

    __slots__ = ("_version", "copy", "is_large", "name", "owner", "tensor")

    def __init__(self, owner: nn.Module, name: str, tensor: Tensor | None) -> None:
        self.owner, self.name, self.tensor = owner, name, tensor
        self.copy: Tensor | None = None
        """None if there is nothing to restore: no tensor, or one without a shape."""
        self.is_large = False
        """Whether it is copied only when its version says that it was written to."""
        self._version = -1
        if tensor is not None and not is_lazy(tensor) and not tensor.is_inference():
            self.copy, self._version = tensor.detach().clone(), tensor._version
            # Batch normalisation writes its statistics without raising their version.
            is_large = tensor.nbytes > _ALWAYS_COPIED_BYTES
            self.is_large = is_large and not hasattr(owner, "running_mean")

    def save(self) -> None:
        """Copy a large buffer if it was written to."""
        assert self.copy is not None, "a large one has a copy"
        assert self.tensor is not None, "a copy is of a tensor"
        if self.tensor._version != self._version:
            self.copy.copy_(self.tensor.detach())
            self._version = self.tensor._version

    def restore(self) -> None:
        """Write the copy back, and restore the tensor itself."""
        if self.tensor is not None and self.copy is not None:
            if not self.is_large or self.tensor._version != self._version:
                with torch.no_grad():
                    self.tensor.copy_(self.copy)
            self._version = self.tensor._version
        # A forward pass may have replaced the tensor.
        self.owner._buffers[self.name] = self.tensor
