"""Stages and events of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final

from stretto.batching import BatchSizePolicy, Bound, LearningRateRule, couplings_in
from stretto.batching.split import even_unit, is_learning_rate, not_even, split
from stretto.errors import Argument, ConversionError, PlanError, samples_text
from stretto.planning.sizes import PlannedSizes, Segment, unknown_count
from stretto.schedules import BoundSchedule, Schedule
from stretto.schedules.fields import checked_factor
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
    rule: LearningRateRule | None,
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
            if rule is not None and is_learning_rate(name):
                value *= checked_factor(rule(size), rule)
            found[name] = value
        return found

    return values


def _undeclared(name: str, error: UnknownCountError) -> PlanError:
    return PlanError.cannot(
        f"plan {name!r}",
        why=f"its function reads {error.name!r}, which only the run knows",
        instead=f"say so: Custom(function, reads='{error.unit}')",
    )


def warnings_of(
    horizon: Horizon,
    sizes: PlannedSizes,
    stages: Sequence[Stage],
    *,
    world_size: int,
    even: bool,
) -> Iterator[str]:
    """Yield a line for each likely mistake; `horizon` has the planned sizes."""
    if sizes.end is None:
        unit = sizes.horizon.max_duration.unit
        measure = "wall time" if unit is TimeUnit.SECOND else "what the data turn out to hold"
        yield f"the run ends by {measure}, so the plan does not know when its last stage is over"
    yield from _cut(sizes, stages, world_size=world_size, even=even)
    yield from _left_out(sizes, stages)
    yield from _beyond(horizon, sizes)
    yield from sizes.policy.warnings(
        sizes.horizon, max((stage.size for stage in stages), default=0)
    )
    bound = bound_of(sizes)
    if bound is not None:
        does = "leaves out samples" if horizon.last_batch == "drop" else "cuts a batch"
        yield (
            "the number of samples in the data set is not known: each epoch that ends during the "
            f"run {does}, so this plan is a bound ({bound}); state the number, or write "
            "last_batch='carry'"
        )


def bound_of(sizes: PlannedSizes) -> str | None:
    """Return what a plan is a bound of, if the data may end inside any batch; None: it is exact.

    >>> from stretto.timing import Horizon
    >>> bound_of(PlannedSizes(Horizon("18sp"), 4)), bound_of(PlannedSizes(Horizon("6ba"), 4))
    ('at least 5 batches', 'at most 24 samples')
    """
    if sizes.is_exact or sizes.end is None:
        return None if sizes.is_exact else "it assumes that no epoch ends inside a batch"
    is_counted = sizes.horizon.max_duration.unit is TimeUnit.BATCH
    is_least = is_counted == (sizes.horizon.last_batch == "drop")
    number, what = (sizes.end.sample, "samples") if is_counted else (sizes.end.batch, "batches")
    return f"at {'least' if is_least else 'most'} {number:,} {what}"


def growth_alone(
    policy: BatchSizePolicy, schedules: Mapping[str, Schedule], rule: LearningRateRule | None
) -> Iterator[str]:
    """Yield a warning if batches replace a decay that the learning rate does not account for."""
    rates = [one for name, one in schedules.items() if is_learning_rate(name)]
    pairs = [pair for rate in rates for pair in couplings_in(rate)]
    if policy.is_coupled and rates and not pairs and rule is None:
        yield (
            f"batches grow by {policy!r}, and no learning rate goes with them; "
            "schedules={'lr': pair.schedule} of the same pair does"
        )


def _cut(
    sizes: PlannedSizes, stages: Sequence[Stage], *, world_size: int, even: bool
) -> Iterator[str]:
    cut = [(size, stage) for stage in stages for size in stage.cut_sizes]
    num_samples = sizes.horizon.dataset_num_samples
    instead = "last_batch='carry' avoids it"
    for stage in stages:
        if sizes.horizon.last_batch == "keep" and num_samples and stage.size > num_samples:
            yield (
                f"batches of {stage.size} are cut to the {num_samples} samples of an epoch; "
                f"{instead}"
            )
            return
    small = [size for size, _ in cut if size < world_size]
    if small:
        yield (
            f"the last batch of an epoch or of the run has {_range(small)} for {world_size} ranks, "
            f"so some run a dummy of weight 0; {instead} within the run"
        )
    elif even and cut:
        yield (
            f"the last batch of an epoch or of the run has {_range([s for s, _ in cut])}, which "
            f"is not split evenly; {instead} within the run"
        )


def _left_out(sizes: PlannedSizes, stages: Sequence[Stage]) -> Iterator[str]:
    if sizes.horizon.last_batch != "drop" or sizes.end is None:
        return
    seen = sum(stage.samples or 0 for stage in stages)
    if seen < sizes.end.sample:
        yield (
            f"last_batch='drop' leaves out {sizes.end.sample - seen:,} of {sizes.end.sample:,} "
            "samples"
        )


def _beyond(horizon: Horizon, sizes: PlannedSizes) -> Iterator[str]:
    """Warn of policy times after the end of the run, usually a ramp longer than the run."""
    axis = horizon.axis(TimeUnit.DURATION)
    if sizes.end is None:
        return
    for time in dict.fromkeys(sizes.policy.times()):
        try:
            late = horizon.ticks(time, axis) > horizon.ticks(horizon.max_duration, axis)
        except ConversionError:
            continue
        if late:
            run = horizon.max_duration
            yield f"the run of {run} is over before {time} of the batch size policy"


def _range(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    return samples_text(least) if least == most else f"{least:,} to {most:,} samples"
