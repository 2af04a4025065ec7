"""`CosineRestarts`: cosine decay that starts anew."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import final

from stretto.errors import ScheduleError, shown
from stretto.schedules.fields import Factor, Interval, check_fields
from stretto.schedules.glide import cosine_left
from stretto.schedules.intervals import BEYOND
from stretto.schedules.schedule import WarmedUp
from stretto.schedules.scope import BoundSchedule, Span, integers
from stretto.timing import Time, Timestamp


@final
@dataclass(frozen=True, slots=True, repr=False)
class CosineRestarts(WarmedUp):
    """Cosine decay from `start` to `end` that starts anew, each cycle `multiplier` times as long.

    Formula: `end + (start - end) * (1 + cos(pi * t / t_i)) / 2`, where `t` is the time since the
    last restart and cycle `i` is `t_i = t_0 * multiplier ** i` long. Source: Loshchilov and Hutter
    2017, SGDR (arXiv 1608.03983), equation 5, with `T_mult` an integer as there;
    `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = CosineRestarts("4ba", 2).bind(Horizon("12ba"))
    >>> [round(factor(Timestamp(batch=batch)), 4) for batch in (0, 2, 3, 4, 8, 12)]
    [1.0, 0.5, 0.1464, 1.0, 0.5, 0.0]

    Args:
        t_0: the length of the first cycle.
        multiplier: how many times as long each cycle is as the one before; an integer from 1.
        start: the factor at each restart.
        end: the factor that each cycle falls to.
        warmup: rise from `warmup_start` to `start` over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: a factor is not finite or is negative, `t_0` is not positive, or the
            multiplier is not an integer of at least 1.
        TimeError: a text is not a time.
    """

    t_0: Interval
    multiplier: int = 1
    start: Factor = field(default=1.0, kw_only=True)
    end: Factor = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        if type(self.multiplier) is not int or self.multiplier < 1:
            raise ScheduleError.cannot(
                f"use multiplier={shown(self.multiplier)}",
                why="it is not an integer of at least 1",
                instead="write 1 for cycles of one length, 2 to double them",
            )

    def first_factor(self) -> float:
        """Return the factor at each restart."""
        return self.start

    def over_rest(self, span: Span) -> BoundSchedule:
        """Return the cycles from the start of `span` on."""
        t_0 = Time(self.t_0)
        own = span.along(t_0.unit).smooth()
        end = own.start + BEYOND if own.end is None else own.end
        scale, first, cycle, last = integers(own.start, own.length(t_0), end)
        # A fraction of a period of length 0 is 0. Any cycle will do, since none ever starts.
        read, cycle, last = own.axis.read, max(cycle, 1), last - first
        is_even, starts, lengths = self.multiplier == 1, *_cycles(cycle, self.multiplier, last)
        top, bottom, fall = self.start, self.end, self.start - self.end
        low, high = min(top, bottom), max(top, bottom)

        def at(passed: int) -> float:
            if is_even:
                part = passed % cycle / cycle
            else:
                number = bisect_right(starts, passed) - 1
                part = (passed - starts[number]) / lengths[number]
            result = bottom + fall * cosine_left(part)
            # Rounding may exceed an end by one unit in the last place.
            if result > high:
                return high
            return result if result > low else low

        # A restart that falls on the end is not taken: the last value is the one before it.
        is_restart = last % cycle == 0 if is_even else last in starts
        last_value = bottom if is_restart else at(last)

        def value(timestamp: Timestamp) -> float:
            passed = read(timestamp) * scale - first
            if passed >= last:
                return last_value
            return at(passed) if passed > 0 else top

        return value

    def shape(self) -> str:
        """Return the schedule in words."""
        growth = f", each {self.multiplier} times as long" if self.multiplier > 1 else ""
        way = f"from {self.start:g} to {self.end:g}"
        return f"cosine {way} with restarts after {self.t_0}{growth}"


def _cycles(cycle: int, multiplier: int, last: int) -> tuple[list[int], list[int]]:
    """Return the starts and lengths of growing cycles up to `last`; there are few."""
    starts, lengths = [0], [cycle]
    while multiplier > 1 and starts[-1] + lengths[-1] <= last:
        starts.append(starts[-1] + lengths[-1])
        lengths.append(lengths[-1] * multiplier)
    return starts, lengths
