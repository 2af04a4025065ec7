"""`plan`: a whole run, computed without training."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import cast, final

from stretto._foreign import knows_foreign
from stretto.batching import BatchSizePolicy, PolicyLike, Rule, RuleLike
from stretto.batching.pack import checked_micro_batch
from stretto.batching.policy import Tokens, checked_world_size, saved_size
from stretto.batching.rows import LengthsLike
from stretto.batching.rules import is_learning_rate
from stretto.errors import PlanError
from stretto.planning.bind import Prepared, bind_run, check_tokens
from stretto.planning.borders import Change, changes_of, split_at_borders
from stretto.planning.sizes import PlannedBatch, PlannedSizes, Stage, unknown_count
from stretto.planning.stages import (
    Event,
    Values,
    check_stage,
    first_after,
    first_last,
    hyperparameters,
    known_schedules,
    make_event,
    on_base,
    rows_text,
    rules_of,
    warnings_of,
    without_base,
)
from stretto.schedules import BoundSchedule, Schedule, ScheduleLike
from stretto.timing import Horizon, Time, TimeLike, Timestamp, Trigger
from stretto.timing.grammar import as_float


@final
@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A run without training, made by `plan`: its stages, totals and events. A frozen value.

    It knows where each batch begins, so it serves as the `batch_sizes` of a horizon.

    >>> from stretto import Horizon, PiecewiseConstant, plan
    >>> ramp = plan(Horizon("1ep", dataset_num_samples=320), PiecewiseConstant("0sp:8 160sp:16"))
    >>> ramp.num_batches, [stage.size for stage in ramp.stages]
    (30, [8, 16])
    """

    horizon: Horizon
    """The run; its `batch_sizes` are those of the plan."""
    sizes: PlannedSizes
    world_size: int
    micro_batch_size: int | None
    stages: tuple[Stage, ...]
    events: tuple[Event, ...]
    changes: tuple[Change, ...]
    """What scheduled values begin to do, in words."""
    warnings: tuple[str, ...]
    """What is allowed but probably a mistake, one line each."""
    base: Mapping[str, float]
    """What the schedules' factors multiply; 1 for each name that is not in it."""
    scheduled: tuple[str, ...]
    """The hyper-parameters that have a schedule or a rule, also those that only the run knows."""
    _values: Values

    @property
    def policy(self) -> BatchSizePolicy:
        """The batch size policy."""
        return self.sizes.policy

    @property
    def end(self) -> Timestamp | None:
        """The clock at the end of the run; None if unknown before the run."""
        return self.sizes.end

    @property
    def num_batches(self) -> int | None:
        """The number of batches in the run; None if unknown before the run."""
        return self.sizes.num_batches

    @property
    def is_exact(self) -> bool:
        """Whether the run has exactly these batches.

        Not if the number of samples in the data set is unknown: then an epoch that ends during the
        run cuts a batch, unless `last_batch="carry"`. The counts are then bounds, and `warnings`
        and the table say so.
        """
        return self.sizes.is_exact

    @property
    def num_samples(self) -> int | None:
        """The samples of all batches, without dropped ones; None if unknown."""
        if self.end is None:
            return None
        return sum(cast(int, stage.samples) for stage in self.stages)

    def sample_at_batch(self, batch: int, /) -> int:
        """Return the position at which batch number `batch` (from 0) begins."""
        return self.sizes.sample_at_batch(batch)

    def batch_at_sample(self, sample: int, /) -> int:
        """Return the number of batches after which position `sample` has been reached."""
        return self.sizes.batch_at_sample(sample)

    def timestamp_at_batch(self, batch: int) -> Timestamp:
        """Return the clock at the start of batch number `batch`; after the last, at the end."""
        return self.sizes.timestamp_at_batch(batch)

    def batches(self) -> Iterator[PlannedBatch]:
        """Yield every batch of the run; without end if the end of the run is not known.

        >>> planned = plan(Horizon("20sp"), 8)
        >>> [batch.size for batch in planned.batches()]
        [8, 8, 4]
        """
        for stage in self.stages:
            numbers = itertools.count() if stage.batches is None else range(stage.batches)
            yield from map(self._shared, map(stage.batch, numbers))

    def _shared(self, step: PlannedBatch) -> PlannedBatch:
        """Return a batch with what only a plan says of it."""
        now = step.timestamp
        passes = self.stage_of(now.batch).passes(now.sample, step.size)
        values = self._values(now, step.decided)
        return step._replace(accumulation=passes, values=values)

    def values_at(self, batch: int, /) -> dict[str, float]:
        """Return the hyper-parameters, and values of your own, of batch number `batch` (from 0).

        >>> from stretto.schedules import Linear
        >>> plan(Horizon("40sp"), 8, schedules={"lr": Linear(1, 0)}).values_at(2)
        {'lr': 0.6}

        Raises:
            PlanError: the run has no such batch.
        """
        if self.num_batches is not None and batch >= self.num_batches:
            why = f"the run has {self.num_batches:,} batches, counted from 0"
            raise PlanError.bad("batch", batch, why, f"write {self.num_batches - 1} or less")
        return self._values(self.sizes.timestamp_at_batch(batch), self.stage_of(batch).size)

    @property
    def values_at_end(self) -> dict[str, float] | None:
        """The same after the last batch, which only logs show; None if the end is unknown.

        >>> from stretto.schedules import Linear
        >>> plan(Horizon("40sp"), 8, schedules={"lr": Linear(1, 0)}).values_at_end
        {'lr': 0.0}
        """
        return None if self.end is None else self._values(self.end, self.stages[-1].size)

    def stage_of(self, batch: int, /) -> Stage:
        """Return the stage of batch number `batch`."""
        return self.stages[bisect_right(self.stages, batch, key=lambda one: one.first.batch) - 1]

    def at(self, time: TimeLike, /) -> PlannedBatch:
        """Return the batch at a time: the first that begins when it has passed, with its values.

        >>> from stretto.schedules import Linear
        >>> batch = plan(Horizon("40sp"), 8, schedules={"lr": Linear(1, 0)}).at("50%")
        >>> batch.timestamp.batch, batch.size, batch.values
        (3, 8, {'lr': 0.4})

        Raises:
            PlanError: only the run can tell when that is, or it is over by then.
            ConversionError: a fact is missing.
        """
        found, horizon = Time(time), self.horizon
        axis = horizon.axis(found.unit)
        unknown = unknown_count(horizon, [axis.unit])
        what, instead = f"say what is at '{found}'", "write an earlier time"
        if unknown is not None:
            why = f"it follows {unknown}, which only the run can count"
            raise PlanError.cannot(what, why=why, instead="write the time in 'sp' or 'ba'")
        tick = max(0, math.ceil(horizon.ticks(found, axis)))
        number = first_after(axis, tick, self.sizes)
        if self.num_batches is not None and number >= self.num_batches:
            why = f"the run of {horizon.max_duration} has begun its last batch before"
            raise PlanError.cannot(what, why=why, instead=instead)
        stage = self.stage_of(number)
        return self._shared(stage.batch(number - stage.first.batch))

    def to_json(self) -> dict[str, object]:
        """Return the plan as plain values that JSON keeps exactly.

        >>> plan(Horizon("20sp"), 8).to_json()["num_batches"]
        3
        """
        horizon = self.horizon
        return {
            "max_duration": str(horizon.max_duration),
            **{name: getattr(horizon, name) for name in _FACTS},
            "batch_size": repr(self.policy),
            "world_size": self.world_size,
            "micro_batch_size": saved_size(self.micro_batch_size),
            "is_exact": self.is_exact,
            "num_batches": self.num_batches,
            "num_samples": self.num_samples,
            "end": clock(horizon, self.end),
            "stages": [_stage(horizon, stage) for stage in self.stages],
            "events": [
                {
                    "name": event.name,
                    "count": event.count,
                    "is_exact": event.is_exact,
                    "follows": event.follows,
                    "first": [clock(horizon, timestamp) for timestamp in event.first],
                }
                for event in self.events
            ],
            "changes": [
                {"name": one.name, "what": one.what, "at": clock(horizon, one.at)}
                for one in self.changes
            ],
            "warnings": list(self.warnings),
        }

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.horizon.max_duration}: {self.num_batches} batches "
            f"in {len(self.stages)} stages>"
        )


