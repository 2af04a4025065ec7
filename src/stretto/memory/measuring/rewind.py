"""Going back to the moment before a step: the state of all chance, and the model's buffers.

What a forward and a backward pass change beside gradients. With both put back, a step that is done
again is to the last bit the step that would have been; without, dropout alone turns its gradient by
a quarter.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from operator import is_
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_ALWAYS_COPIED_BYTES = 1 << 20
"""Up to this size a buffer is copied without asking whether it has changed."""
_MT19937_BYTES = 625 * 4
"""The memory of Python's generator and of NumPy's usual one: 624 words and a position."""
_SEARCHES = 2
"""Number of steps before which all modules are searched for buffers: a first forward pass may
create some. A search through a thousand modules takes a millisecond."""


class RandomState(NamedTuple):
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
    python_memory: bytes | None = None
    """The memory of Python's generator; equal memory means an equal state. None: not known."""
    numpy_memory: bytes | None = None
    """The same for NumPy's generator."""

    @classmethod
    def now(cls, before: RandomState | None = None) -> Self:
        """Return the state of now.

        Args:
            before: an earlier state. A generator that was not used since keeps its state from
                there: comparing memory takes 0.3 us, reading a state 13 us (Python) or 85 (NumPy).
        """
        python, numpy = _python_memory(), _numpy_memory()
        if before is not None and python is not None and python == before.python_memory:
            python_state = before.python_state
        else:
            python_state = random.getstate()
        if before is not None and numpy is not None and numpy == before.numpy_memory:
            numpy_state = before.numpy_state
        else:
            numpy_state = _numpy_state()
            # The second of a pair of normal numbers is kept outside that memory.
            numpy = None if numpy_state is None or numpy_state.get("has_gauss") else numpy
        devices = _device_states() if torch.accelerator.is_available() else {}
        torch_state = torch.default_generator.get_state()
        return cls(torch_state, devices, python_state, numpy_state, python, numpy)

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
        self._random: RandomState | None = None
        self._searches = 0
        self._owners: list[nn.Module] = []
        self._present: list[Tensor | None] = []
        self._buffers: list[_Buffer] = []
        self._small: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Copies and tensors of the buffers that are copied each time."""

    def take(self) -> None:
        """Take note of the state of now."""
        self._random = RandomState.now(self._random)
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
        """Go back to the last `take`; may be called again and again."""
        assert self._random is not None, "take() comes first"
        for buffer in self._buffers:
            buffer.restore()
        self._random.restore()

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


def _python_memory() -> bytes | None:
    """The memory of Python's generator; None if it does not hold all of the state."""
    words = _python_words()
    if words is None or _GENERATOR.gauss_next is not None:
        return None  # the second of a pair of normal numbers is kept elsewhere
    memory: bytes = words.raw
    return memory


_GENERATOR: Any = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of `random`."""


@cache
def _python_words() -> Any:
    """Where CPython keeps the words of its generator; None if they are not there."""
    start = object.__basicsize__
    if start + _MT19937_BYTES > type(_GENERATOR).__basicsize__:
        return None
    words = (ctypes.c_char * _MT19937_BYTES).from_address(id(_GENERATOR) + start)
    *numbers, position = random.getstate()[1]
    return words if words.raw == struct.pack("625I", position, *numbers) else None


def _numpy_memory() -> bytes | None:
    """The memory of NumPy's generator; None if NumPy is not imported or uses another generator."""
    numpy = sys.modules.get("numpy")
    get = None if numpy is None else getattr(numpy.random, "get_bit_generator", None)
    bits = None if get is None else get()
    if numpy is None or bits is None or type(bits) is not numpy.random.MT19937:
        return None
    memory: bytes = _numpy_words(bits).raw
    return memory


@lru_cache(maxsize=1)
def _numpy_words(bits: Any) -> Any:
    return (ctypes.c_char * _MT19937_BYTES).from_address(bits.ctypes.state_address)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state(legacy=False)


def _device_states() -> dict[str, tuple[Tensor, ...]]:
    """The states of the accelerators, by kind, that have begun to work."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "there is one"
    module = torch.get_device_module(kind)
    if not getattr(module, "is_initialized", lambda: True)():
        return {}
    if kind.type == "mps":
        return {"mps": (module.get_rng_state(),)}
    states = [module.get_rng_state(index) for index in range(module.device_count())]
    return {kind.type: tuple(states)}
