"""Errors of runs in loops that are not stretto's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stretto.training import Run, prepare


def make() -> Run:
    return prepare(list(range(20)), 4, max_duration="1ep")


def bound(*groups: list[torch.Tensor]) -> Run:
    return make().bind(optimizer(*groups))


def optimizer(*groups: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": one} for one in groups or ([torch.zeros(1)],)], lr=0.1)


def other_groups() -> object:
    return bound().bind(optimizer([torch.zeros(1)], [torch.zeros(1)]))


def finished_late() -> object:
    run = bound()
    first = run.begin()
    run.finish()
    run.begin()
    return run.finish(step=first)


CASES: list[tuple[str, Callable[[], object]]] = [
    ("run-other-groups", other_groups),
    ("run-other-state", lambda: make().load_state_dict({"version": 2})),
    ("run-finished-late", finished_late),
]