@knows_foreign
def plan(
    horizon: Horizon,
    policy: PolicyLike,
    *,
    world_size: int = 1,
    micro_batch_size: int | str | None = None,
    even: bool = False,
    schedules: Mapping[str, ScheduleLike] | None = None,
    values: Mapping[str, ScheduleLike] | None = None,
    base: Mapping[str, float] | None = None,
    rule: RuleLike | None = None,
    triggers: Mapping[str, Trigger | TimeLike] | None = None,
    sequence_length: LengthsLike | None = None,
    tracks_tokens: bool = True,
    resume_at: Timestamp | None = None,
) -> Plan:
    """Plan a run without training it, and refuse what would fail later.

    The cost grows with the number of stages, not of batches. A run with the same arguments follows
    the plan batch for batch.

    >>> from stretto.batching import DoublingRamp
    >>> from stretto.schedules import Linear
    >>> horizon = Horizon("2ep", dataset_num_samples=1000)
    >>> planned = plan(horizon, DoublingRamp(8, 32, "50%"), schedules={"lr": Linear(1, 0)})
    >>> [(stage.size, stage.batches) for stage in planned.stages]
    [(8, 63), (16, 31), (32, 32)]
    >>> planned.num_batches, planned.num_samples
    (126, 2000)

    Args:
        horizon: the run; its batch sizes are replaced by the planned ones.
        policy: the batch sizes.
        world_size: how many ranks share a batch.
        micro_batch_size: the most samples that a rank takes at once, or a budget of tokens.
        even: refuse sizes that are not multiples of `world_size * micro_batch_size`.
        schedules: a schedule for each hyper-parameter: `lr`, `weight_decay`, `lr@group`, ...
        values: a schedule for each value of your own, by its name.
        base: what the schedules' factors multiply; by default, 1.
        rule: how learning rates follow the batch size: `{"sqrt": 256}`, `LinearRule(256)`, ...; or
            values by name: `{"betas.1": HalfLifeRule(256)}`.
        triggers: names and times of repeated events: `{"evaluate": "10%"}`.
        sequence_length: tokens of a row of samples of equal length: `"0tok:4096 252Mtok:8192"`.
        tracks_tokens: whether the data can count the tokens of a batch.
        resume_at: where a run resumes; earlier stages are not checked.

    Raises:
        PlanError: the sizes are not known before the run; a stage has fewer samples than there are
            ranks, or cannot be split evenly; the data do not count the tokens that are needed; or
            the run is too long.
        BatchSizeError: the policy cannot be followed on this run, or not with these schedules.
        ConversionError: a time needs a fact that is not known.
        ScheduleError: a schedule does not fit into the run.
    """
    return plan_prepared(
        bind_run(
            horizon,
            policy,
            schedules=schedules,
            values=values,
            triggers=triggers,
            rule=rule,
            sequence_length=sequence_length,
        ),
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        even=even,
        base=base,
        tracks_tokens=tracks_tokens,
        resume_at=resume_at,
    )


