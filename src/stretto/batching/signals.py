"""What a step measured, for policies that follow it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from stretto.errors import BatchSizeError, shown


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What the last step measured; None for what it did not.

    Any value may be nan or infinite: a policy must still decide.

    >>> Signals(loss=2.5).metric is None
    True

    Raises:
        BatchSizeError: a value is not a number.
    """

    loss: float | None = None
    """The mean loss of the last batch."""
    metric: float | None = None
    """The metric of the last evaluation, if there was one since the last batch."""
    noise_numerator: float | None = None
    """An unbiased estimate of tr(Sigma), the variance of a sample's gradient."""
    noise_denominator: float | None = None
    """An unbiased estimate of |G|^2, the squared norm of the true gradient."""
    num_samples: float | None = None
    """The samples of that batch, which weight its noise beside that of other batches. If you leave
    it out, the loader fills it in."""

    def __post_init__(self) -> None:
        # NumPy numbers and tensors become floats: a checkpoint could not store them.
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and type(value) is not float:
                object.__setattr__(self, name, _as_signal(name, value))


def as_float(value: float) -> float:
    """Return a number of any library as a float; too large ones become infinite.

    >>> as_float(3), as_float(-(10**400))
    (3.0, -inf)
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _as_signal(name: str, value: object) -> float:
    try:
        return as_float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements
        raise BatchSizeError.cannot(
            f"decide by the signal {name}={shown(value)}",
            why="it is not a number",
            instead="pass a number, or leave it out where nothing was measured",
        ) from None


NO_SIGNALS = Signals()
"""No measurement: the input of static policies, which ignore signals."""
