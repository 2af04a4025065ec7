"""Remembered outcomes: the same tensors, and never in the place of a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.memory.fakes import FakeWorld
from stretto.memory.shortcuts import Shortcuts

aten = torch.ops.aten


class Twice:
    """Calls an operation twice through shortcuts, and says how often it was run."""

    def __init__(self) -> None:
        self.world = FakeWorld()
        self.shortcuts = Shortcuts(self.world.mode)
        self.runs = 0

    def __call__(self, func: Any, make: Callable[[], list[Any]]) -> tuple[Any, Any]:
        results = []
        with self.world.mode:
            for _ in range(2):
                args = make()

                def run(args: list[Any] = args) -> Any:
                    self.runs += 1
                    return func(*args)

                results.append((args, self.shortcuts.call(func, args, {}, run)))
        (_, first), (args, second) = results
        storages = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
        self.shares = second.untyped_storage()._cdata in storages
        return first, second


@pytest.mark.parametrize(
    ("func", "make"),
    [
        (aten.mul.Tensor, lambda: [torch.empty(4, 1), torch.empty(3)]),
        (aten.mm.default, lambda: [torch.empty(2, 3).bfloat16(), torch.empty(3, 5).bfloat16()]),
        (aten.clone.default, lambda: [torch.empty(4, 3).t()]),
        (aten.cat.default, lambda: [[torch.empty(4, 3), torch.empty(2, 3)]]),
    ],
    ids=["mul", "mm", "clone", "cat"],
)
def test_the_second_is_not_run(func: Any, make: Callable[[], list[Any]]) -> None:
    twice = Twice()
    first, second = twice(func, make)
    assert twice.runs == 1
    assert not twice.shares
    for what in ("shape", "dtype", "device", "layout"):
        assert getattr(first, what) == getattr(second, what)
    assert first.stride() == second.stride()
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("func", "make"),
    [
        (aten.view.default, lambda: [torch.empty(4, 3), [12]]),
        (aten._unsafe_view.default, lambda: [torch.empty(4, 3), [12]]),
        (aten.add_.Tensor, lambda: [torch.empty(4, 3), 1]),
        (aten.detach.default, lambda: [torch.empty(4, 3)]),
    ],
    ids=["view", "unsafe view", "in place", "detach"],
)
def test_what_shares_memory_is_run(func: Any, make: Callable[[], list[Any]]) -> None:
    twice = Twice()
    twice(func, make)
    assert twice.runs == 2
    assert twice.shares


def test_values_of_counts_are_not_lost() -> None:
    twice = Twice()
    _, second = twice(aten.add.Tensor, lambda: [torch.tensor(1.0), 1])
    assert twice.runs == 2
    assert second.item() == 2.0
