"""What one step computed on one rank."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MicroLoss(NamedTuple):
    """The loss of one micro-batch: its sum over units is `loss * factor`, its units `weight`."""

    loss: Tensor
    factor: float
    weight: float


class Gradient(NamedTuple):
    """What one step computed on this rank."""

    losses: list[MicroLoss]
    units: int
    """Units of this rank, where they are summed over ranks; else 0."""
    tokens: int | None
    """Tokens of this rank, where the batches were changed on their way; else the loader knows."""
    num_micro_batches: int
    """Into how many the step was cut on this rank: more than the loader made if memory ran out."""
