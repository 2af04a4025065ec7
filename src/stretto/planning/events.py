"""Repeated events of a planned run: evaluations, checkpoints, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from stretto.planning.clock import unknown_count
from stretto.planning.sizes import PlannedSizes
from stretto.timing import Axis, BoundTrigger, Timestamp, TimeUnit

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
    """Return the clock after each of the first `limit` batches that fire the trigger."""
    found: list[Timestamp] = []
    now = Timestamp()
    while len(found) < limit:
        batches = [_batches_until(axis, tick, sizes) for axis, tick in trigger.next(now)]
        batch = min(batches, default=None)
        if batch is None or (sizes.num_batches is not None and batch > sizes.num_batches):
            break
        now = sizes.timestamp_at_batch(batch)
        found.append(now)
    return found


def _batches_until(axis: Axis, tick: int, sizes: PlannedSizes) -> int:
    """Return the number of batches after which a counter has reached `tick`."""
    if axis.unit is TimeUnit.BATCH:
        return tick
    if axis.unit is TimeUnit.TOKEN:
        tick = -(-tick // (sizes.horizon.tokens_per_sample or 1))
    batches = sizes.batch_at_sample(tick)
    # Samples that are skipped before a batch count when that batch is over.
    return batches + (sizes.timestamp_at_batch(batches).sample < tick)
