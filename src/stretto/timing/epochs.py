"""The arithmetic of epochs, and which facts a function reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast, final

from stretto.timing.batch_sizes import EqualBatches
from stretto.timing.grammar import TimeUnit
from stretto.timing.horizon import Horizon
from stretto.timing.timer import Timer
from stretto.timing.timestamp import Axis, Timestamp


class Rollover(NamedTuple):
    """What happens to the epoch at the end of a batch."""

    epochs: int
    """How many epochs have ended."""
    sample_in_epoch: int
    """Samples passed in the present epoch."""
    passed_over: int
    """Samples skipped because they are fewer than a batch (`last_batch="drop"`)."""


def rollover(horizon: Horizon, sample_in_epoch: int, size: int) -> Rollover:
    """Return what happens to the epoch when a batch of `size` has brought it to `sample_in_epoch`.

    Under `drop` the epoch ends when fewer samples are left than that batch had.

    >>> rollover(Horizon("2ep", dataset_num_samples=20, last_batch="drop"), 16, 8)
    Rollover(epochs=1, sample_in_epoch=0, passed_over=4)
    """
    num_samples = horizon.dataset_num_samples
    if num_samples is None:
        return Rollover(0, sample_in_epoch, 0)
    if horizon.last_batch == "drop":
        left = num_samples - sample_in_epoch
        return Rollover(1, 0, left) if left < size else Rollover(0, sample_in_epoch, 0)
    epochs, within = divmod(sample_in_epoch, num_samples)
    return Rollover(epochs, within, 0)


def advance(horizon: Horizon, timestamp: Timestamp, size: int) -> Timestamp:
    """Return the clock after a batch of `size` samples that started at `timestamp`.

    >>> horizon = Horizon("2ep", dataset_num_samples=20, last_batch="carry")
    >>> after = advance(horizon, Timestamp(batch=2, sample=16, sample_in_epoch=16), 8)
    >>> after.epoch, after.batch, after.sample, after.sample_in_epoch
    (1, 3, 24, 4)

    Args:
        horizon: what an epoch is and what happens at its end.
        timestamp: the clock at the start of the batch.
        size: the batch's samples, over all ranks.
    """
    each = horizon.tokens_per_sample or 0
    epoch, batch, sample, token, batch_, sample_, token_, run, job, epoch_ns, _ = timestamp
    roll = rollover(horizon, sample_ + size, size)
    if roll.epochs:
        batch_, token_, epoch_ns = 0, roll.sample_in_epoch * each, 0
    else:
        batch_, token_ = batch_ + 1, token_ + size * each
    return tuple.__new__(
        Timestamp,
        (
            epoch + roll.epochs, batch + 1, sample + size + roll.passed_over,
            token + (size + roll.passed_over) * each,
            batch_, roll.sample_in_epoch, token_,
            run, job, epoch_ns, 0,
        ),
    )  # fmt: skip


def tick(
    timer: Timer,
    horizon: Horizon,
    size: int,
    *,
    tokens: int | None = None,
    seconds: float | None = None,
    tokens_of_last: Callable[[int], int] | None = None,
) -> None:
    """Move `timer` over a batch of `size` samples, exactly as `advance` moves a timestamp.

    If a step `skipped` samples before it, call `timer.end_epoch()` first. If a batch is carried
    into the next epoch, `tokens_of_last(samples)` counts the tokens of its last samples; by
    default, they are their share of all tokens, rounded down.

    >>> horizon = Horizon("2ep", dataset_num_samples=20)
    >>> timer = Timer(horizon)
    >>> tick(timer, horizon, 16), tick(timer, horizon, 4)
    (None, None)
    >>> timer.epoch, timer.batch, timer.sample
    (1, 2, 20)
    """
    if tokens is None:
        tokens = size * (horizon.tokens_per_sample or 0)
    timer.update(samples=size, tokens=tokens, seconds=seconds)
    roll = rollover(horizon, timer.sample_in_epoch, size)
    for epoch in range(roll.epochs, 0, -1):
        carried = (epoch - 1) * (horizon.dataset_num_samples or 0) + roll.sample_in_epoch
        left = tokens * carried // size
        if carried and tokens_of_last is not None:
            left = tokens_of_last(carried)
        timer.end_epoch(samples=carried, tokens=left)


def cut(horizon: Horizon, timestamp: Timestamp, size: int) -> int:
    """Return how many samples of a batch of `size` fit into the epoch and the run."""
    mode = horizon.last_batch
    if mode == "drop":
        return size
    if mode == "keep" and horizon.dataset_num_samples is not None:
        size = min(size, horizon.dataset_num_samples - timestamp.sample_in_epoch)
    end = horizon.end_sample
    return size if end is None else min(size, end - timestamp.sample)


def repeats_before(horizon: Horizon, timestamp: Timestamp, size: int) -> int | None:
    """Return the position from which a batch of `size` would end the epoch or be cut.

    Batches that start between `timestamp` and there only move the clock. None: all batches.

    >>> repeats_before(Horizon("2ep", dataset_num_samples=20), Timestamp(), 8)
    12
    """
    found = []
    if horizon.dataset_num_samples is not None:
        epoch_end = timestamp.sample - timestamp.sample_in_epoch + horizon.dataset_num_samples
        # Under `drop` the epoch also ends if no further batch fits.
        is_dropped = horizon.last_batch == "drop"
        found.append(epoch_end - 2 * size + 1 if is_dropped else epoch_end - size)
    if horizon.end_sample is not None and horizon.last_batch != "drop":
        found.append(horizon.end_sample - size + 1)
    return min(found, default=None)


def equal_batches(horizon: Horizon, first: Timestamp, size: int) -> EqualBatches:
    """Return the batches of `size` on a run, from `first` on."""
    return EqualBatches(
        first,
        size,
        horizon.dataset_num_samples,
        horizon.last_batch,
        horizon.tokens_per_sample,
    )


def next_epoch(horizon: Horizon, timestamp: Timestamp) -> Timestamp:
    """Return the clock at the start of the next epoch, without a batch in between.

    Under `last_batch="drop"` it skips what is less than a batch.
    """
    left = (horizon.dataset_num_samples or 0) - timestamp.sample_in_epoch
    return timestamp._replace(
        epoch=timestamp.epoch + 1,
        sample=timestamp.sample + left,
        token=timestamp.token + left * (horizon.tokens_per_sample or 0),
        batch_in_epoch=0,
        sample_in_epoch=0,
        token_in_epoch=0,
        epoch_nanoseconds=0,
    )


def outgrows_epoch(horizon: Horizon, timestamp: Timestamp, size: int) -> bool:
    """Return whether `last_batch="drop"` skips the rest of the epoch at `timestamp`."""
    num_samples = horizon.dataset_num_samples
    if horizon.last_batch != "drop" or num_samples is None:
        return False
    return size > num_samples - timestamp.sample_in_epoch


def end_tick(horizon: Horizon) -> tuple[Axis, int]:
    """Return the counter that ends the run and the tick at which it does."""
    axis = horizon.axis(TimeUnit.DURATION)
    return axis, math.ceil(horizon.ticks(horizon.max_duration, axis))


def is_countable(horizon: Horizon, unit: TimeUnit) -> bool:
    """Return whether `unit` is known before the run if the number of samples is.

    >>> is_countable(Horizon("1ep"), TimeUnit.EPOCH)
    False
    """
    batches = equal_batches(horizon, Timestamp(), 1)
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


@final
class _Hidden:
    """A count that only the run knows: whatever is done with it is an `UnknownCountError`.

    No int, which C code such as `range` and `json` reads without asking.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "name", name)

    def _refuse(self, *_: object, **__: object) -> Any:
        raise UnknownCountError(object.__getattribute__(self, "name"))

    __getattribute__ = __setattr__ = _refuse


_ONE = "lt le gt ge eq ne hash bool int float complex index neg pos abs invert len iter contains"
_ONE += " call getitem format str repr bytes round floor ceil trunc copy deepcopy reduce reduce_ex"
_TWO = "add sub mul matmul truediv floordiv mod divmod pow and or xor lshift rshift"
_BOTH = (side + one for one in _TWO.split() for side in ("", "r"))
for _name in (*_ONE.split(), *_BOTH):
    setattr(_Hidden, f"__{_name}__", _Hidden.__dict__["_refuse"])


def known_counts(timestamp: Timestamp, hidden: Iterable[str]) -> Timestamp:
    """Return `timestamp` without the counters `hidden`, however it is read.

    >>> known_counts(Timestamp(sample=3, token=9), {"token"}).sample
    3
    """
    return timestamp._replace(**{name: cast(int, _Hidden(name)) for name in hidden})


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
