"""How many steps and micro-batches a run has, for trainers that want to know it before."""

from __future__ import annotations

import math
from typing import NamedTuple

from stretto.batching import Tokens
from stretto.batching.pack import num_passes
from stretto.run import Run
from stretto.timing import Timestamp, TimeUnit
from stretto.timing.batches import EqualBatches

UNREACHED = 2**40
"""Used where a framework needs a number that is not known. No epoch has as many batches."""


class NumSteps(NamedTuple):
    """A number of steps, or a number that it does not exceed."""

    most: int | None
    """The largest that it can be; None if that is unknown."""
    is_exact: bool
    """Whether it is that number."""

    @property
    def exact(self) -> int | None:
        """The number; None if it is not known."""
        return self.most if self.is_exact else None


def end_of(run: Run) -> int | None:
    """Return the position at which a run ends; None if unknown before the run."""
    sizes = run.prepared.sizes
    if sizes is not None and sizes.end is not None:
        return sizes.end.sample
    return run.prepared.horizon.end_sample


def steps_left(run: Run, now: Timestamp | None = None) -> NumSteps:
    """Return how many steps come after a timestamp; by default, after the clock of the run."""
    now = run.timer.timestamp if now is None else now
    length = run.prepared.facts.max_duration
    if length.unit is TimeUnit.BATCH:
        return NumSteps(max(0, math.ceil(length.amount) - now.batch), is_exact=True)
    end = end_of(run)
    return NumSteps(None, is_exact=False) if end is None else steps_between(run, now.sample, end)


def steps_in_epoch(run: Run, epoch: int) -> NumSteps:
    """Return how many steps begin in an epoch, from 0."""
    num_samples, end = run.prepared.facts.dataset_num_samples, end_of(run)
    if num_samples is None:
        return NumSteps(None, is_exact=False)
    start, stop = epoch * num_samples, (epoch + 1) * num_samples
    found = steps_between(run, min(start, end or start), min(stop, end or stop))
    # Unless sizes are planned, its first samples may belong to a batch of the epoch before.
    is_planned = end is not None and run.prepared.sizes is not None
    return found if is_planned or found.most == 0 else NumSteps(found.most, is_exact=False)


def steps_between(run: Run, start: int, stop: int) -> NumSteps:
    """Return how many steps begin in `[start, stop)`; positions up to the end of the run."""
    sizes = run.prepared.sizes
    if sizes is None:
        return _most_between(run, start, stop)
    count = sizes.batch_at_sample(stop) - sizes.batch_at_sample(start)
    return NumSteps(count if sizes.is_exact else None, sizes.is_exact)


def _most_between(run: Run, start: int, stop: int) -> NumSteps:
    """Return the number of steps if all had the smallest size of the policy."""
    facts, bounds = run.prepared.facts, run.prepared.bound_policy.bounds
    if stop <= start:
        return NumSteps(0, is_exact=True)
    if bounds is None or facts.dataset_num_samples is None:
        return NumSteps(None, is_exact=False)
    epoch, within = divmod(start, facts.dataset_num_samples)
    first = Timestamp(epoch=epoch, sample=start, sample_in_epoch=within)
    least, lengths = bounds[0], facts.lengths
    if isinstance(least, Tokens):
        least = max(
            1, least // (facts.tokens_per_sample or (lengths.longest if lengths else least))
        )
    count = EqualBatches(facts, first, least).count_before(stop)
    return NumSteps(count, is_exact=bounds[0] == bounds[1] and least == bounds[0])


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
    total, lengths = 0, run.horizon.lengths
    world_size, micro = run.loader.world_size, run.loader.micro_batch_size
    for stage in sizes.stages:
        first, after = stage.count_before(start), stage.count_before(stop)
        numbers = [(first, after - 1 - first), (after - 1, 1)]  # the last one may be cut
        if isinstance(micro, Tokens) or isinstance(stage.size, Tokens):  # each batch has its own
            numbers = [(number, 1) for number in range(first, after)]
        for number, count in numbers if after > first else ():
            place = stage.equal.position(number)
            batch = range(place, place + stage.size_of(number))
            total += count * (num_passes(batch, world_size, micro, lengths, row=stage.row) or 0)
    return total


def smallest_step(run: Run) -> int | None:
    """Return the samples of the smallest step, as far as that is known before the run."""
    sizes, bounds = run.prepared.sizes, run.prepared.bound_policy.bounds
    if sizes is None:
        return None if not bounds or isinstance(bounds[0], Tokens) else bounds[0]
    return min(min((*stage.whole_sizes, *stage.cut_sizes)) for stage in sizes.stages)
