"""Steps of iterables: incoming batches are cut into exact ones."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.data.fetching.shares import FetchedStep, Plans, pinned
from stretto.data.iterables.streams import Stream
from stretto.errors import DataError
from stretto.planning import StepPlan
from stretto.timing import Horizon


def cut_steps(
    stream: Stream, kind: str, horizon: Horizon, plans: Plans, *, pins: bool
) -> Iterator[FetchedStep]:
    """Cut each batch out of the chunks of the data, as views.

    Args:
        stream: the data as read by the ranks.
        kind: the type of the data, for messages.
        horizon: the run; its `dataset_num_samples`, if known, must match the data.
        plans: the decided batches.
        pins: whether batches go to pinned memory.
    """
    is_sized = horizon.dataset_num_samples is not None
    for plan, start in plans:
        if is_sized and plan.skipped:
            stream.next_epoch()
        cut = _sized if is_sized else _unsized
        size, crossings = cut(stream, kind, horizon, plan, start)
        micro_batches = stream.micro_batches()
        if not is_sized and horizon.last_batch == "drop" and size < plan.size:
            micro_batches = []
        elif pins:
            micro_batches = [(pinned(batch), count) for batch, count in micro_batches]
        yield FetchedStep(plan, micro_batches, size, crossings)


def _sized(
    stream: Stream, kind: str, horizon: Horizon, plan: StepPlan, start: int
) -> tuple[int, tuple[int, ...]]:
    """Take exactly the samples of the plan, from as many epochs as it spans."""
    num_samples = horizon.dataset_num_samples
    assert num_samples is not None
    within, taken = plan.timestamp.sample_in_epoch + start - plan.timestamp.sample, 0
    while taken < plan.size:
        wanted = min(plan.size - taken, num_samples - within)
        found = stream.take(wanted, start + taken)
        if not found and not within:
            raise _empty(kind)
        if found < wanted:
            raise _wrong_length(num_samples, f"they end after {within + found}")
        taken, within = taken + wanted, within + wanted
        if within == num_samples:
            if not stream.is_at_end:
                raise _wrong_length(num_samples, "they go on after that")
            stream.next_epoch()
            within = 0
    if horizon.last_batch == "drop" and plan.ends_epochs and within:
        stream.next_epoch()
    return taken, ()


def _unsized(
    stream: Stream, kind: str, horizon: Horizon, plan: StepPlan, start: int
) -> tuple[int, tuple[int, ...]]:
    """Take up to the samples of the plan; an epoch ends with the data."""
    taken, ends_at = 0, list[int]()
    while taken < plan.size:
        found = stream.take(plan.size - taken, start + taken)
        if not found:
            raise _empty(kind)
        taken += found
        if not stream.is_at_end:
            break
        ends_at.append(taken)
        stream.next_epoch()
        after = plan.timestamp._replace(epoch=plan.timestamp.epoch + len(ends_at))
        if horizon.last_batch != "carry" or horizon.is_done(after):
            break
    return taken, tuple(taken - end for end in ends_at)


def _empty(kind: str) -> DataError:
    return DataError.cannot(
        f"read data of type {kind}",
        why="an epoch of it has no samples",
        instead="pass an iterable that yields at least one batch each time",
    )


def _wrong_length(num_samples: int, why: str) -> DataError:
    return DataError.cannot(
        f"read an epoch of {num_samples} samples",
        why=why,
        instead="pass the right num_samples, or leave it out where no time needs it",
    )
