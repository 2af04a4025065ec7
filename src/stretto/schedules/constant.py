"""`Constant`: a constant factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from stretto.schedules.arguments import factor
from stretto.schedules.schedule import BoundSchedule, fill
from stretto.schedules.scope import Span
from stretto.schedules.warmup import WarmedUp, set_warmup, warmup_text
from stretto.timing import Time, TimeLike, Timestamp


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Constant(WarmedUp):
    """A constant factor, after an optional warm-up.

    Formula: `value`. Source: `torch.optim.lr_scheduler.ConstantLR`; with a warm-up, transformers'
    `get_constant_schedule_with_warmup`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = Constant(warmup="4ba").bind(Horizon("10ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]

    Args:
        value: the factor.
        warmup: rise from `warmup_start` to the value over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: a factor is not finite or is negative, or a time is negative.
        TimeError: a text is not a time.
    """

    value: float

    def __init__(
        self, value: float = 1.0, *, warmup: TimeLike | None = None, warmup_start: float = 0.0
    ) -> None:
        fill(self, value=factor(value, "value"))
        set_warmup(self, warmup, warmup_start)

    def own_times(self) -> tuple[Time, ...]:
        """Return no times: only the warm-up has one."""
        return ()

    def first_factor(self) -> float:
        """Return the factor."""
        return self.value

    def over_rest(self, span: Span) -> BoundSchedule:  # noqa: ARG002 (the same everywhere)
        """Return the factor as a function of the timestamp."""
        constant = self.value

        def value(timestamp: Timestamp) -> float:  # noqa: ARG001
            return constant

        return value

    def __str__(self) -> str:
        return f"constant {self.value:g}{warmup_text(self.warmup, self.warmup_start)}"
