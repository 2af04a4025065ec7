"""Stages and events of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final

from stretto.batching import Bound, LearningRateRule
from stretto.batching.rules import is_learning_rate
from stretto.batching.split import even_unit, not_even, split
from stretto.errors import Argument, PlanError
from stretto.planning.sizes import PlannedSizes, Segment, unknown_count
from stretto.schedules import BoundSchedule, Schedule
from stretto.timing import Axis, BoundTrigger, Horizon, Timestamp, TimeUnit
from stretto.timing.epochs import KnownCounts, UnknownCountError, unknown_counters

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


Values: TypeAlias = Callable[[Timestamp, int], dict[str, float]]
"""Every hyper-parameter at a timestamp, for a batch of a decided size."""


class FirstLast(NamedTuple):
    """A hyper-parameter over a stage."""

    first: float
    """Its value for the first batch."""
    last: float | None
    """Its value for the last batch; None if only the run can tell which that is."""


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a run with one batch size."""

    number: int
    """From 1."""
    size: int
    """Samples of each batch over all ranks; fewer if an epoch or the run ends inside it."""
    batches: int | None
    """How many; None if only the run can tell."""
    first: Timestamp
    """The clock at the start of its first batch."""
    end: Timestamp | None
    """The clock after its last batch; None if only the run can tell."""
    skipped: int
    """Samples skipped right before it because its first batch did not fit into the epoch."""
    cut_sizes: tuple[int, ...]
    """The sizes of batches that are cut at the end of an epoch or of the run."""
    shares: tuple[int, int]
    """The fewest and the most samples of a full batch on one rank."""
    accumulation: int
    """Micro-batches per rank and batch."""
    values: Mapping[str, FirstLast]
    """The hyper-parameters."""

    @property
    def samples(self) -> int | None:
        """The samples of all its batches, without skipped ones."""
        if self.end is None or self.batches is None:
            return None
        if self.cut_sizes:
            return self.end.sample - self.first.sample
        return self.batches * self.size


def make_stage(
    horizon: Horizon,
    segment: Segment,
    number: int,
    *,
    world_size: int,
    micro_batch_size: int | None,
    values: Values,
) -> Stage:
    """Return the stage of a segment."""
    batches, count = segment.batches, segment.count
    shared = split(batches.size, world_size, micro_batch_size)
    first = values(batches.first, batches.size)
    last: dict[str, float | None] = dict.fromkeys(first)
    if count == 1:
        last.update(first)
    elif count is not None and first:
        last.update(values(batches.timestamp(count - 1), batches.size))
    return Stage(
        number=number,
        size=batches.size,
        batches=count,
        first=batches.first,
        end=segment.end,
        skipped=segment.skipped,
        cut_sizes=cut_sizes(horizon, segment),
        shares=(batches.size // world_size, -(-batches.size // world_size)),
        accumulation=shared.accumulation,
        values={name: FirstLast(value, last[name]) for name, value in first.items()},
    )


def cut_sizes(horizon: Horizon, segment: Segment) -> tuple[int, ...]:
    """Return the distinct sizes of cut batches: first epoch, later epochs, end of the run."""
    batches, count, end = segment.batches, segment.count, segment.end
    num_samples, first = horizon.dataset_num_samples, batches.first
    found: dict[int, None] = {}
    ends_epoch = end is None or end.epoch > first.epoch
    if num_samples is not None and horizon.last_batch == "keep" and ends_epoch:
        # The last batches of the first two epochs of the stage; later epochs end like the second.
        for epoch in (first.epoch + 1, first.epoch + 2):
            number = batches.count_before(epoch * num_samples) - 1
            if count is None or number < count:
                found[batches.size_of(number)] = None
    if end is not None and count and horizon.last_batch != "drop":
        found[end.sample - batches.position(count - 1)] = None
    found.pop(batches.size, None)
    return tuple(found)


def check_stage(
    stage: Stage,
    *,
    world_size: int,
    micro_batch_size: int | None,
    even: bool,
    is_coupled: bool,
) -> None:
    """Refuse a stage that the ranks cannot share.

    Raises:
        PlanError: a batch has fewer samples than there are ranks or, with `even`, does not give
            each rank the same full micro-batches.
    """
    if stage.size < world_size:
        raise _below(stage.size, world_size, is_coupled=is_coupled, where=_where(stage))
    if even and stage.size % even_unit(world_size, micro_batch_size):
        error = not_even(stage.size, world_size, micro_batch_size, is_coupled=is_coupled)
        raise error.recast(PlanError, where=_where(stage))


def check_least(policy: Bound, *, world_size: int, size: int | None = None) -> None:
    """Refuse a run without a plan whose smallest size leaves ranks without a sample.

    >>> from stretto.batching import NoiseScale
    >>> check_least(NoiseScale(8, 64).bind(Horizon("1ep")), world_size=8)

    Args:
        policy: the batch sizes.
        world_size: how many ranks share a batch.
        size: the next size of a resumed run; a batch that never shrinks may have grown enough.

    Raises:
        PlanError: the policy may decide fewer samples than there are ranks, or has.
    """
    if policy.bounds is None:
        return
    least = max(policy.bounds[0], size or 0)
    if least < world_size:
        raise _below(least, world_size, is_coupled=policy.is_coupled)


def _below(size: int, world_size: int, *, is_coupled: bool, where: str | None = None) -> PlanError:
    least = Argument("at_least", world_size, python=f"AtLeast(policy, {world_size})")
    bound: tuple[str | Argument, ...] = (f"write sizes of at least {world_size}, ", least)
    if is_coupled:
        bound = (f"begin with at least {world_size} samples, once rounded to multiple_of",)
    return PlanError.cannot(
        f"run batches of {size} on {world_size} ranks",
        why="each rank needs at least one sample",
        instead=(*bound, f", or start {size} ranks"),
        where=where,
    )


def _where(stage: Stage) -> str:
    return f"stage {stage.number}, from batch {stage.first.batch:,}, sample {stage.first.sample:,}"


def known_schedules(
    horizon: Horizon, schedules: Mapping[str, tuple[Schedule, BoundSchedule]]
) -> tuple[dict[str, BoundSchedule], list[str]]:
    """Return the schedules known before the run, and a line for each of the others."""
    known, lines = {}, []
    for name, (schedule, bound) in schedules.items():
        follows = unknown_count(horizon, schedule.reads(horizon))
        if follows is None:
            known[name] = bound
        else:
            lines.append(f"{name} follows {follows}, so its values are only known in the run")
    return known, lines


def hyperparameters(
    horizon: Horizon,
    bound: Mapping[str, BoundSchedule],
    base: Mapping[str, float],
    rule: LearningRateRule,
) -> Values:
    """Return every hyper-parameter as a function of the clock and the decided batch size.

    A value is its base times the schedule's factor. Learning rates are also multiplied by the rule.
    """
    hidden = unknown_counters(horizon)

    def values(timestamp: Timestamp, size: int) -> dict[str, float]:
        found = {}
        now = KnownCounts.of(timestamp, hidden)
        for name, schedule in bound.items():
            try:
                value = base.get(name, 1.0) * schedule(now)
            except UnknownCountError as error:
                raise _undeclared(name, error) from None
            found[name] = value * rule(size) if is_learning_rate(name) else value
        return found

    return values


def _undeclared(name: str, error: UnknownCountError) -> PlanError:
    return PlanError.cannot(
        f"plan {name!r}",
        why=f"its function reads {error.name!r}, which only the run knows",
        instead=f"say so: Custom(function, reads='{error.unit}')",
    )
