"""`bind_run`: a run with its batch sizes, schedules and triggers, each bound once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeAlias, final

from stretto.batching import (
    BatchSizePolicy,
    Bound,
    LearningRateRule,
    PolicyLike,
    RuleLike,
    as_policy,
    as_rule,
    split,
)
from stretto.errors import PlanError, StrettoError
from stretto.planning.sizes import PlannedSizes, UnknownSizes, horizon_of
from stretto.schedules import BoundSchedule, Schedule, ScheduleLike, as_schedule
from stretto.timing import (
    BoundTrigger,
    Horizon,
    TimeLike,
    Timestamp,
    TimeUnit,
    Trigger,
    parse_trigger,
)
from stretto.timing.grammar import MAX_DIGITS
from stretto.timing.horizon import EqualBatches

UNKNOWN = 2**40
"""Used where a framework needs a number that is not known. No epoch has as many batches."""


class Count(NamedTuple):
    """A number of steps or micro-batches, exact or between two bounds.

    >>> Count(3, 3).exact, Count(3, None).exact
    (3, None)
    """

    least: int
    """The smallest that it can be."""
    most: int | None
    """The largest that it can be; None if that is unknown."""

    @property
    def exact(self) -> int | None:
        """The number; None if it is not known."""
        return self.least if self.least == self.most else None


def end_of(run: Prepared) -> int | None:
    """Return the position at which a run ends; None if unknown before the run."""
    if run.sizes is not None and run.sizes.end is not None:
        return run.sizes.end.sample
    return run.horizon.end_sample


def steps_left(run: Prepared, now: Timestamp) -> Count:
    """Return how many steps come after a timestamp.

    >>> from stretto.planning import bind_run
    >>> from stretto.timing import Horizon
    >>> steps_left(bind_run(Horizon("2ep", dataset_num_samples=100), "0ep:8 1ep:20"), Timestamp())
    Count(least=18, most=18)
    """
    length = run.facts.max_duration
    if length.unit is TimeUnit.BATCH:
        left = max(0, math.ceil(length.amount) - now.batch)
        return Count(left, left)
    sizes, end = run.sizes, end_of(run)
    if end is None:
        return Count(0, None)
    if sizes is not None and sizes.sample_at_batch(now.batch) != now.sample:
        return _between_bounds(run, now.sample, end)  # resumed after other sizes
    return steps_between(run, now.sample, end)


def steps_of_epoch(run: Prepared, epoch: int) -> Count:
    """Return how many steps begin in an epoch."""
    num_samples, end = run.facts.dataset_num_samples, end_of(run)
    if num_samples is None:
        return Count(0, None)
    start, stop = epoch * num_samples, (epoch + 1) * num_samples
    found = steps_between(run, min(start, end or start), min(stop, end or stop))
    if end is None:
        return Count(0, found.most)
    is_shared = run.sizes is None and run.facts.last_batch == "carry"
    # Its first samples may belong to a batch of the epoch before.
    return Count(max(0, found.least - 1), found.most) if is_shared else found


def steps_between(run: Prepared, start: int, stop: int) -> Count:
    """Return how many steps begin in `[start, stop)`; positions up to the end of the run."""
    sizes = run.sizes
    if sizes is None:
        return _between_bounds(run, start, stop)
    count = sizes.batch_at_sample(stop) - sizes.batch_at_sample(start)
    return Count(count, count if sizes.is_exact else None)


def _between_bounds(run: Prepared, start: int, stop: int) -> Count:
    """Return the number of steps if all had the largest size of the policy, or the smallest."""
    bounds = run.bound_policy.bounds
    if stop <= start:
        return Count(0, 0)
    if bounds is None or run.facts.dataset_num_samples is None:
        return Count(1, None)
    epoch, within = divmod(start, run.facts.dataset_num_samples)
    first = Timestamp(epoch=epoch, sample=start, sample_in_epoch=within)
    smallest, largest = (EqualBatches(run.facts, first, size) for size in bounds)
    return Count(largest.count_before(stop), smallest.count_before(stop))


def micro_batches_of_epoch(
    run: Prepared, epoch: int, *, world_size: int, micro_batch_size: int | None
) -> Count:
    """Return how many micro-batches each rank has in the steps that begin in an epoch.

    Exact if the sizes are planned, else only a lower bound. Iterables may have more: they are also
    cut where their own batches end.
    """
    num_samples = run.facts.dataset_num_samples
    if num_samples is None or run.sizes is None or not run.sizes.is_exact:
        return Count(0, None)
    start, stop = epoch * num_samples, (epoch + 1) * num_samples
    total = planned_micro_batches(
        run, start, stop, world_size=world_size, micro_batch_size=micro_batch_size
    )
    return Count(total, total)


def planned_micro_batches(
    run: Prepared, start: int, stop: int, *, world_size: int, micro_batch_size: int | None
) -> int:
    """Return how many micro-batches each rank has in the planned steps in `[start, stop)`."""
    assert run.sizes is not None, "planned"
    total, end = 0, end_of(run)
    for stage in run.sizes.stages:
        first, after = stage.count_before(start), stage.count_before(stop)
        if first == after:
            continue
        last = stage.equal.size_of(after - 1)
        if end is not None and run.facts.last_batch != "drop":
            last = min(last, end - stage.equal.position(after - 1))
        total += sum(
            count * split(size, world_size, micro_batch_size).accumulation
            for size, count in ((stage.size, after - 1 - first), (last, 1))
        )
    return total


def smallest_step(run: Prepared) -> int | None:
    """Return the samples of the smallest step, as far as that is known before the run."""
    if run.sizes is None:
        return run.bound_policy.bounds[0] if run.bound_policy.bounds else None
    return min(min((stage.size, *stage.cut_sizes)) for stage in run.sizes.stages)


_LIMIT = 10 ** (MAX_DIGITS - 2)
At: TypeAlias = Callable[..., AbstractContextManager[object]]
"""`at("schedules", "lr")` is entered while that part is bound, so errors can say where."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A run that can start: its settings, and the same settings bound to its length and data."""

    facts: Horizon
    """The run without batch sizes."""
    horizon: Horizon
    """The run. It converts all units that do not depend on unknown batch sizes."""
    policy: BatchSizePolicy
    bound_policy: Bound
    sizes: PlannedSizes | None
    """Where each batch begins; None if sizes are decided during the run."""
    refusal: PlanError | None
    """Why `sizes` is None."""
    schedules: Mapping[str, Schedule]
    bound_schedules: Mapping[str, BoundSchedule]
    bound_triggers: Mapping[str, BoundTrigger]
    rule: LearningRateRule | None

    @property
    def reads(self) -> dict[str, frozenset[TimeUnit]]:
        """The units that everything in the run reads from the clock, by its name."""
        return {
            "max_duration": frozenset({self.facts.max_duration.unit}),
            "batch_size": self.bound_policy.units,
            **{name: one.reads(self.facts) for name, one in self.schedules.items()},
            **{name: one.units for name, one in self.bound_triggers.items()},
        }

    @property
    def refused(self) -> StrettoError | None:
        """Why the run cannot start from its beginning, though a resume may; None: it can."""
        refusals = [one for one in self.bound_schedules.values() if isinstance(one, Refusal)]
        return refusals[0].error if refusals else None

    @property
    def is_planned(self) -> bool:
        """Whether every batch is known before the run."""
        return self.sizes is not None and self.sizes.is_exact

    @property
    def num_batches(self) -> int | None:
        """The number of batches in the run; None if unknown before the run."""
        run = self.facts.max_duration
        if run.unit is TimeUnit.BATCH:
            return int(run.amount)
        return self.sizes.num_batches if self.sizes is not None and self.is_planned else None

    @property
    def decided_between(self) -> tuple[int, int] | None:
        """The smallest and the largest size of a policy that decides during the run.

        None if every size is known before the run, or not even the bounds are.

        >>> from stretto.batching import NoiseScale
        >>> bind_run(Horizon("1ep"), NoiseScale(8, 64)).decided_between
        (8, 64)
        """
        return None if self.refusal is None else self.bound_policy.bounds

    def planned_sizes(self) -> PlannedSizes:
        """Return where each batch begins.

        Raises:
            PlanError: the sizes are decided during the run.
        """
        if self.sizes is None:
            assert self.refusal is not None
            raise self.refusal
        return self.sizes


