"""`bind_run`: a run with its batch sizes, schedules and triggers, each bound once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias, final

from stretto.batching import (
    BatchSizePolicy,
    Bound,
    LearningRateRule,
    NoRule,
    PolicyLike,
    RuleLike,
    as_policy,
    as_rule,
    check_pairs,
)
from stretto.errors import PlanError, shown
from stretto.planning.sizes import PlannedSizes, UnknownSizes, horizon_of
from stretto.schedules import BoundSchedule, Schedule, ScheduleLike, as_schedule
from stretto.timing import BoundTrigger, Horizon, TimeLike, TimeUnit, Trigger, parse_trigger
from stretto.timing.grammar import MAX_DIGITS

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
    triggers: Mapping[str, Trigger]
    bound_triggers: Mapping[str, BoundTrigger]
    rule: LearningRateRule

    @property
    def is_planned(self) -> bool:
        """Whether every batch is known before the run."""
        return self.sizes is not None and self.sizes.is_exact

    @property
    def num_batches(self) -> int | None:
        """The number of batches in the run; None if only the run can tell."""
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
        is_known = self.refusal is None or self.bound_policy.is_coupled
        return None if is_known else self.bound_policy.bounds

    def planned_sizes(self) -> PlannedSizes:
        """Return where each batch begins.

        Raises:
            PlanError: only the run can tell.
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
    known: Prepared | None = None,
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
        known: the same run, prepared before; its equal parts are reused.
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
    learning_rate_rule = NoRule() if rule is None else as_rule(rule)
    run = horizon.with_batch_sizes(None)
    with at("batch_size"):
        policy = as_policy(policy)
        check_pairs(read, policy=policy, rule=learning_rate_rule)
        if known is None or (known.facts, known.policy) != (run, policy):
            known = _with_sizes(run, policy, most_stages)
    with at("max_duration"):
        if known.sizes is not None:
            _check_length(known.sizes)
    bound: dict[str, BoundSchedule] = {}
    for name, schedule in read.items():
        with at("schedules", name):
            is_known = known.schedules.get(name) == schedule
            bound[name] = known.bound_schedules[name] if is_known else schedule.bind(known.horizon)
    due: dict[str, BoundTrigger] = {}
    for name, trigger in fires.items():
        with at("triggers", name):
            is_known = known.triggers.get(name) == trigger
            due[name] = known.bound_triggers[name] if is_known else trigger.bind(known.horizon)
    return replace(
        known,
        schedules=read,
        bound_schedules=bound,
        triggers=fires,
        bound_triggers=due,
        rule=learning_rate_rule,
    )


def _with_sizes(facts: Horizon, policy: BatchSizePolicy, most_stages: int | None) -> Prepared:
    bound, sizes, refusal = policy.bind(facts), None, None
    try:
        sizes = PlannedSizes(facts, policy, bound=bound, most_stages=most_stages)
        horizon = horizon_of(sizes)
    except PlanError as error:
        refusal = error.with_traceback(None)  # its frames hold the caller
        horizon = facts.with_batch_sizes(UnknownSizes(str(error.message.why)))
    return Prepared(facts, horizon, policy, bound, sizes, refusal, {}, {}, {}, {}, NoRule())


def _check_length(sizes: PlannedSizes) -> None:
    """Refuse a run whose positions exceed the digits of an exact time.

    A fraction of the run is a count times the denominator of the run's length, divided by the
    length. An exact time keeps at most 200 digits.
    """
    run = sizes.horizon.max_duration
    if sizes.end is not None and max(sizes.end) * run.amount.denominator >= _LIMIT:
        raise PlanError.cannot(
            f"plan a run of {shown(str(run))}",
            why=f"where it stands takes more than {MAX_DIGITS} digits",
            instead="write a length that a run can have, such as '90ep'",
        )


def check_tokens(run: Prepared) -> None:
    """Refuse a run that needs tokens from data that do not count them.

    Raises:
        PlanError: its length, the batch size, a schedule or a trigger follows tokens.
    """
    facts = run.facts
    needs = [
        (f"run for {facts.max_duration}", "max_duration", {facts.max_duration.unit}),
        ("follow tokens with the batch size", "batch_size", run.bound_policy.units),
        *(("follow tokens with a schedule", k, v.reads(facts)) for k, v in run.schedules.items()),
        *(("wait for tokens", name, one.units) for name, one in run.bound_triggers.items()),
    ]
    for what, where, units in needs:
        if TimeUnit.TOKEN in units:
            raise PlanError.cannot(
                what,
                why="the data cannot count their tokens",
                instead="write it in 'sp' or 'ep', or pass get_num_tokens_in_batch with the data",
                where=where,
            )
