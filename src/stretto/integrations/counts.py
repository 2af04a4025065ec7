"""How many steps and micro-batches a run has, for trainers that want to know it before."""

from __future__ import annotations

import math
from typing import NamedTuple

from stretto.batching import split
from stretto.run import Run
from stretto.timing import Timestamp, TimeUnit
from stretto.timing.horizon import EqualBatches

UNKNOWN = 2**40
"""Used where a framework needs a number that is not known. No epoch has as many batches."""


class Count(NamedTuple):
    """A number of steps, exact or between two bounds.

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


def end_of(run: Run) -> int | None:
    """Return the position at which a run ends; None if unknown before the run."""
    sizes = run.prepared.sizes
    if sizes is not None and sizes.end is not None:
        return sizes.end.sample
    return run.prepared.horizon.end_sample


def steps_left(run: Run, now: Timestamp | None = None) -> Count:
    """Return how many steps come after a timestamp; by default, after the clock of the run."""
    now = run.timer.timestamp if now is None else now
    length = run.prepared.facts.max_duration
    if length.unit is TimeUnit.BATCH:
        left = max(0, math.ceil(length.amount) - now.batch)
        return Count(left, left)
    sizes, end = run.prepared.sizes, end_of(run)
    if end is None:
        return Count(0, None)
    if sizes is not None and sizes.sample_at_batch(now.batch) != now.sample:
        return _between_bounds(run, now.sample, end)  # resumed after other sizes
    return steps_between(run, now.sample, end)


def num_steps(run: Run) -> Count:
    """Return the number of steps in the whole run."""
    return steps_left(run, Timestamp())


def steps_in_epoch(run: Run, epoch: int) -> Count:
    """Return how many steps begin in an epoch, from 0."""
    facts, end = run.prepared.facts, end_of(run)
    num_samples = facts.dataset_num_samples
    if num_samples is None:
        return Count(0, None)
    start, stop = epoch * num_samples, (epoch + 1) * num_samples
    found = steps_between(run, min(start, end or start), min(stop, end or stop))
    if end is None:
        return Count(0, found.most)
    is_shared = run.prepared.sizes is None and facts.last_batch == "carry"
    # Its first samples may belong to a batch of the epoch before.
    return Count(max(0, found.least - 1), found.most) if is_shared else found


def steps_between(run: Run, start: int, stop: int) -> Count:
    """Return how many steps begin in `[start, stop)`; positions up to the end of the run."""
    sizes = run.prepared.sizes
    if sizes is None:
        return _between_bounds(run, start, stop)
    count = sizes.batch_at_sample(stop) - sizes.batch_at_sample(start)
    return Count(count, count if sizes.is_exact else None)


def _between_bounds(run: Run, start: int, stop: int) -> Count:
    """Return the number of steps if all had the largest size of the policy, or the smallest."""
    facts, bounds = run.prepared.facts, run.prepared.bound_policy.bounds
    if stop <= start:
        return Count(0, 0)
    if bounds is None or facts.dataset_num_samples is None:
        return Count(1, None)
    epoch, within = divmod(start, facts.dataset_num_samples)
    first = Timestamp(epoch=epoch, sample=start, sample_in_epoch=within)
    smallest, largest = (EqualBatches(facts, first, size) for size in bounds)
    return Count(largest.count_before(stop), smallest.count_before(stop))


def micro_batches_in_epoch(run: Run, epoch: int) -> int | None:
    """Return the micro-batches of each rank in the steps that begin in an epoch.

    None if the sizes are not planned. Iterables may have more: they are also cut where their own
    batches end.
    """
    num_samples = run.prepared.facts.dataset_num_samples
    if num_samples is None or not run.prepared.is_planned:
        return None
    return planned_micro_batches(run, epoch * num_samples, (epoch + 1) * num_samples)


def planned_micro_batches(run: Run, start: int, stop: int) -> int:
    """Return how many micro-batches each rank has in the planned steps in `[start, stop)`."""
    sizes = run.prepared.planned_sizes()
    total, end = 0, end_of(run)
    for stage in sizes.stages:
        first, after = stage.count_before(start), stage.count_before(stop)
        if first == after:
            continue
        last = stage.equal.size_of(after - 1)
        if end is not None and run.prepared.facts.last_batch != "drop":
            last = min(last, end - stage.equal.position(after - 1))
        total += sum(
            count * split(size, run.loader.world_size, run.loader.micro_batch_size).accumulation
            for size, count in ((stage.size, after - 1 - first), (last, 1))
        )
    return total


def smallest_step(run: Run) -> int | None:
    """Return the samples of the smallest step, as far as that is known before the run."""
    sizes, bounds = run.prepared.sizes, run.prepared.bound_policy.bounds
    if sizes is None:
        return bounds[0] if bounds else None
    return min(min((stage.size, *stage.cut_sizes)) for stage in sizes.stages)
