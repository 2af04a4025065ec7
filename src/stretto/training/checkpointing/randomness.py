"""The state of the generators of torch, Python and NumPy in this process."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """Return the state of every generator that training may draw from, as JSON."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(numbers), gauss],
    }
    kind, module = _accelerator()
    # One that was not used yet has no state; asking would start it, in a run on the CPU too.
    if module is not None and getattr(module, "is_initialized", lambda: True)():
        state[kind] = _text(module.get_rng_state())
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        state["numpy"] = [name, keys.tolist(), *rest]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back as `random_state` found them."""
    torch.set_rng_state(_tensor(state["torch"]))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, module = _accelerator()
    if module is not None and kind in state:
        module.set_rng_state(_tensor(state[kind]))
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _accelerator() -> tuple[str, Any]:
    """The kind of the accelerator there is, and its module; None without one."""
    if not torch.accelerator.is_available():
        return "cpu", None
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return kind.type, torch.get_device_module(kind)


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
