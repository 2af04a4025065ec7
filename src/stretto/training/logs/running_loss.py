"""The mean loss between two logged lines, over all units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch

from stretto.training.checkpointing.records import number
from stretto.training.distributed.ranks import Ranks
from stretto.training.stepping.gradient import MicroLoss


@final
class RunningLoss:
    """Sums losses over their units."""

    def __init__(self) -> None:
        self._pending: list[MicroLoss] = []
        self._sum = 0.0
        self._weight = 0.0

    def add(self, losses: Sequence[MicroLoss]) -> None:
        """Add the losses of some steps without reading them."""
        self._pending += losses

    def read(self) -> None:
        """Read the added losses; this waits for the device."""
        if self._pending:
            self._sum, self._weight = _added(self._pending, self._sum, self._weight)
            self._pending = []

    def take(self) -> tuple[float, float]:
        """Return this rank's sum and weight since the last call, and reset them."""
        self.read()
        sums = self._sum, self._weight
        self._sum = self._weight = 0.0
        return sums

    def state_dict(self, ranks: Ranks) -> dict[str, float]:
        """Return the sums over all ranks. Every rank must call it."""
        self.read()
        total, weight = ranks.agree((self._sum, self._weight))
        return {"sum": total, "weight": weight}

    def load_state_dict(self, state: Mapping[str, float], ranks: Ranks) -> None:
        """Continue from saved sums, which the first rank keeps for all."""
        self._pending = []
        saved = number(state, "sum"), number(state, "weight")
        self._sum, self._weight = saved if ranks.is_first else (0.0, 0.0)


def mean_loss(losses: Sequence[MicroLoss]) -> float:
    """Return the mean loss of micro-batches over their units; nan without any."""
    total, weight = _added(losses) if losses else (0.0, 0.0)
    return total / weight if weight else float("nan")


def _added(
    losses: Sequence[MicroLoss], total: float = 0.0, weight: float = 0.0
) -> tuple[float, float]:
    """Add losses one by one, so the sum does not depend on how they are grouped."""
    values = torch.stack([micro.loss for micro in losses]).double().tolist()
    for loss, micro in zip(values, losses, strict=True):
        total += loss * micro.factor
        weight += micro.weight
    return total, weight
