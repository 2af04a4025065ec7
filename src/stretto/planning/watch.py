"""Which counters a function reads, so that no plan is made of counts that only the run knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stretto.timing import BoundTrigger, Horizon, Timestamp

_WALL = ("run_nanoseconds", "job_nanoseconds", "epoch_nanoseconds", "batch_nanoseconds")
_TOKENS = ("token", "token_in_epoch")
_EPOCHS = ("epoch", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")


class _Watched(Timestamp):
    """A timestamp that notes which of its counters are read by name, not those it is unpacked to.

    What only hands it on unpacks it; one made from it by `_replace` is watched too.
    """

    seen: set[str]

    def _replace(self, **counters: Any) -> _Watched:
        return _watch(Timestamp(*self)._replace(**counters), self.seen)


def _watch(timestamp: Timestamp, seen: set[str]) -> _Watched:
    watched = _Watched(*timestamp)
    watched.seen = seen
    return watched


def _watched_counter(index: int, name: str) -> property:
    def read(self: _Watched) -> Any:
        self.seen.add(name)
        return self[index]

    return property(read)


for _index, _name in enumerate(Timestamp._fields):
    setattr(_Watched, _name, _watched_counter(_index, _name))


def counters_read(
    function: Callable[[Timestamp], object], timestamps: Iterable[Timestamp]
) -> frozenset[str]:
    """Return the counters that `function` reads at any of `timestamps`.

    >>> sorted(counters_read(lambda now: now.epoch + now.sample, [Timestamp()]))
    ['epoch', 'sample']
    """
    seen: set[str] = set()
    for timestamp in timestamps:
        function(_watch(timestamp, seen))
    return frozenset(seen)


def reading(trigger: BoundTrigger) -> Callable[[Timestamp], int]:
    """Return what reads of a timestamp what `trigger` does.

    >>> from stretto.timing import Every
    >>> every = Every("2ba").bind(Horizon("9ba"))
    >>> sorted(counters_read(reading(every), [Timestamp()]))
    ['batch']
    """
    return lambda now: trigger.count(now, now)


def unknown_counters(horizon: Horizon) -> dict[str, str]:
    """Return the counters that only the run knows, each with what it counts.

    >>> sorted(unknown_counters(Horizon("9ba", dataset_num_samples=5, tokens_per_sample=2)))
    ['batch_nanoseconds', 'epoch_nanoseconds', 'job_nanoseconds', 'run_nanoseconds']
    """
    unknown = dict.fromkeys(_WALL, "the wall clock")
    if horizon.dataset_num_samples is None:
        unknown |= dict.fromkeys(_EPOCHS, "epochs")
    if horizon.tokens_per_sample is None:
        unknown |= dict.fromkeys(_TOKENS, "tokens")
    return unknown


def unknown_read(
    horizon: Horizon, function: Callable[[Timestamp], object], timestamps: Iterable[Timestamp]
) -> str | None:
    """Return which of the counts that only the run knows `function` follows, or None."""
    unknown = unknown_counters(horizon)
    return next(
        (unknown[name] for name in sorted(counters_read(function, timestamps)) if name in unknown),
        None,
    )
