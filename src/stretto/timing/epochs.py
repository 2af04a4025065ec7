"""The arithmetic of epochs, and which counts are known before the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, cast

from stretto.errors import TimeError
from stretto.timing.batches import EqualBatches
from stretto.timing.grammar import TimeUnit
from stretto.timing.horizon import Horizon
from stretto.timing.timestamp import Timestamp


def advance(
    horizon: Horizon,
    timestamp: Timestamp,
    size: int,
    *,
    tokens: int | None = None,
    nanoseconds: int = 0,
    tokens_of_last: Callable[[int], int] | None = None,
    next_size: int | None = None,
) -> Timestamp:
    """Return the clock after a batch of `size` samples that started at `timestamp`.

    Under `drop` the epoch ends when fewer samples are left than the next batch would have.

    >>> horizon = Horizon("2ep", dataset_num_samples=20, last_batch="carry")
    >>> after = advance(horizon, Timestamp(batch=2, sample=16, sample_in_epoch=16), 8)
    >>> after.epoch, after.batch, after.sample, after.sample_in_epoch
    (1, 3, 24, 4)

    Args:
        horizon: what an epoch is and what happens at its end.
        timestamp: the clock at the start of the batch.
        size: the batch's samples, over all ranks.
        tokens: its tokens, over all ranks; by default, `tokens_per_sample` each, or what the
            lengths of its samples say.
        nanoseconds: the wall time that it took.
        tokens_of_last: returns the tokens of its last samples, for a batch that is carried into
            the next epoch; by default, they are their share of all tokens, rounded down. Not
            called if the length of each sample is known.
        next_size: the samples of the next batch of the same decision; by default, `size`.
    """
    lengths = horizon.lengths
    epoch, batch, sample, token, batch_, sample_, token_, run, job, epoch_ns, _ = timestamp
    if tokens is None:
        each = horizon.tokens_per_sample or 0
        tokens = size * each if lengths is None else lengths.tokens(sample, sample + size)
    within = sample_ + size
    # tuple.__new__ skips the keyword handling of a named tuple: 0.3 us instead of 0.6.
    after = tuple.__new__(
        Timestamp,
        (
            epoch, batch + 1, sample + size, token + tokens,
            batch_ + 1, within, token_ + tokens,
            run + nanoseconds, job + nanoseconds, epoch_ns + nanoseconds, nanoseconds,
        ),
    )  # fmt: skip
    num_samples = horizon.dataset_num_samples
    if num_samples is None:
        return after
    if horizon.last_batch == "drop":
        least = size if next_size is None else next_size
        return next_epoch(horizon, after) if num_samples - within < least else after
    if within < num_samples:
        return after
    epochs, carried = divmod(within, num_samples)
    left = tokens * carried // size
    if lengths is not None:
        left = lengths.tokens(sample + size - carried, sample + size)
    elif carried and tokens_of_last is not None:
        left = tokens_of_last(carried)
        if left > tokens:
            why, instead = f"the whole batch has {tokens}", "count tokens sample by sample"
            raise TimeError.bad("tokens_of_last", left, why, instead)
    return next_epoch(horizon, after, epochs=epochs, samples=carried, tokens=left)


def next_epoch(
    horizon: Horizon, timestamp: Timestamp, *, epochs: int = 1, samples: int = 0, tokens: int = 0
) -> Timestamp:
    """Return the clock in the next epoch, without a batch in between.

    It skips what is left of the present epoch, such as less than a batch under `drop`.

    Args:
        horizon: what an epoch is.
        timestamp: the clock, in the present epoch or beyond its end.
        epochs: how many epochs end.
        samples: the samples of the last batch that are in the new epoch already.
        tokens: their tokens.
    """
    num_samples, skipped, sample = horizon.dataset_num_samples, 0, timestamp.sample
    if num_samples is not None:
        skipped = epochs * num_samples + samples - timestamp.sample_in_epoch
    return timestamp._replace(
        epoch=timestamp.epoch + epochs,
        sample=sample + skipped,
        token=timestamp.token + horizon.tokens(sample, sample + skipped),
        batch_in_epoch=0,
        sample_in_epoch=samples,
        token_in_epoch=tokens,
        epoch_nanoseconds=0,
    )


def outgrows_epoch(horizon: Horizon, timestamp: Timestamp, size: int) -> bool:
    """Return whether `last_batch="drop"` skips the rest of the epoch at `timestamp`."""
    num_samples = horizon.dataset_num_samples
    if horizon.last_batch != "drop" or num_samples is None:
        return False
    return size > num_samples - timestamp.sample_in_epoch


def cut(horizon: Horizon, timestamp: Timestamp, size: int) -> int:
    """Return how many samples of a batch of `size` fit into the epoch and the run."""
    mode = horizon.last_batch
    if mode == "drop":
        return size
    if mode == "keep" and horizon.dataset_num_samples is not None:
        size = min(size, horizon.dataset_num_samples - timestamp.sample_in_epoch)
    end = horizon.end_sample
    return size if end is None else min(size, end - timestamp.sample)


def is_countable(horizon: Horizon, unit: TimeUnit) -> bool:
    """Return whether `unit` is known before the run if the number of samples is.

    >>> is_countable(Horizon("1ep"), TimeUnit.EPOCH)
    False
    """
    if unit is TimeUnit.TOKEN and horizon.lengths is not None:
        return True
    batches = EqualBatches(horizon, Timestamp(), 1)
    return batches.count_until(horizon.axis(unit), 1) is not None


_COUNTERS = {
    TimeUnit.EPOCH: ("epoch", "batch_in_epoch", "sample_in_epoch", "token_in_epoch"),
    TimeUnit.TOKEN: ("token", "token_in_epoch"),
    TimeUnit.SECOND: (
        "run_nanoseconds",
        "job_nanoseconds",
        "epoch_nanoseconds",
        "batch_nanoseconds",
    ),
}


class UnknownCountError(Exception):
    """A user's function read a count that is known only during the run, undeclared."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        self.unit = next(unit for unit, names in _COUNTERS.items() if name in names)


@cache
def _hidden(name: str) -> int:
    """Return a count that only the run knows: whatever is done with it is an error.

    It has the operators of an int, but is none: C code such as `range` reads an int unasked.
    """

    def refuse(*_: object, **__: object) -> Any:
        raise UnknownCountError(name)

    kept = {"__new__", "__init__", "__class__", "__init_subclass__", "__subclasshook__", "__doc__"}
    refused = {*dir(int), "__len__", "__iter__", "__call__", "__getitem__"} - kept
    return cast(int, type("HiddenCount", (), dict.fromkeys(refused, refuse))())


def known_counts(timestamp: Timestamp, hidden: Iterable[str]) -> Timestamp:
    """Return `timestamp` without the counters `hidden`, however it is read.

    >>> known_counts(Timestamp(sample=3, token=9), {"token"}).sample
    3
    """
    return timestamp._replace(**{name: _hidden(name) for name in hidden})


def unknown_counters(horizon: Horizon, *, but: Iterable[TimeUnit] = ()) -> frozenset[str]:
    """Return the counters known only during the run, except those of some units.

    >>> sorted(unknown_counters(Horizon("9ba"), but=["ep", "sec"]))
    ['token', 'token_in_epoch']
    """
    allowed = frozenset(but)
    return frozenset(
        name
        for unit, names in _COUNTERS.items()
        if unit not in allowed and not is_countable(horizon, unit)
        for name in names
    )
