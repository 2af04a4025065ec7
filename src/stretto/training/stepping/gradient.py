"""The result of one step on one rank."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MicroLoss(NamedTuple):
    """The loss of one micro-batch: its sum over units is `loss * factor`, its units `weight`."""

    loss: Tensor
    factor: float
    weight: float


class Gradient(NamedTuple):
    """The result of one step on this rank; the gradient itself is in the parameters."""

    losses: list[MicroLoss]
    units: int
    """Units of this rank if they are summed over ranks later; otherwise 0."""
    tokens: int | None
    """Tokens of this rank if a callback changed the batches; None: the loader has counted them."""
    num_micro_batches: int
    """Micro-batches of this rank; more than the loader made if memory ran out."""
