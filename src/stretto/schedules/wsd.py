"""`WSD`: warm-up, stable, decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final, get_args

from stretto.schedules.curves import Cosine, Curve, Linear
from stretto.schedules.fields import Factor, Length, check_fields, one_of
from stretto.schedules.periods import Periods
from stretto.schedules.schedule import Constant, Schedule, warmup_text
from stretto.schedules.scope import BoundSchedule, Scope
from stretto.timing import Time

DecayShape: TypeAlias = Literal["linear", "cosine", "1-sqrt", "exponential"]
"""The decays of `WSD`: `1 - x`, `(1 + cos(pi * x)) / 2`, `1 - sqrt(x)` or `2 ** (1 - x) - 1`."""

_LEFT: Mapping[str, Callable[[float], float]] = {
    "1-sqrt": lambda passed: 1.0 - math.sqrt(passed),
    "exponential": lambda passed: math.pow(2.0, 1.0 - passed) - 1.0,
}


@final
@dataclass(frozen=True, slots=True, repr=False)
class WSD(Schedule):
    """Warm-up, stable at 1, then decay at the end of the run.

    The three are periods of one run, so `warmup="5%"` and `decay="20%"` are both fractions of the
    whole run: `Periods([("5%", Linear(0, 1)), ("rest", 1), ("20%", Linear(1, 0))])`.

    Formula: 1 until the decay, then `end + (1 - end) * shape(x)`, where `x` in [0, 1] is the
    elapsed fraction of the decay. Source: Hu et al. 2024, MiniCPM (arXiv 2404.06395), for the
    three stages; Hägele et al. 2024 (arXiv 2405.18392) for the shape `1-sqrt`; Megatron-LM's
    `--lr-wsd-decay-style` for `exponential`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = WSD("20%", warmup="5%").bind(Horizon("100ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 1, 5, 80, 90, 100)]
    [0.0, 0.2, 1.0, 1.0, 0.5, 0.0]

    Args:
        decay: the duration of the decay, which ends with the run.
        end: the last factor.
        shape: how the factor falls.
        warmup: rise from `warmup_start` to 1 over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: a factor is not finite or is negative, a time is negative, or there is no
            such shape; at binding, warm-up and decay are together longer than the run.
        TimeError: a text is not a time.
    """

    decay: Length
    end: Factor = 0.0
    shape: DecayShape = field(default="linear", kw_only=True)
    warmup: Length | None = field(default=None, kw_only=True)
    warmup_start: Factor = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        one_of(self.shape, "shape", get_args(DecayShape))

    def times(self) -> tuple[Time, ...]:
        """Return the times that must be placed on one axis."""
        return self._periods().times()

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over `scope` as a function of the timestamp.

        Raises:
            ConversionError: a time needs a fact that is not known; the message names it.
            ScheduleError: warm-up and decay are together longer than the scope.
        """
        return self._periods().within(scope)

    def _periods(self) -> Periods:
        rise = [] if self.warmup is None else [(self.warmup, Linear(self.warmup_start, 1.0))]
        return Periods([*rise, ("rest", Constant()), (self.decay, self._fall())])

    def _fall(self) -> Schedule:
        if self.shape == "linear":
            return Linear(1.0, self.end)
        if self.shape == "cosine":
            return Cosine(1.0, self.end)
        end, left = self.end, _LEFT[self.shape]
        return Curve(lambda passed: end + (1.0 - end) * left(passed))

    def __str__(self) -> str:
        warmup = warmup_text(self.warmup, self.warmup_start)
        return f"constant 1, then {self.shape} to {self.end:g} over the last {self.decay}{warmup}"
