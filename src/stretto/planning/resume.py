"""`resumed`: a run bound at the clock of a resume, after batches of any other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

from stretto.batching import Bound, Hold, PolicyState, Signals
from stretto.batching.policy import Decision, Tokens
from stretto.batching.steps import bound_steps
from stretto.errors import PlanError
from stretto.planning.bind import Prepared
from stretto.planning.sizes import PlannedSizes, UnknownSizes, horizon_of
from stretto.timing import Timestamp, TimeUnit

Past: TypeAlias = Sequence[tuple[int, int]]
"""The batch sizes that a run has had: the number of the first batch of each, and the size."""


def resumed(run: Prepared, now: Timestamp, past: Past | None, state: PolicyState) -> Prepared:
    """Return a run bound at the clock of a resume: the batches that it had, then its policy's.

    >>> from stretto.planning import bind_run
    >>> from stretto.timing import Horizon
    >>> run = bind_run(Horizon("1ep", dataset_num_samples=100), 20)
    >>> again = resumed(run, Timestamp(batch=6, sample=60), [(0, 10)], {})
    >>> [(stage.size, stage.batches) for stage in again.sizes.stages]
    [(10, 6), (20, 2)]

    Args:
        run: the run, bound from its start on.
        now: where it is resumed.
        past: its batch sizes until then; None: they were not kept.
        state: the policy's state.

    Raises:
        ConversionError: a time needs a place in the past, which is not known.
        ScheduleError: a schedule does not fit into the run.
    """
    # Where lengths decide, the batches up to here are not counted again.
    is_walked = run.facts.lengths is None
    if not now.batch or (is_walked and passes(run.sizes, now, past)):
        return run
    facts, sizes, refusal, before = run.facts, None, run.refusal, None
    batches = facts.axis(TimeUnit.BATCH)
    if past is not None:
        edges = [(batches, first) for first, _ in past[1:]]
        had = bound_steps(edges, tuple(size for _, size in past))
        had = replace(had, unit=run.bound_policy.unit)
        with suppress(PlanError):  # too many sizes for a run whose end is not known
            before = PlannedSizes(facts, run.policy, bound=had)
        before = before if not is_walked or passes(before, now, None) else None
    if before is None and run.sizes is not None and not run.sizes.is_exact:
        return run  # a bound, as before: the end of an epoch may have cut any batch
    if before is not None and run.sizes is not None:
        end = Hold(((batches, now.batch),))
        bound = _continued(had, run.bound_policy, end, state)
        sizes = PlannedSizes(facts, run.policy, bound=bound)
        if not is_walked:
            first = (now, state)
            sizes = PlannedSizes(facts, run.policy, bound=run.bound_policy, first=first, past=sizes)
        horizon = horizon_of(sizes)
    else:
        if refusal is None:
            refusal = PlanError.cannot(
                "know where the batches of the run begin",
                why="the checkpoint does not say which sizes they had",
                instead="resume with the sizes of that run",
            )
        unknown = UnknownSizes(str(refusal.message.why), past=before, until=now)
        horizon = facts.with_batch_sizes(unknown)
    bound_schedules = {name: one.bind(horizon) for name, one in run.schedules.items()}
    return replace(
        run,
        horizon=horizon,
        sizes=sizes,
        refusal=refusal,
        bound_schedules=bound_schedules,
        bound_values={name: one.bind(horizon) for name, one in run.values.items()},
    )


def passes(sizes: PlannedSizes | None, now: Timestamp, past: Past | None) -> bool:
    """Return whether batches lead to a clock, and through the sizes of the past if it is known."""
    if sizes is None or sizes.timestamp_at_batch(now.batch)[1:3] != now[1:3]:
        return False
    stages = [(one.first.batch, one.size) for one in sizes.stages if one.first.batch < now.batch]
    had = [next(same) for _, same in groupby(stages, key=itemgetter(1))]
    return past is None or had == list(past)


def _continued(had: Bound, bound: Bound, end: Hold, state: PolicyState) -> Bound:
    """Return the sizes that a run had up to `end`, then those of `bound` from `state` on."""

    def decide(timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
        if end.covers(timestamp):
            return had.decide(timestamp, state, signals)[0], state
        size, after = bound.decide(timestamp, state, signals)
        return Tokens(size) if bound.unit is TimeUnit.TOKEN else size, after

    def holds_until(timestamp: Timestamp, state: PolicyState) -> Hold | None:
        if not end.covers(timestamp):
            return bound.holds_until(timestamp, state)
        hold = had.holds_until(timestamp, state)
        return hold and hold & end

    # The sizes of the past, which may have had another unit, say their own.
    return replace(
        bound,
        decide=decide,
        holds_until=holds_until,
        start=state,
        units=bound.units | {TimeUnit.BATCH},
        unit=TimeUnit.SAMPLE,
        asked=None,
    )
