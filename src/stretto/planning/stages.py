"""What a plan says of its stages: events, hyper-parameters, checks and warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, final

from stretto.batching import BatchSizePolicy, Bound, Rule, Tokens
from stretto.batching.rules import Referenced, moved
from stretto.batching.split import even_unit, in_rows, not_even, split
from stretto.batching.wrappers import rounding
from stretto.errors import ConversionError, PlanError, samples_text
from stretto.planning.bind import Prepared
from stretto.planning.sizes import FirstLast, PlannedSizes, Stage, on_data, unknown_count
from stretto.schedules import BoundSchedule, Schedule
from stretto.schedules.names import most_specific, parse_name
from stretto.schedules.schedule import Base
from stretto.timing import Axis, BoundTrigger, Horizon, Timestamp, TimeUnit
from stretto.timing.epochs import UnknownCountError, known_counts, unknown_counters

FIRST = 5
"""How many times of each event are listed."""
_LOWEST_PEAK = 0.01
"""The factor of an optimizer's learning rate below which the peak of a schedule is a mistake."""
_CARRY = "last_batch='carry' avoids it"
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
    """How often; None if unknown before the run."""
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
    for stage in sizes.stages:
        if stage.batches is not None and stage.end is not None:
            before = sizes.after_batch(stage.first.batch)
            count += min(stage.batches, trigger.count(before, stage.end))
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
        now = sizes.after_batch(batch)
        found.append(now)
    return found


def _batches_until(axis: Axis, tick: int, sizes: PlannedSizes) -> int:
    """Return the number of batches after which a counter has reached `tick`."""
    batches = first_after(axis, tick, sizes)
    # Samples that are skipped before a batch count when that batch is over.
    return batches + (axis.read(sizes.after_batch(batches)) < tick)


