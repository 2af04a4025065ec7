"""How many steps and micro-batches lie between two positions, without walking over them."""

from __future__ import annotations

import math
from typing import NamedTuple

from stretto.batching import split
from stretto.planning import Prepared
from stretto.planning.sizes import Segment
from stretto.timing import Timestamp, TimeUnit
from stretto.timing.batch_sizes import EqualBatches

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
    """Return the position at which a run ends; None if only the run can tell."""
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
    least, most = (_equal(run, start, size).count_before(stop) for size in reversed(bounds))
    return Count(least, most)


def _equal(run: Prepared, start: int, size: int) -> EqualBatches:
    num_samples = run.facts.dataset_num_samples
    assert num_samples is not None, "checked"
    epoch, within = divmod(start, num_samples)
    first = Timestamp(epoch=epoch, sample=start, sample_in_epoch=within)
    return EqualBatches(first, size, num_samples, run.facts.last_batch)


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
    for segment in run.sizes.segments:
        first, after = _index(segment, start), _index(segment, stop)
        if first == after:
            continue
        batches = segment.batches
        last = batches.size_of(after - 1)
        if end is not None and run.facts.last_batch != "drop":
            last = min(last, end - batches.position(after - 1))
        total += sum(
            count * split(size, world_size, micro_batch_size).accumulation
            for size, count in ((batches.size, after - 1 - first), (last, 1))
        )
    return total


def _index(segment: Segment, sample: int) -> int:
    """Return how many batches of a segment begin before a position."""
    count = segment.batches.count_before(sample)
    return count if segment.count is None else min(count, segment.count)


def smallest_step(run: Prepared) -> int | None:
    """Return the samples of the smallest step, as far as that is known before the run."""
    if run.sizes is None:
        return run.bound_policy.bounds[0] if run.bound_policy.bounds else None
    end, num_samples, found = end_of(run), run.facts.dataset_num_samples, []
    for segment in run.sizes.segments:
        batches, count = segment.batches, segment.count
        ends = [] if count is None else [count - 1]
        if num_samples is not None:  # of the epochs, those after the second end alike
            epoch = batches.first.epoch
            stops = [(epoch + number) * num_samples for number in (1, 2)]
            ends += [_index(segment, stop) - 1 for stop in stops]
        for number in {one for one in ends if one >= 0} | {0}:
            size, start = batches.size_of(number), batches.position(number)
            cut = size if end is None or run.facts.last_batch == "drop" else end - start
            found.append(min(size, cut))
    return min(found)
