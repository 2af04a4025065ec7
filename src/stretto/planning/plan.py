"""`plan`: a whole run, computed without training."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast, final

from stretto.batching import BatchSizePolicy, Bound, PolicyLike, RuleLike
from stretto.batching.policy import as_float, checked_size, checked_world_size
from stretto.batching.rules import is_learning_rate
from stretto.batching.split import split
from stretto.errors import PlanError, shown
from stretto.planning.bind import Prepared, bind_run, check_tokens
from stretto.planning.plan_warnings import growth_alone, warnings_of
from stretto.planning.sizes import PlannedSizes, walk
from stretto.planning.stages import (
    Event,
    Stage,
    Values,
    check_stage,
    hyperparameters,
    known_schedules,
    make_event,
    make_stage,
)
from stretto.schedules import BoundSchedule, Schedule, ScheduleLike
from stretto.timing import Horizon, TimeLike, Timestamp, Trigger


class PlannedBatch(NamedTuple):
    """One batch of a plan."""

    timestamp: Timestamp
    """The clock at its start."""
    size: int
    """Its samples, over all ranks."""
    decided: int
    """The size before it was cut at the end of the epoch or of the run."""
    accumulation: int
    """Micro-batches of each rank."""
    values: dict[str, float]
    """The hyper-parameters."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A run without training, made by `plan`: its stages, totals and events. A frozen value.

    It knows where each batch begins, so it serves as the `batch_sizes` of a horizon.

    >>> from stretto import Horizon, Steps, plan
    >>> ramp = plan(Horizon("1ep", dataset_num_samples=320), Steps("0sp:8 160sp:16"))
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
    warnings: tuple[str, ...]
    """What is allowed but probably a mistake, one line each."""
    _policy: Bound
    _values: Values

    @property
    def policy(self) -> BatchSizePolicy:
        """The batch size policy."""
        return self.sizes.policy

    @property
    def end(self) -> Timestamp | None:
        """The clock at the end of the run; None if only the run can tell."""
        return self.sizes.end

    @property
    def num_batches(self) -> int | None:
        """The number of batches in the run; None if only the run can tell."""
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
        for step in walk(self.horizon, self._policy):
            yield PlannedBatch(
                step.timestamp,
                step.size,
                step.decided,
                split(step.size, self.world_size, self.micro_batch_size).accumulation,
                self._values(step.timestamp, step.decided),
            )

    def values_at(self, batch: int, /) -> dict[str, float]:
        """Return the hyper-parameters of batch number `batch` (from 0).

        >>> from stretto.schedules import Linear
        >>> plan(Horizon("40sp"), 8, schedules={"lr": Linear(1, 0)}).values_at(2)
        {'lr': 0.6}

        Raises:
            PlanError: the run has no such batch.
        """
        if self.num_batches is not None and batch >= self.num_batches:
            raise PlanError.cannot(
                f"tell the hyper-parameters of batch {batch:,}",
                why=f"the run has {self.num_batches:,}, counted from 0",
                instead=f"write a number of at most {self.num_batches - 1:,}",
            )
        after = bisect_right(self.stages, batch, key=lambda stage: stage.first.batch)
        timestamp = self.sizes.timestamp_at_batch(batch)
        return self._values(timestamp, self.stages[after - 1].size)

    def to_json(self) -> dict[str, object]:
        """Return the plan as plain values that JSON keeps exactly.

        >>> plan(Horizon("20sp"), 8).to_json()["num_batches"]
        3
        """
        from stretto.planning.table import to_record

        return to_record(self)

    def table(self, *, max_rows: int = 24) -> str:
        """Return the plan as text of at most 100 columns.

        Args:
            max_rows: if there are more stages than this, neighbours share a row.
        """
        from stretto.planning.table import to_table

        return to_table(self, max_rows=max_rows)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.horizon.max_duration}: {self.num_batches} batches "
            f"in {len(self.stages)} stages>"
        )