def plan_prepared(
    run: Prepared,
    *,
    world_size: int = 1,
    micro_batch_size: int | str | None = None,
    even: bool = False,
    values: Mapping[str, tuple[Schedule, BoundSchedule]] | None = None,
    rules: Mapping[str, Rule] | None = None,
    base: Mapping[str, float] | None = None,
    tracks_tokens: bool = True,
    resume_at: Timestamp | None = None,
    idle_ranks: bool = False,
) -> Plan:
    """Return the plan of a run that `bind_run` has bound.

    Args:
        run: the run.
        world_size: how many ranks share a batch.
        micro_batch_size: the most samples that a rank takes at once, or a budget of tokens.
        even: refuse sizes that are not multiples of `world_size * micro_batch_size`.
        values: by hyper-parameter, its schedule and the same bound, as an optimizer combines them;
            None: the schedules of the run.
        rules: by hyper-parameter, its rule, as an optimizer has it; None: the rules of the run.
        base: what the schedules' factors multiply; by default, 1.
        tracks_tokens: whether the data can count the tokens of a batch.
        resume_at: where a run resumes; earlier stages are not checked.
        idle_ranks: whether a batch may have fewer samples than there are ranks.

    Raises:
        PlanError: as `plan` does.
    """
    world_size = checked_world_size(world_size)
    micro = checked_micro_batch(micro_batch_size, run.facts)
    if values is None:
        values = {name: on_base(name, run, base or {}) for name in run.schedules}
    base, scheduled = _known(base or {}, values), tuple(values)
    values = {**values, **{name: (run.values[name], run.bound_values[name]) for name in run.values}}
    if not tracks_tokens:
        check_tokens(run)
    sizes = run.planned_sizes()
    known, unknown = known_schedules(run.facts, values)
    rules = rules_of(run) if rules is None else rules
    for name, line in without_base(rules, base).items():
        known.pop(name, None)
        unknown.append(line)
    horizon = run.horizon if sizes.is_exact else run.facts.with_batch_sizes(sizes)
    at = hyperparameters(run.facts, known, base, rules)
    schedules = {name: one for name, (one, _) in values.items() if name in known}
    split, periods = split_at_borders(sizes, schedules, run.horizon)
    stages = tuple(
        replace(
            stage,
            world_size=world_size,
            micro_batch_size=micro,
            values=first_last(stage, at),
        )
        for stage in split
    )
    ahead = [
        stage
        for stage in stages
        if resume_at is None or stage.end is None or stage.end.sample > resume_at.sample
    ]
    unruled = hyperparameters(run.facts, known, base, {})
    least, each = min((stage.rows for stage in ahead), default=world_size), run.tokens_each
    for stage in ahead:
        check_stage(stage, even=even, least=least, each=each, idle=idle_ranks)
    return Plan(
        horizon=horizon,
        sizes=sizes,
        world_size=world_size,
        micro_batch_size=micro,
        stages=stages,
        events=tuple(make_event(name, one, sizes) for name, one in run.bound_triggers.items()),
        changes=tuple(changes_of(stages, sizes, unruled, periods)),
        warnings=(
            *warnings_of(horizon, sizes, stages, even=even),
            *rows_text(stages, run.left_out),
            *unknown,
        ),
        base=MappingProxyType(dict(base)),
        scheduled=scheduled,
        _values=at,
    )


