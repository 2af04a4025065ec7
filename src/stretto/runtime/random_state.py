"""The state of the generators of torch, of every accelerator, of Python and of NumPy."""

from __future__ import annotations

import json
import random
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import load, save
from torch import Tensor

from stretto.runtime.packing import pack, unpack


class RandomState(NamedTuple):
    """The state of all generators that training may draw from.

    >>> state = RandomState.now()
    >>> first = torch.rand(3)
    >>> state.restore()
    >>> bool((torch.rand(3) == first).all())
    True
    """

    torch_state: Tensor
    device_states: Mapping[str, Mapping[int, Tensor]]
    """One of each device, by the kind of device and its index."""
    python_state: Any
    numpy_state: Any
    """None if NumPy has not been imported."""

    @classmethod
    def now(cls, *, devices: bool = True) -> Self:
        """Return the present state.

        Args:
            devices: whether to read the generators of accelerators too.
        """
        numpy = sys.modules.get("numpy")
        own = torch.default_generator.get_state(), device_states() if devices else {}
        of_numpy = None if numpy is None else numpy.random.get_state(legacy=False)
        return cls(*own, random.getstate(), of_numpy)

    def restore(self) -> None:
        """Restore all generators."""
        torch.default_generator.set_state(self.torch_state)
        restore_devices(self.device_states)
        random.setstate(self.python_state)
        if self.numpy_state is not None and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(self.numpy_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in types that `pack` knows; of accelerators, that of the current device.

        >>> RandomState.from_state_dict(RandomState.now().state_dict()).restore()
        """
        devices = {kind: states[_current(kind)] for kind, states in self.device_states.items()}
        state = {"torch": self.torch_state, "devices": devices, "python": self.python_state}
        return state | {"numpy": _without_arrays(self.numpy_state)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return what `state_dict` was called on; the accelerator may have another index now."""
        kind = _kind() if torch.accelerator.is_available() else None
        devices = state["devices"]
        here = {kind: {_current(kind): devices[kind]}} if kind and kind in devices else {}
        return cls(state["torch"], here, state["python"], state["numpy"])

    def to_row(self) -> Tensor:
        """Return the state as bytes, in a tensor of one dimension that may be padded with zeros.

        >>> RandomState.from_row(RandomState.now().to_row()).restore()
        """
        tensors: dict[str, Tensor] = {}
        text = json.dumps(pack(_with_words(self.state_dict()), tensors)).encode()
        record = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        content = save({**tensors, "record": record})
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    @classmethod
    def from_row(cls, row: Tensor) -> Self:
        """Return what `to_row` was called on."""
        content = bytes(row.numpy())
        size = int.from_bytes(content[:8], "little")
        ends = [entry["data_offsets"][1] for entry in json.loads(content[8 : 8 + size]).values()]
        tensors = load(content[: 8 + size + max(ends)])
        record = json.loads(bytes(tensors.pop("record").numpy()))
        return cls.from_state_dict(_without_words(unpack(record, tensors.__getitem__)))


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the state of the host's generators afterwards."""
    state = RandomState.now(devices=False)
    try:
        yield
    finally:
        state.restore()


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _with_words(state: Any) -> Any:
    """Return a state whose long sequences of numbers of 32 bits are tensors of their bytes."""
    if isinstance(state, dict):
        return {key: _with_words(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)) and len(state) > 100:
        return {"words": torch.frombuffer(bytearray(array("I", state)), dtype=torch.uint8)}
    return tuple(map(_with_words, state)) if isinstance(state, tuple) else state


def _without_words(state: Any) -> Any:
    if isinstance(state, dict):
        if state.keys() == {"words"}:
            return tuple(array("I", bytes(state["words"].numpy())))
        return {key: _without_words(value) for key, value in state.items()}
    return tuple(map(_without_words, state)) if isinstance(state, tuple) else state


def device_states() -> dict[str, dict[int, Tensor]]:
    """Return the states of the accelerators that are in use; asking others would start them."""
    if not torch.accelerator.is_available():
        return {}
    kind = _kind()
    module = torch.get_device_module(kind)
    if not getattr(module, "is_initialized", lambda: True)():
        return {}
    if kind == "mps":
        return {kind: {0: module.get_rng_state()}}
    return {kind: {at: module.get_rng_state(at) for at in range(module.device_count())}}


def restore_devices(states: Mapping[str, Mapping[int, Tensor]]) -> None:
    """Restore what `device_states` returned."""
    for kind, each in states.items():
        module = torch.get_device_module(kind)
        for index, state in each.items():
            if kind == "mps":
                module.set_rng_state(state)
            else:
                module.set_rng_state(state, index)


def _kind() -> str:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "there is one"
    return accelerator.type


def _current(kind: str) -> int:
    index: int = 0 if kind == "mps" else torch.get_device_module(kind).current_device()
    return index
