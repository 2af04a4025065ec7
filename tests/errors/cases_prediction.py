"""Steps whose memory cannot be told in the way that was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stretto.memory import predict
from stretto.memory.prediction.fit import fit
from stretto.memory.prediction.recording import Allocation, Event, Place, Recording
from stretto.runtime import SupervisedStep


def _predict(model: nn.Module, loss: Callable[[Any, Any], Tensor]) -> object:
    optimizer = torch.optim.SGD(model.parameters())
    return predict(SupervisedStep(model, optimizer, loss), lambda size: torch.ones(size, 4))


def _locked() -> nn.Module:
    model = nn.Linear(4, 1)
    model.lock = threading.Lock()  # type: ignore[assignment]
    return model


def _through_numpy(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum() * float(batch.numpy().sum())


def _different() -> object:
    place = Place("forward", "layers.0")
    recordings = []
    for size in (2, 3):
        count = size**9
        both = [Allocation(count, place, "activations", "op")] * size
        events = [Event(index, is_free=False, place=place) for index in range(size)]
        recordings.append(Recording(size, both, events))
    return fit(recordings)


CASES: list[tuple[str, Callable[[], object]]] = [
    ("prediction-copy", lambda: _predict(_locked(), lambda m, x: m(x).sum())),
    ("prediction-follow", lambda: _predict(nn.Linear(4, 1), _through_numpy)),
    (
        "prediction-lstm",
        lambda: _predict(nn.LSTM(4, 2), lambda m, x: m(x.unsqueeze(0))[0].sum()),
    ),
    ("prediction-different", _different),
]
