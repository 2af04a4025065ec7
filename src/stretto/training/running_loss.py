"""The loss between two logs: one mean over every unit that was seen, whatever the batches were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch

from stretto.training.ranks import Ranks
from stretto.training.records import number
from stretto.training.stepper import MicroLoss

_FOLD = 256
"""Losses kept as tensors before they are read: reading one waits for the device."""


@final
class RunningLoss:
    """Sums losses without waiting for the device; reads them when they are asked for."""

    def __init__(self) -> None:
        self._pending: list[MicroLoss] = []
        self._sum = 0.0
        self._weight = 0.0
        self.units = 0.0
        """What the mean that was taken last is over: samples, or target tokens."""

    def add(self, losses: Sequence[MicroLoss]) -> None:
        """Take the losses of one step."""
        self._pending += losses
        if len(self._pending) >= _FOLD:
            self._fold()

    def take(self, ranks: Ranks) -> float:
        """Return the mean over all ranks since the last call, and begin anew; nan if nothing came.

        Every rank must call it.
        """
        self._fold()
        total, weight = ranks.agree((self._sum, self._weight))
        self._sum = self._weight = 0.0
        self.units = weight
        return total / weight if weight else float("nan")

    def state_dict(self, ranks: Ranks) -> dict[str, float]:
        """Return the sums over all ranks. Every rank must call it."""
        self._fold()
        total, weight = ranks.agree((self._sum, self._weight))
        return {"sum": total, "weight": weight}

    def load_state_dict(self, state: Mapping[str, float], ranks: Ranks) -> None:
        """Continue from saved sums, which the first rank takes over for all."""
        self._pending = []
        saved = number(state, "sum"), number(state, "weight")
        self._sum, self._weight = saved if ranks.is_first else (0.0, 0.0)

    def _fold(self) -> None:
        if self._pending:
            losses = torch.stack([micro.loss for micro in self._pending]).double().tolist()
            for loss, micro in zip(losses, self._pending, strict=True):
                self._sum += loss * micro.factor
                self._weight += micro.weight
            self._pending = []
