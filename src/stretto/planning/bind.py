"""`bind_run`: a run with its batch sizes, schedules and triggers, each bound once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, final

from stretto.batching import (
    BatchSizePolicy,
    Bound,
    PolicyLike,
    Rule,
    RuleLike,
    as_policy,
    as_rules,
)
from stretto.batching.rows import LENGTH, LengthsLike, as_rows, length_of, whole_rows
from stretto.batching.rules import Referenced
from stretto.errors import PlanError, StrettoError
from stretto.planning.sizes import PlannedSizes, UnknownSizes, bind_sizes, horizon_of
from stretto.schedules import BoundSchedule, Schedule, ScheduleLike, as_schedule
from stretto.schedules.names import check_value_names
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

_QUICK = 2**21  # samples
_COUNTED = (TimeUnit.EPOCH, TimeUnit.SAMPLE, TimeUnit.TOKEN)
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
    rules: Mapping[str, Rule]
    """How values follow the batch size, by hyper-parameter."""
    values: Mapping[str, Schedule]
    """What values of the user's own follow, by their names."""
    bound_values: Mapping[str, BoundSchedule]
    left_out: int
    """Samples at the end of the data set that fill no row of the longest sequence."""

    @property
    def reads(self) -> dict[str, frozenset[TimeUnit]]:
        """The units that everything in the run reads from the clock, by its name."""
        return {
            "max_duration": frozenset({self.facts.max_duration.unit}),
            "batch_size": self.bound_policy.units,
            **{name: one.reads(self.facts) for name, one in self.schedules.items()},
            **{name: one.reads(self.facts) for name, one in self.values.items()},
            **{name: one.units for name, one in self.bound_triggers.items()},
        }

    @property
    def metrics(self) -> frozenset[str]:
        """The metric that schedules follow, or none."""
        return frozenset[str]().union(*(one.metrics() for one in self.schedules.values()))

    @property
    def tokens_each(self) -> int | None:
        """The most tokens of a sample if batch sizes are written in tokens; None: in samples."""
        lengths = self.facts.lengths
        most = self.facts.tokens_per_sample if lengths is None else lengths.longest
        return most if self.policy.unit is TimeUnit.TOKEN else None

    @property
    def refused(self) -> StrettoError | None:
        """Why the run cannot start from its beginning, though a resume may; None: it can."""
        each = (*self.bound_schedules.values(), *self.bound_values.values())
        refusals = [one for one in each if isinstance(one, Refusal)]
        return refusals[0].error if refusals else None

    @property
    def is_planned(self) -> bool:
        """Whether every batch is known before the run."""
        return self.sizes is not None and self.sizes.is_exact

    @property
    def is_quick(self) -> bool:
        """Whether all stages are found in a quarter of a second; if not, none is before the run.

        Where lengths decide, that takes a look at every sample.
        """
        lengths, run = self.facts.lengths, self.facts.max_duration
        if lengths is None:
            return True
        of_epoch = {TimeUnit.SAMPLE: lengths.num_samples, TimeUnit.TOKEN: lengths.total}
        epochs = run.amount / of_epoch.get(run.unit, 1) if run.unit in _COUNTED else 1
        return epochs * lengths.num_samples <= _QUICK

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
        is_known = self.refusal is None or self.is_read
        return None if is_known else self.bound_policy.bounds

    @property
    def is_read(self) -> bool:
        """Whether batches are in tokens, and only reading tells how many samples these are."""
        return self.bound_policy.unit is TimeUnit.TOKEN and self.facts.lengths is None

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
    values: Mapping[str, ScheduleLike] | None = None,
    triggers: Mapping[str, Trigger | TimeLike] | None = None,
    rule: RuleLike | None = None,
    sequence_length: LengthsLike | None = None,
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
        values: by a name of the user's own.
        triggers: by name.
        rule: how learning rates, or values by name, follow the batch size.
        sequence_length: the tokens of a row, which joins consecutive samples of equal length;
            None: each sample is on its own.
        most_stages: refuse sizes that change more often.
        at: entered with `"batch_size"`, `"sequence_length"`, `"max_duration"`,
            `"schedules", name`, `"values", name` or `"triggers", name` while that is bound.

    Raises:
        BatchSizeError: the policy cannot be followed on this run, or not with these schedules.
        PlanError: the run is too long, or its sizes change too often.
        ConversionError: a time needs a fact that is not known.
        ScheduleError: a schedule does not fit into the run.
    """
    rules = as_rules(rule)
    given = {**dict.fromkeys(rules, 1.0), **(schedules or {})}
    read = {name: as_schedule(schedule) for name, schedule in given.items()}
    own = {name: as_schedule(schedule) for name, schedule in (values or {}).items()}
    check_value_names(own, read if sequence_length is None else [*read, LENGTH])
    fires = {name: parse_trigger(trigger) for name, trigger in (triggers or {}).items()}
    facts, sizes, refusal, rows = horizon.with_batch_sizes(None), None, None, None
    with at("sequence_length"):
        if sequence_length is not None:
            rows = as_rows(sequence_length, facts.tokens_per_sample)
            facts = facts.in_groups(max(row for _, row in rows.steps))
    left_out = (horizon.dataset_num_samples or 0) - (facts.dataset_num_samples or 0)
    with at("batch_size"):
        policy = as_policy(policy)
        bound_policy = bind_sizes(facts, policy)
        if sequence_length is not None and rows is not None:
            bound_policy, each = whole_rows(bound_policy, rows, facts), facts.tokens_per_sample
            own[LENGTH] = length_of(bound_policy, sequence_length, each)
        unit, each = bound_policy.unit, facts.tokens_per_sample
        for name, follows in rules.items():
            rules[name] = follows.bind(unit, each) if isinstance(follows, Referenced) else follows
        try:
            sizes = PlannedSizes(facts, policy, bound=bound_policy, most_stages=most_stages)
            horizon = horizon_of(sizes)
        except PlanError as error:
            refusal = error.with_traceback(None)  # its frames hold the caller
            horizon = facts.with_batch_sizes(UnknownSizes(str(error.message.why)))
    with at("max_duration"):
        if sizes is not None and facts.lengths is None:
            _check_length(sizes)
    bound: dict[str, dict[str, BoundSchedule]] = {"schedules": {}, "values": {}}
    every = [("schedules", *pair) for pair in read.items()]
    for kind, name, one in [*every, *(("values", *pair) for pair in own.items())]:
        try:
            with at(kind, name):
                bound[kind][name] = one.bind(horizon)
        except StrettoError as error:
            if not _follows_sizes(one, horizon, error):
                raise
            bound[kind][name] = Refusal(error.with_traceback(None))
    due: dict[str, BoundTrigger] = {}
    for name, trigger in fires.items():
        with at("triggers", name):
            due[name] = trigger.bind(horizon)
    return Prepared(
        facts,
        horizon,
        policy,
        bound_policy,
        sizes,
        refusal,
        read,
        bound["schedules"],
        due,
        rules,
        own,
        bound["values"],
        left_out,
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
