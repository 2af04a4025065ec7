"""`InverseSqrt`: decay with the square root of time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

from stretto.errors import ScheduleError
from stretto.schedules.fields import Factor, Interval, Length, check_fields
from stretto.schedules.glide import Rise, after_warmup
from stretto.schedules.intervals import BEYOND
from stretto.schedules.schedule import Schedule, warmup_text
from stretto.schedules.scope import BoundSchedule, Scope, Span, integers
from stretto.timing import Time, Timestamp


@final
@dataclass(frozen=True, slots=True, repr=False)
class InverseSqrt(Schedule):
    """Decay with the square root of time; needs no end of the run.

    Formula: `max(floor, end + (1 - end) * sqrt(s / (s + t)))`, where `t` is the time since the
    warm-up and `s` is the time scale; with `s` equal to the warm-up `w`, the root is
    `sqrt(w / time)`. Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 3; transformers'
    `get_inverse_sqrt_schedule`. Megatron and Levanter have a `floor` (`min_lr`), OLMo-core an
    `end` (`alpha_f`).

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = InverseSqrt(warmup="4ba").bind(Horizon("64ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 2, 4, 16, 64)]
    [0.0, 0.5, 1.0, 0.5, 0.25]

    Args:
        timescale: the time scale; by default, as long as the warm-up.
        end: the factor that the decay tends to.
        floor: the smallest factor after the warm-up; the decay stops there.
        warmup: rise from `warmup_start` to 1 over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: there is neither a time scale nor a warm-up, one is not positive, a factor is
            not finite or is negative, or the floor is above 1.
        TimeError: a text is not a time.
    """

    timescale: Interval | None = None
    end: Factor = field(default=0.0, kw_only=True)
    floor: Factor = field(default=0.0, kw_only=True)
    warmup: Length | None = field(default=None, kw_only=True)
    warmup_start: Factor = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.floor > 1:
            raise ScheduleError.cannot(
                f"use floor={self.floor:g}",
                why="the decay begins at 1",
                instead="write a number from 0 to 1 such as 0.1",
            )
        if not (self.timescale or self.warmup):
            raise ScheduleError.cannot(
                "decay with the inverse square root of time",
                why="there is neither a warm-up nor a time scale to measure it by",
                instead="write InverseSqrt(warmup='1000ba') or InverseSqrt('1000ba')",
            )

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over `scope` as a function of the timestamp."""
        span = scope.span(self.times())

        def decay(rest: Span) -> BoundSchedule:
            # Without a time scale, the length of the warm-up counts: all before `rest`.
            timescale = rest.start - span.start
            if self.timescale is not None:
                timescale = rest.length(Time(self.timescale))
            stop = rest.start + BEYOND if rest.end is None else rest.end
            scale, first, unit, last = integers(rest.start, timescale, stop)
            # A fraction of a period of length 0 is 0. Any unit will do, since no time passes.
            read, unit, last = rest.smooth().axis.read, max(unit, 1), last - first
            end, fall, floor = self.end, 1.0 - self.end, self.floor

            def value(timestamp: Timestamp) -> float:
                passed = read(timestamp) * scale - first
                if passed <= 0:
                    return 1.0
                left = math.sqrt(unit / (unit + (passed if passed < last else last)))
                return max(floor, end + fall * left)

            return value

        if self.warmup is None:
            return decay(span)
        return after_warmup(span, Rise(Time(self.warmup), self.warmup_start, 1.0), decay)

    def __str__(self) -> str:
        scale = "" if self.timescale is None else f" on the scale of {self.timescale}"
        warmup = warmup_text(self.warmup, self.warmup_start)
        end = f" to {self.end:g}" if self.end else ""
        floor = f", at least {self.floor:g}" if self.floor else ""
        return f"inverse square root of time{scale}{end}{floor}{warmup}"
