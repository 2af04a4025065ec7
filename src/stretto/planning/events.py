"""Repeated events of a planned run: evaluations, checkpoints, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from stretto.planning.clock import unknown_count
from stretto.planning.sizes import PlannedSizes
from stretto.timing import BoundTrigger, Timestamp

FIRST = 5
"""How many times of each event are listed."""
EXACT = 2_000
"""Up to this many, each time is looked up, so two marks in one batch count once."""


@final
@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens when its trigger fires, at the end of a batch."""

    name: str
    first: tuple[Timestamp, ...] = ()
    """The clock at the first few times."""
    count: int | None = None
    """How often; None if only the run can tell."""
    is_exact: bool = False
    """False if the count is unknown or an upper bound, which counts two marks in one batch
    twice."""
    follows: str | None = None
    """What it follows that is known only during the run, such as the wall clock; else None."""


def make_event(name: str, trigger: BoundTrigger, sizes: PlannedSizes) -> Event:
    """Return when `trigger` fires on a planned run."""
    follows = unknown_count(sizes.horizon, trigger.units)
    if follows is not None:
        return Event(name, follows=follows)
    times = _times(trigger, sizes, FIRST)
    if sizes.end is None:
        return Event(name, tuple(times))
    marks = trigger.count(Timestamp(), sizes.end)
    if marks <= EXACT:
        times = _times(trigger, sizes, marks)
        return Event(name, tuple(times[:FIRST]), len(times), is_exact=True)
    count = 0
    for segment in sizes.segments:
        if segment.count is not None and segment.end is not None:
            count += min(segment.count, trigger.count(segment.batches.first, segment.end))
    return Event(name, tuple(times), count)


def _times(trigger: BoundTrigger, sizes: PlannedSizes, limit: int) -> list[Timestamp]:
    """Yield the clock after each of the first `limit` batches that fire the trigger."""
    found: list[Timestamp] = []
    batch, now = 0, Timestamp()
    # Each search starts with the distance of the last one, so regular events are found fast.
    stride = 1
    while len(found) < limit:
        reach = _first_at_least(trigger, sizes, batch, now, stride)
        if reach is None:
            break
        stride, batch = reach - batch, reach
        now = sizes.timestamp_at_batch(batch)
        found.append(now)
    return found


def _first_at_least(
    trigger: BoundTrigger, sizes: PlannedSizes, batch: int, now: Timestamp, stride: int
) -> int | None:
    """Return the first batch count after `batch` that has reached a mark, or None."""

    def fires_by(number: int) -> bool:
        return trigger.count(now, sizes.timestamp_at_batch(number)) > 0

    total = sizes.num_batches
    # Beyond any run: if the end is unknown, a trigger that has not fired by then never fires.
    last = 1 << 62 if total is None else total
    if batch >= last:
        return None
    low, high = batch, min(last, batch + stride)
    while not fires_by(high):
        if high == last:
            return None
        low, high = high, min(last, high + 2 * (high - batch))
    while high - low > 1:
        # Most triggers fire at equal intervals: look one batch before the stride's end first.
        middle = high - 1 if high - batch == stride else (low + high) // 2
        low, high = (low, middle) if fires_by(middle) else (middle, high)
    return high
