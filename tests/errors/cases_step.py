"""Steps of your own that are not whole, and settings that they decide themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.runtime import TrainStep
from stretto.training import Evaluation, Trainer

DATA = [torch.zeros(3) for _ in range(8)]


class Own(TrainStep):
    """A step that does too little."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1)]

    def forward_backward(self, batch: Any, weight: float) -> Tensor:
        """Return what no step can learn from."""
        return torch.ones(2)

    def update(self) -> Mapping[str, float | Tensor]:
        """Do nothing."""
        return {}


class Unfinished(Own):
    """A step without optimizers."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)


def trainer(step: TrainStep | None = None, **settings: Any) -> Trainer:
    return Trainer(step or Own(), DATA, max_duration="1ep", batch_size=4, **settings)


CASES: list[tuple[str, Callable[[], object]]] = [
    ("step-without-optimizers", lambda: trainer(Unfinished())),
    ("step-and-clipping", lambda: trainer(clip_norm=1.0)),
    ("step-and-optimizer", lambda: trainer(optimizer=torch.optim.SGD([torch.zeros(1)]))),
    ("step-evaluated-without-loss", lambda: trainer(evaluate=Evaluation(DATA))),
    ("step-loss-shape", lambda: trainer().fit()),
]