def plan(
    horizon: Horizon,
    policy: PolicyLike,
    *,
    world_size: int = 1,
    micro_batch_size: int | None = None,
    even: bool = False,
    schedules: Mapping[str, ScheduleLike] | None = None,
    base: Mapping[str, float] | None = None,
    rule: RuleLike | None = None,
    triggers: Mapping[str, Trigger | TimeLike] | None = None,
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
        micro_batch_size: the most samples that a rank takes at once.
        even: refuse sizes that are not multiples of `world_size * micro_batch_size`.
        schedules: a schedule for each hyper-parameter: `lr`, `weight_decay`, `lr@group`, ...
        base: what the schedules' factors multiply; by default, 1.
        rule: how learning rates follow the batch size: `{"sqrt": 256}`, `LinearRule(256)`, ...
        triggers: names and times of repeated events: `{"evaluate": "10%"}`.
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
        bind_run(horizon, policy, schedules=schedules, triggers=triggers, rule=rule),
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
    micro_batch_size: int | None = None,
    even: bool = False,
    values: Mapping[str, tuple[Schedule, BoundSchedule]] | None = None,
    base: Mapping[str, float] | None = None,
    tracks_tokens: bool = True,
    resume_at: Timestamp | None = None,
) -> Plan:
    """Return the plan of a run that `bind_run` has bound.

    Args:
        run: the run.
        world_size: how many ranks share a batch.
        micro_batch_size: the most samples that a rank takes at once.
        even: refuse sizes that are not multiples of `world_size * micro_batch_size`.
        values: by hyper-parameter, its schedule and the same bound, as an optimizer combines them;
            None: the schedules of the run.
        base: what the schedules' factors multiply; by default, 1.
        tracks_tokens: whether the data can count the tokens of a batch.
        resume_at: where a run resumes; earlier stages are not checked.

    Raises:
        PlanError: as `plan` does.
    """
    world_size = checked_world_size(world_size)
    if micro_batch_size is not None:
        micro_batch_size = checked_size(micro_batch_size, "a micro-batch size")
    if values is None:
        values = {name: (one, run.bound_schedules[name]) for name, one in run.schedules.items()}
    if not tracks_tokens:
        check_tokens(run)
    sizes = run.planned_sizes()
    known, unknown = known_schedules(run.facts, values)
    horizon = run.horizon if sizes.is_exact else run.facts.with_batch_sizes(sizes)
    at = hyperparameters(run.facts, known, _known(base or {}, values), run.rule)
    stages = tuple(
        make_stage(
            run.facts,
            segment,
            number,
            world_size=world_size,
            micro_batch_size=micro_batch_size,
            values=at,
        )
        for number, segment in enumerate(sizes.segments, 1)
    )
    for stage in stages:
        if resume_at is None or stage.end is None or stage.end.sample > resume_at.sample:
            check_stage(
                stage,
                world_size=world_size,
                micro_batch_size=micro_batch_size,
                even=even,
                is_coupled=run.bound_policy.is_coupled,
            )
    return Plan(
        horizon=horizon,
        sizes=sizes,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        stages=stages,
        events=tuple(make_event(name, one, sizes) for name, one in run.bound_triggers.items()),
        warnings=(
            *warnings_of(horizon, sizes, stages, world_size=world_size, even=even),
            *growth_alone(run.policy, run.schedules, run.rule),
            *unknown,
        ),
        _policy=run.bound_policy,
        _values=at,
    )


def _known(base: Mapping[str, float], schedules: Mapping[str, object]) -> Mapping[str, float]:
    for name in base:
        if name not in schedules:
            raise PlanError.cannot(
                f"plan with the base value of {name!r}",
                why="no schedule has that name",
                instead="leave it out, or pass a schedule for it such as 1.0",
            )
        value: object = base[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        number = as_float(cast(float, value)) if is_number else math.nan
        if not math.isfinite(number) or (number < 0 and is_learning_rate(name)):
            least = " of at least 0" if is_learning_rate(name) else ""
            raise PlanError.cannot(
                f"plan with {shown(value)} as the base value of {name!r}",
                why=f"it is not a finite number{least}",
                instead="write what the optimizer is built with, such as 1e-3",
            )
    return base
