"""Going back to the moment before a step: the state of all chance, and the model's buffers.

What a forward and a backward pass change beside gradients. With both put back, a step that is done
again is to the last bit the step that would have been; without, dropout alone turns its gradient by
a quarter.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor, nn

_ALWAYS_COPIED_BYTES = 1 << 20
"""Up to this size a buffer is copied without asking whether it has changed."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """The state of the generators of torch, of every accelerator, of Python and of NumPy.

    >>> state = RandomState.now()
    >>> first = torch.rand(3)
    >>> state.restore()
    >>> bool((torch.rand(3) == first).all())
    True
    """

    torch_state: Tensor
    device_states: Mapping[str, tuple[Tensor, ...]]
    """One of each device, by the kind of device."""
    python_state: Any
    numpy_state: Any
    """None while nobody has imported NumPy."""

    @classmethod
    def now(cls) -> Self:
        """Return the state of now."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(),
            {kind: _device_states(kind) for kind in _kinds()},
            random.getstate(),
            None if numpy is None else numpy.random.get_state(legacy=False),
        )

    def restore(self) -> None:
        """Put all generators back."""
        torch.set_rng_state(self.torch_state)
        for kind, states in self.device_states.items():
            module = torch.get_device_module(kind)
            for index, state in enumerate(states):
                if kind == "mps":
                    module.set_rng_state(state)
                else:
                    module.set_rng_state(state, index)
        random.setstate(self.python_state)
        if self.numpy_state is not None:
            sys.modules["numpy"].random.set_state(self.numpy_state)


@final
class Rewind:
    """Takes note of the random state and of a model's buffers before a step, to go back to them.

    The copies lie beside the buffers and are written over at each `take`. A large buffer, such as a
    causal mask, is copied only when it was written to.

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
        self._random: RandomState | None = None
        self._buffers: list[_Buffer] = []

    def take(self) -> None:
        """Take note of the state of now."""
        self._random = RandomState.now()
        known = {id(buffer.tensor): buffer for buffer in self._buffers}
        self._buffers = []
        for owner, name, tensor in _buffers(self._model):
            buffer = known.get(id(tensor))
            if buffer is None or buffer.owner is not owner or buffer.name != name:
                buffer = _Buffer(owner, name, tensor)
            self._buffers.append(buffer)
            buffer.take()

    def restore(self) -> None:
        """Go back to the last `take`; may be called again and again."""
        assert self._random is not None, "take() comes first"
        for buffer in self._buffers:
            buffer.restore()
        self._random.restore()


@final
class _Buffer:
    """A buffer and its copy."""

    __slots__ = ("_copy", "_version", "name", "owner", "tensor")

    def __init__(self, owner: nn.Module, name: str, tensor: Tensor) -> None:
        self.owner = owner
        self.name = name
        self.tensor = tensor
        self._copy: Tensor | None = None
        self._version = -1

    def take(self) -> None:
        if self._copy is None:
            self._copy = self.tensor.detach().clone()
        elif self._may_have_changed() or self.tensor._version != self._version:
            self._copy.copy_(self.tensor.detach())
        self._version = self.tensor._version

    def restore(self) -> None:
        assert self._copy is not None, "taken when it was found"
        if self._may_have_changed() or self.tensor._version != self._version:
            with torch.no_grad():
                self.tensor.copy_(self._copy)
            self._version = self.tensor._version
        # A forward may have put another tensor in its place.
        self.owner._buffers[self.name] = self.tensor

    def _may_have_changed(self) -> bool:
        # Batch normalisation writes its statistics without raising their version.
        small = self.tensor.nbytes <= _ALWAYS_COPIED_BYTES
        return small or hasattr(self.owner, "running_mean")


def _buffers(model: nn.Module) -> Iterable[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None:
                yield module, name, tensor


def _kinds() -> list[str]:
    """The kinds of accelerators that have begun to work."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "there is one"
    begun = getattr(torch.get_device_module(kind), "is_initialized", lambda: True)()
    return [kind.type] if begun else []


def _device_states(kind: str) -> tuple[Tensor, ...]:
    module = torch.get_device_module(kind)
    if kind == "mps":
        return (module.get_rng_state(),)
    return tuple(module.get_rng_state(index) for index in range(module.device_count()))