def _known(base: Mapping[str, float], schedules: Mapping[str, object]) -> Mapping[str, float]:
    for name, value in cast(Mapping[str, object], base).items():
        if name not in schedules:
            why = "no schedule has that name"
            raise PlanError.bad("base", {name: value}, why, "pass a schedule for it such as 1.0")
        number = math.nan
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = as_float(value)
        if not math.isfinite(number) or (number < 0 and is_learning_rate(name)):
            why = "a base value is a finite number, and a learning rate is not negative"
            raise PlanError.bad("base", {name: value}, why, "write a value such as 1e-3")
    return base


_FACTS = ("dataset_num_samples", "dataset_num_tokens", "tokens_per_sample", "last_batch")
_COUNTS = Timestamp._fields[:7]
"""The counts of the clock, without its times."""


POINTS = 2_000
"""Most batches whose hyper-parameters `plan_record` and pictures show."""


def plan_record(plan: Plan) -> dict[str, object]:
    """Return `to_json` with the hyper-parameters at up to 2,000 batches, for pictures."""
    curve: dict[str, object] = {}
    if plan.num_batches is not None:
        numbers = batches_to_show(plan, plan.num_batches)
        values = [plan.values_at(number) for number in numbers]
        at = [plan.timestamp_at_batch(number) for number in numbers]
        curve = {
            "batch": [one.batch for one in at],
            "sample": [one.sample for one in at],
            "token": [one.token for one in at],
            "values": {name: [row[name] for row in values] for name in (values or [{}])[0]},
        }
    return plan.to_json() | {"curve": curve}


def batches_to_show(plan: Plan, count: int) -> Sequence[int]:
    """Return batches spread evenly over a run of `count`, and the first of each stage."""
    if count <= POINTS:
        return range(count)
    spread = {number * (count - 1) // (POINTS - 1) for number in range(POINTS)}
    return sorted(spread | {stage.first.batch for stage in plan.stages[:POINTS]})


def clock(horizon: Horizon, timestamp: Timestamp | None) -> dict[str, int | str] | None:
    """Return the counts of a timestamp, and the exact epoch and fraction of the run as times."""
    if timestamp is None:
        return None
    state = timestamp.to_state()
    counts: dict[str, int | str] = {name: state[name] for name in _COUNTS}
    counts["ep"] = str(horizon.position(timestamp, "ep"))
    counts["dur"] = str(horizon.position(timestamp, "dur"))
    return counts


def moment_record(plan: Plan, time: str) -> dict[str, object]:
    """Return what a plan says of a time, as plain values that JSON keeps exactly."""
    batch = plan.at(time)
    now = batch.timestamp
    return {
        "at": str(Time(time)),
        "stage": plan.stage_of(now.batch).number,
        "size": batch.size,
        "tokens": plan.horizon.tokens(now.sample, now.sample + batch.size),
        "accumulation": batch.accumulation,
        "values": batch.values,
        "first": clock(plan.horizon, now),
    }


def _stage(horizon: Horizon, stage: Stage) -> dict[str, object]:
    same = ("number", "size", "batches", "samples", "skipped", "accumulation")
    of_tokens = {}
    if isinstance(stage.size, Tokens):
        of_tokens = {"unit": "tok", "tokens": stage.tokens, "whole_sizes": list(stage.whole_sizes)}
    return {
        **{name: getattr(stage, name) for name in same},
        **of_tokens,
        "cut_sizes": list(stage.cut_sizes),
        "shares": list(stage.shares),
        "first": clock(horizon, stage.first),
        "end": clock(horizon, stage.end),
        "values": {name: value._asdict() for name, value in stage.values.items()},
    }
