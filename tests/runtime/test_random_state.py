"""The state of generators, accelerators' too."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stretto.runtime.packing import pack, unpack
from stretto.runtime.random_state import RandomState


def saved_state() -> dict[str, Any]:
    saved: dict[str, Any] = json.loads(json.dumps(pack(RandomState.now().state_dict())))
    return saved


def restore(saved: dict[str, Any]) -> None:
    RandomState.from_state_dict(unpack(saved)).restore()


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


def test_generators_go_on_where_they_were() -> None:
    state = saved_state()
    drawn = draw()
    restore(state)
    assert draw() == drawn


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_an_accelerator_has_a_generator_of_its_own(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Any = SimpleNamespace(state=torch.arange(9, dtype=torch.uint8), is_in_use=False)
    device.is_initialized = lambda: device.is_in_use
    device.device_count = lambda: 1
    device.current_device = lambda: 0
    device.get_rng_state = lambda *_: device.state
    device.set_rng_state = lambda state, *_: setattr(device, "state", state)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type=kind)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    assert not saved_state()["devices"]  # nor is it started by asking
    device.is_in_use = True
    state = saved_state()
    device.state = torch.zeros(9, dtype=torch.uint8)
    restore(state)
    assert torch.equal(device.state, torch.arange(9, dtype=torch.uint8))


def test_a_state_of_an_accelerator_that_is_not_here_is_left_alone() -> None:
    restore({**saved_state(), "devices": {"tpu": "AAAA"}})
