"""Going back to the moment before a step: the state of all chance, and the model's buffers.

What a forward and a backward pass change beside gradients. With both put back, a step that is done
again is to the last bit the step that would have been; without, dropout alone turns its gradient by
a quarter.
"""

from __future__ import annotations

import sys
from operator import is_
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.runtime.random_state import GENERATOR, RandomState, numpy_mark, python_mark

_ALWAYS_COPIED_BYTES = 1 << 20
"""Up to this size a buffer is copied without asking whether it has changed."""
_SEARCHES = 2
"""Number of steps before which all modules are searched for buffers: a first forward pass may
create some. A search through a thousand modules takes a millisecond."""


@final
class Rewind:
    """Saves random state and a model's buffers before a step, and restores them.

    The copies lie beside the buffers and are written over at each `take`. A large buffer, such as a
    causal mask, is copied only when it was written to. A module that has its first buffer only
    after some steps is not noticed.

    Args:
        model: whose buffers are kept.

    >>> norm = nn.BatchNorm1d(3)
    >>> rewind = Rewind(norm)
    >>> rewind.take()
    >>> _ = norm(torch.randn(8, 3))
    >>> rewind.restore()
    >>> norm.running_mean.tolist(), int(norm.num_batches_tracked)
    ([0.0, 0.0, 0.0], 0)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_device = torch.accelerator.is_available()
        self._random: RandomState | None = None
        self._torch_state: Tensor | None = None
        """Newer than the one in `_random`, whose other states still hold."""
        self._searches = 0
        self._owners: list[nn.Module] = []
        self._present: list[Tensor | None] = []
        self._buffers: list[_Buffer] = []
        self._small: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Copies and tensors of the buffers that are copied each time."""

    def take(self) -> None:
        """Save the present state."""
        if self._random is None or self._has_device or not _is_current(self._random):
            self._random = RandomState.now(self._random)
        self._torch_state = torch.default_generator.get_state()
        if self._searches < _SEARCHES:
            self._searches += 1
            self._owners = [module for module in self._model.modules() if module._buffers]
        if not self._owners:
            return
        present = [tensor for owner in self._owners for tensor in owner._buffers.values()]
        if len(present) != len(self._present) or not all(map(is_, present, self._present)):
            self._find()
            self._present = present
        for buffer in self._buffers:
            if buffer.is_large:
                buffer.take()
        copies, tensors = self._small
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(copies, tensors)  # no public spelling of it

    def restore(self) -> None:
        """Return to the last `take`; can be called repeatedly."""
        assert self._random is not None, "take() comes first"
        assert self._torch_state is not None, "it comes with the others"
        for buffer in self._buffers:
            buffer.restore()
        self._random.restore()
        torch.default_generator.set_state(self._torch_state)

    def _find(self) -> None:
        """Look at all buffers anew; copies of those that are still there are kept."""
        known = {(id(one.owner), one.name): one for one in self._buffers}
        self._buffers = []
        for owner in self._owners:
            for name, tensor in owner._buffers.items():
                buffer = known.get((id(owner), name))
                if buffer is None or buffer.tensor is not tensor:
                    buffer = _Buffer(owner, name, tensor)
                self._buffers.append(buffer)
        pairs = [
            (one.copy, one.tensor)
            for one in self._buffers
            if one.copy is not None and one.tensor is not None and not one.is_large
        ]
        self._small = [copy for copy, _ in pairs], [tensor for _, tensor in pairs]


@final
class _Buffer:
    """A buffer and its copy."""

    __slots__ = ("_version", "copy", "is_large", "name", "owner", "tensor")

    def __init__(self, owner: nn.Module, name: str, tensor: Tensor | None) -> None:
        self.owner = owner
        self.name = name
        self.tensor = tensor
        self.copy: Tensor | None = None
        """None where there is nothing to put back: no tensor, or one without a shape as yet."""
        self.is_large = False
        """Whether it is copied only when its version says that it was written to."""
        self._version = -1
        if tensor is not None and not is_lazy(tensor) and not tensor.is_inference():
            self.copy = tensor.detach().clone()
            self._version = tensor._version
            # Batch normalisation writes its statistics without raising their version.
            is_large = tensor.nbytes > _ALWAYS_COPIED_BYTES
            self.is_large = is_large and not hasattr(owner, "running_mean")

    def take(self) -> None:
        """Copy a large buffer if it was written to."""
        assert self.copy is not None, "a large one has a copy"
        assert self.tensor is not None, "as it is one of a tensor"
        if self.tensor._version != self._version:
            self.copy.copy_(self.tensor.detach())
            self._version = self.tensor._version

    def restore(self) -> None:
        """Write the copy back, and put the tensor where it was."""
        if self.tensor is not None and self.copy is not None:
            if not self.is_large or self.tensor._version != self._version:
                with torch.no_grad():
                    self.tensor.copy_(self.copy)
            self._version = self.tensor._version
        # A forward may have put another tensor in its place.
        self.owner._buffers[self.name] = self.tensor


def _is_current(state: RandomState) -> bool:
    """Return whether neither Python's generator nor NumPy's was used since; false if not known.

    It is here, and not with the state, as every step asks: no function of another file is entered.
    """
    if state.python_mark is None or state.numpy_mark is None:
        return False
    bits, mark = state.numpy_mark
    return (
        GENERATOR.gauss_next is None
        and bool(python_mark().raw == state.python_mark)
        and sys.modules["numpy"].random.get_bit_generator() is bits
        and bool(numpy_mark(bits).raw == mark)
    )