def bind_run(
    horizon: Horizon,
    policy: PolicyLike,
    *,
    schedules: Mapping[str, ScheduleLike] | None = None,
    triggers: Mapping[str, Trigger | TimeLike] | None = None,
    rule: RuleLike | None = None,
    most_stages: int | None = None,
    at: At = lambda *_: nullcontext(),
) -> Prepared:
    """Bind the settings of a run to its length and data, each once.

    A plan, a loader and a training loop that use the result agree on every batch.

    >>> run = bind_run(Horizon("2ep", dataset_num_samples=100), "0ep:8 1ep:20")
    >>> run.sizes.num_batches, run.horizon.convert("1ep", "ba")
    (18, Time('13ba'))

    Args:
        horizon: the run; its batch sizes are replaced by those of the policy.
        policy: the batch sizes.
        schedules: by hyper-parameter.
        triggers: by name.
        rule: how learning rates follow the batch size.
        most_stages: refuse sizes that change more often.
        at: entered with `"batch_size"`, `"max_duration"`, `"schedules", name` or
            `"triggers", name` while that is bound.

    Raises:
        BatchSizeError: the policy cannot be followed on this run, or not with these schedules.
        PlanError: the run is too long, or its sizes change too often.
        ConversionError: a time needs a fact that is not known.
        ScheduleError: a schedule does not fit into the run.
    """
    read = {name: as_schedule(schedule) for name, schedule in (schedules or {}).items()}
    fires = {name: parse_trigger(trigger) for name, trigger in (triggers or {}).items()}
    learning_rate_rule = None if rule is None else as_rule(rule)
    facts, sizes, refusal = horizon.with_batch_sizes(None), None, None
    with at("batch_size"):
        policy = as_policy(policy)
        bound_policy = policy.bind(facts)
        try:
            sizes = PlannedSizes(facts, policy, bound=bound_policy, most_stages=most_stages)
            horizon = horizon_of(sizes)
        except PlanError as error:
            refusal = error.with_traceback(None)  # its frames hold the caller
            horizon = facts.with_batch_sizes(UnknownSizes(str(error.message.why)))
    with at("max_duration"):
        if sizes is not None:
            _check_length(sizes)
    bound: dict[str, BoundSchedule] = {}
    for name, one in read.items():
        try:
            with at("schedules", name):
                bound[name] = one.bind(horizon)
        except StrettoError as error:
            if not _follows_sizes(one, horizon, error):
                raise
            bound[name] = Refusal(error.with_traceback(None))
    due: dict[str, BoundTrigger] = {}
    for name, trigger in fires.items():
        with at("triggers", name):
            due[name] = trigger.bind(horizon)
    return Prepared(
        facts, horizon, policy, bound_policy, sizes, refusal, read, bound, due, learning_rate_rule
    )