def first_after(axis: Axis, tick: int, sizes: PlannedSizes) -> int:
    """Return the number of the first batch that begins when a counter has reached `tick`."""
    if axis.unit is TimeUnit.BATCH:
        return tick
    if axis.unit is TimeUnit.TOKEN:
        lengths, each = sizes.horizon.lengths, sizes.horizon.tokens_per_sample or 1
        tick = -(-tick // each) if lengths is None else lengths.reached(0, tick)
    return sizes.batch_at_sample(tick)


Values: TypeAlias = Callable[[Timestamp, int], dict[str, float]]
"""Every hyper-parameter at a timestamp, for a batch of a decided size."""


def check_stage(
    stage: Stage, *, even: bool, least: int, each: int | None, idle: bool = False
) -> None:
    """Refuse a stage that the ranks cannot share.

    Args:
        stage: the stage.
        even: whether each rank has to have the same full micro-batches.
        least: the fewest rows of a batch that is still to come.
        each: the most tokens of a sample if sizes are written in tokens; None: in samples.
        idle: whether ranks may be left without a sample.

    Raises:
        PlanError: a batch has fewer samples than there are ranks or, with `even`, does not give
            each rank the same full micro-batches.
    """
    world_size, micro, row = stage.world_size, stage.micro_batch_size, stage.row
    fewest, size = stage.whole_sizes  # of equal batches, the same
    place = f"stage {stage.number}, from batch {stage.first.batch:,}, sample {stage.first.sample:,}"
    if stage.rows < world_size and not idle:
        raise _below(size, world_size, row=row, most=least, where=place, each=each)
    micro = micro if row == 1 else row * (in_rows(size, micro, row)[1] or 1)
    if even and fewest != size:
        raise PlanError.cannot(
            f"split batches of {fewest:,} to {size:,} samples evenly over {world_size} ranks",
            why="they are in tokens, and samples have unequal lengths",
            instead="write sizes in samples, or leave 'even' out",
            where=place,
        )
    if even and size % even_unit(world_size, micro):
        error = not_even(size, world_size, micro, each)
        raise error.recast(PlanError, where=place)


def check_least(
    policy: Bound,
    *,
    world_size: int,
    size: int | None = None,
    row: int = 1,
    each: int | None = None,
) -> None:
    """Refuse a run without a plan whose smallest size leaves ranks without a sample.

    >>> from stretto.batching import NoiseScale
    >>> check_least(NoiseScale(8, 64).bind(Horizon("1ep")), world_size=8)

    Args:
        policy: the batch sizes.
        world_size: how many ranks share a batch.
        size: the next size of a resumed run; a batch that never shrinks may have grown enough.
        row: the samples of the longest row.
        each: the most tokens of a sample if sizes are written in tokens; None: in samples.

    Raises:
        PlanError: the policy may decide fewer samples than there are ranks, or has.
    """
    if policy.bounds is None:
        return
    least = max(policy.bounds[0], size or 0)
    if max(1, least // row) < world_size:
        raise _below(least, world_size, row=row, each=each)


def _below(
    size: int,
    world_size: int,
    *,
    row: int = 1,
    most: int | None = None,
    where: str | None = None,
    each: int | None = None,
) -> PlanError:
    ranks, enough = most or max(1, size // row), world_size * row
    enough = enough if each is None else Tokens(enough * each)
    return PlanError.cannot(
        f"run batches of {size} on {world_size} ranks",
        why=f"each rank needs at least one {'sample' if row == 1 else f'row of {row} samples'}",
        instead=f"write AtLeast(policy, {enough!r}), start {ranks} ranks, or pass idle_ranks=True",
        where=where,
    )


def known_schedules(
    horizon: Horizon, schedules: Mapping[str, tuple[Schedule, BoundSchedule]]
) -> tuple[dict[str, BoundSchedule], list[str]]:
    """Return the schedules known before the run, and a line for each of the others."""
    known, lines = {}, []
    for name, (schedule, bound) in schedules.items():
        follows = unknown_count(horizon, schedule.reads(horizon))
        follows = next(map(repr, schedule.metrics()), follows)
        if follows is None:
            known[name] = bound
        else:
            lines.append(f"{name} follows {follows}, so its values are only known in the run")
    return known, lines


def on_base(name: str, run: Prepared, base: Mapping[str, float]) -> tuple[Schedule, BoundSchedule]:
    """Return a schedule, and the same bound, for the base value of what it sets, if given."""
    schedule, known = run.schedules[name], run.bound_schedules[name]
    if name not in base:
        return schedule, known
    value, names = base[name], [parse_name(text) for text in (name, *run.schedules)]
    settings = _settings(run)
    names = [one.of(settings) for one in names]
    columns = [(one.key, one.index or (0 if one.key == "betas" else None)) for one in names]
    key, index = columns[0]
    group = {"lr": base.get("lr", 1.0), **settings, key: value if index is None else (value,) * 2}
    found = schedule.on(Base([group], 0, columns[0], frozenset(columns), {}))
    return found, known if found is schedule else found.bind(run.horizon)


def _settings(run: Prepared) -> dict[str, Any]:
    """Return settings of the kind of optimizer whose values are scheduled, as far as is known."""
    has_betas = any(parse_name(text).key == "betas" for text in run.schedules)
    return {"betas": (0.9, 0.999)} if has_betas else {"momentum": 0.9}


def rules_of(run: Prepared) -> dict[str, Rule]:
    """Return the rule of each value that follows one, by the name that it is shown by."""
    settings = _settings(run)
    each = {
        text: most_specific(run.rules, parse_name(text).of(settings), settings)
        for text in run.schedules
    }
    return {text: rule for text, rule in each.items() if rule is not None}


def without_base(rules: Mapping[str, Rule], base: Mapping[str, float]) -> dict[str, str]:
    """Return a line for each value that a rule gives nothing of, because its base is not known."""
    return {
        name: f"{name} follows {rule!r} from a value that is not stated, so it is not shown"
        for name, rule in rules.items()
        if isinstance(rule, Referenced) and rule.is_of_averages and name not in base
    }


def hyperparameters(
    horizon: Horizon,
    bound: Mapping[str, BoundSchedule],
    base: Mapping[str, float],
    rules: Mapping[str, Rule],
) -> Values:
    """Return every hyper-parameter as a function of the clock and the decided batch size.

    A value is its base times the schedule's factor, as its rule moves that.
    """
    hidden = unknown_counters(horizon)

    def values(timestamp: Timestamp, size: int) -> dict[str, float]:
        found = {}
        now = known_counts(timestamp, hidden)
        for name, schedule in bound.items():
            try:
                value = base.get(name, 1.0) * schedule(now)
            except UnknownCountError as error:
                raise PlanError.cannot(
                    f"plan {name!r}",
                    why=f"its function reads {error.name!r}, which only the run knows",
                    instead=f"declare it: Custom(function, reads='{error.unit}')",
                ) from None
            found[name] = moved(rules.get(name), value, size)
        return found

    return values


def first_last(stage: Stage, values: Values) -> dict[str, FirstLast]:
    """Return the hyper-parameters of the first and the last batch of a stage."""
    first = values(stage.first, stage.size)
    last: Mapping[str, float | None] = dict.fromkeys(first)
    if stage.batches is not None and first:
        last = values(stage.equal.timestamp(stage.batches - 1), stage.size)
    return {name: FirstLast(value, last[name]) for name, value in first.items()}


def warnings_of(
    horizon: Horizon, sizes: PlannedSizes, stages: Sequence[Stage], *, even: bool
) -> Iterator[str]:
    """Yield a line for each likely mistake; `horizon` has the planned sizes."""
    drops = horizon.last_batch == "drop"
    if sizes.end is None:
        unit = horizon.max_duration.unit
        measure = "wall time" if unit is TimeUnit.SECOND else "what the data turn out to hold"
        yield f"the run ends by {measure}, so the plan does not know when its last stage is over"
    yield from mistakes_of(horizon, sizes, stages)
    each = horizon.tokens_per_sample
    in_tokens = sizes.policy.unit is TimeUnit.TOKEN
    line = rounding(sizes.policy, each) if in_tokens and each is not None else None
    if line is not None:
        yield line
    if not any(_large(horizon, stages)):
        yield from _cut(stages, even=even)
    if drops and sizes.end is not None:
        total = sizes.end.sample
        left_out = total - sum(stage.samples or 0 for stage in stages)
        if left_out:
            yield f"last_batch='drop' leaves out {left_out:,} of {total:,} samples"
    bound = bound_of(sizes)
    if bound is not None:
        yield (
            "the number of samples in the data set is not known: each epoch that ends during the "
            f"run {'leaves out samples' if drops else 'cuts a batch'}, so this plan is a bound "
            f"({bound}); state the number, or write last_batch='carry', as Horizon.endless does"
        )


def rows_text(stages: Sequence[Stage], left_out: int) -> Iterator[str]:
    """Yield what whole rows of a sequence length change: sizes, and the end of the data set."""
    pairs = dict.fromkeys((stage.asked, stage.size) for stage in stages if stage.asked)
    if pairs:
        texts = [f"{size:,} for {asked:,}" for asked, size in [*pairs][:FIRST]]
        more = ", ..." if len(pairs) > FIRST else ""
        yield f"batches are whole rows of the sequence length: {', '.join(texts)} samples{more}"
    if left_out:
        yield f"the longest sequence leaves out the last {samples_text(left_out)} of the data set"


def mistakes_of(
    horizon: Horizon,
    sizes: PlannedSizes | None,
    stages: Sequence[Stage],
    schedules: Mapping[str, tuple[Schedule, BoundSchedule]] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield those of the warnings of a plan that do not only describe it.

    Args:
        horizon: the facts of the run.
        sizes: its batch sizes, if they are known.
        stages: its stages.
        schedules: as they are combined for an optimizer, each with the same bound.
    """
    yield from _seconds(horizon)
    if sizes is not None and stages:
        known, _ = known_schedules(horizon, schedules)
        if sizes.end is not None and "lr" in known:
            yield from _low(known["lr"], sizes, sizes.end.batch)
        yield from _large(horizon, stages)
        yield from _small(horizon, sizes.bound, stages)
        if sizes.end is not None:
            yield from _late(horizon, sizes.policy)
        policy = on_data(sizes.horizon, sizes.policy)
        yield from policy.warnings(sizes.horizon, max(stage.size for stage in stages))


def _low(factor: BoundSchedule, sizes: PlannedSizes, num_batches: int) -> Iterator[str]:
    """Warn of learning rates far below the optimizer's, usually those that were meant."""
    few = range(0, num_batches, -(-num_batches // 64) or 1)
    peak = max((factor(sizes.timestamp_at_batch(one)) for one in few), default=0.0)
    if 0 < peak < _LOWEST_PEAK:
        yield (
            f"the learning rate is at most {peak:.3g} times the optimizer's, by which schedules "
            "are multiplied; write Cosine(1, 0.1) to begin with the optimizer's"
        )


def single_sample(stages: Sequence[Stage], world_size: int, micro: int | None) -> int | None:
    """Return a batch size of which some rank has a micro-batch of one sample; None: there is none.

    >>> from stretto.planning import plan
    >>> single_sample(plan(Horizon("1ep", dataset_num_samples=9), 4).stages, 1, None)
    1
    """
    if isinstance(micro, Tokens):
        return None  # a long sample may be alone in any batch
    sizes = dict.fromkeys(
        size for stage in stages for size in (*stage.whole_sizes, *stage.cut_sizes)
    )
    for size in sizes:
        parts = split(size, world_size, micro).accumulation
        for share in (size // world_size, -(-size // world_size)):
            if 1 in (max(share // parts, 1), -(-share // parts)):
                return size
    return None


def _seconds(horizon: Horizon) -> Iterator[str]:
    """Warn of a length such as 1000s, which is usually meant as samples or steps."""
    run = horizon.max_duration
    if run.unit is TimeUnit.SECOND and run.amount % 100 == 0 and run.amount % 60:
        meant = f"{run.amount}sp or {run.amount}ba"
        yield f"max_duration is {run} of wall time; for samples or steps write {meant}"


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


def _cut(stages: Sequence[Stage], *, even: bool) -> Iterator[str]:
    """Warn of batches that are cut below the number of ranks, or unevenly."""
    cut = [size for stage in stages for size in stage.cut_sizes]
    small = [size for size in cut if size < stages[0].world_size]
    few = [one.whole_sizes[0] for one in stages if one.whole_sizes[0] < one.world_size]
    if few:
        yield (
            f"a batch of few long samples has {_range(few)} for {stages[0].world_size} ranks, so "
            "some run a dummy of weight 0"
        )
    elif small:
        yield (
            f"the last batch of an epoch or of the run has {_range(small)} for "
            f"{stages[0].world_size} ranks, so some run a dummy of weight 0; {_CARRY} within the "
            "run"
        )
    elif even and cut:
        yield (
            f"the last batch of an epoch or of the run has {_range(cut)}, which is not split "
            f"evenly; {_CARRY} within the run"
        )


def _large(horizon: Horizon, stages: Sequence[Stage]) -> Iterator[str]:
    num_samples = horizon.dataset_num_samples
    most = [one.whole_sizes[1] for one in stages]
    large = [size for size in most if num_samples and size > num_samples]
    if large and horizon.last_batch == "keep":
        yield f"batches of {large[0]} are cut to the {num_samples} samples of an epoch; {_CARRY}"


def _small(horizon: Horizon, bound: Bound, stages: Sequence[Stage]) -> Iterator[str]:
    """Warn of sizes in tokens that some sample alone exceeds."""
    lengths, least = horizon.lengths, min(stage.size for stage in stages)
    if lengths is not None and bound.unit is TimeUnit.TOKEN and least < lengths.longest:
        yield (
            f"batches of {least} cannot hold the longest sample, of {lengths.longest:,} tokens: "
            "such a sample is a larger batch, alone"
        )


def _late(horizon: Horizon, policy: BatchSizePolicy) -> Iterator[str]:
    """Warn of policy times after the end of the run, usually a ramp longer than the run."""
    axis = horizon.axis(TimeUnit.DURATION)
    for time in dict.fromkeys(policy.times()):
        with suppress(ConversionError):
            if horizon.ticks(time, axis) > horizon.ticks(horizon.max_duration, axis):
                run = horizon.max_duration
                yield f"the run of {run} is over before {time} of the batch size policy"


def _range(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    return samples_text(least) if least == most else f"{least:,} to {most:,} samples"
