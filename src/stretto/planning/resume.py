"""`resumed`: a run bound at the clock of a resume, after batches of any other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from stretto.batching import PolicyState
from stretto.errors import PlanError
from stretto.planning.bind import Prepared
from stretto.planning.sizes import Had, PlannedSizes, UnknownSizes, horizon_of
from stretto.timing import Timestamp


def resumed(
    run: Prepared, now: Timestamp, past: Sequence[Had] | None, state: PolicyState
) -> Prepared:
    """Return a run bound at the clock of a resume: the batches that it had, then its policy's.

    >>> from stretto.planning import bind_run
    >>> from stretto.planning.sizes import Had
    >>> from stretto.timing import Horizon
    >>> run = bind_run(Horizon("1ep", dataset_num_samples=100), 20)
    >>> again = resumed(run, Timestamp(batch=6, sample=60), [Had(0, 10)], {})
    >>> [(stage.size, stage.batches) for stage in again.sizes.stages]
    [(10, 6), (20, 2)]

    Args:
        run: the run, bound from its start on.
        now: where it is resumed.
        past: its batches until then; None: they were not kept.
        state: the policy's state.

    Raises:
        ConversionError: a time needs a place in the past, which is not known.
        ScheduleError: a schedule does not fit into the run.
    """
    facts, sizes, refusal, before = run.facts, None, run.refusal, None
    # Where lengths decide, the batches up to here are not counted again. A policy with a state may
    # have begun anew, so that its plan from the start is another run's.
    is_plain = facts.lengths is None and not (run.bound_policy.start and past)
    if not now.batch or (is_plain and passes(run.sizes, now, past)):
        return run
    if past is not None:
        had = [*past, Had(now.batch, 1, now.sample)]
        with suppress(PlanError):  # an epoch of unknown length has ended
            before = PlannedSizes(facts, run.policy, bound=run.bound_policy, had=had)
    if before is None and run.sizes is not None and not run.sizes.is_exact:
        return run  # a bound, as before: the end of an epoch may have cut any batch
    if before is not None and run.sizes is not None:
        first = Timestamp(*now[:7]), state
        sizes = PlannedSizes(facts, run.policy, bound=run.bound_policy, first=first, past=before)
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


def passes(sizes: PlannedSizes | None, now: Timestamp, past: Sequence[Had] | None) -> bool:
    """Return whether batches lead to a clock, and through the sizes of the past if it is known."""
    if sizes is None or sizes.timestamp_at_batch(now.batch)[1:3] != now[1:3]:
        return False
    stages = [(one.first.batch, one.size) for one in sizes.stages if one.first.batch < now.batch]
    had = [next(same) for _, same in groupby(stages, key=itemgetter(1))]
    batches = [(one.first, one.size) for one in past or ()]
    return past is None or had == [next(same) for _, same in groupby(batches, key=itemgetter(1))]