@final
@dataclass(frozen=True, slots=True)
class Refusal:
    """A schedule that does not fit these batch sizes; a run that is resumed may have had others."""

    error: StrettoError

    def __call__(self, _timestamp: Timestamp, /) -> NoReturn:
        """Refuse."""
        raise self.error


def _follows_sizes(schedule: Schedule, horizon: Horizon, error: StrettoError) -> bool:
    """Return whether a schedule is refused because of the batch sizes."""
    is_unknown = isinstance(horizon.batch_sizes, UnknownSizes)
    try:
        schedule.bind(horizon.with_batch_sizes(1 if is_unknown else UnknownSizes("")))
    except StrettoError as other:
        return (other.message.what, other.message.why) != (error.message.what, error.message.why)
    return True


def _check_length(sizes: PlannedSizes) -> None:
    """Refuse a run whose positions exceed the digits of an exact time.

    A fraction of the run is a count times the denominator of the run's length, divided by the
    length. An exact time keeps at most 200 digits.
    """
    run = sizes.horizon.max_duration
    if sizes.end is not None and max(sizes.end) * run.amount.denominator >= _LIMIT:
        why = f"its positions have more than {MAX_DIGITS} digits"
        raise PlanError.bad("max_duration", str(run), why, "write a length such as '90ep'")


def check_tokens(run: Prepared) -> None:
    """Refuse a run that needs tokens from data that do not count them.

    Raises:
        PlanError: its length, the batch size, a schedule or a trigger follows tokens.
    """
    for name, units in run.reads.items():
        if TimeUnit.TOKEN in units:
            raise PlanError.cannot(
                "follow tokens",
                why="the data cannot count their tokens",
                instead="write it in 'sp' or 'ep', or pass get_num_tokens_in_batch with the data",
                where=name,
            )
