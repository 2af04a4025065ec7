"""Which counts are known before the run, and timestamps with only those."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from stretto.timing.epochs import is_countable
from stretto.timing.horizon import Horizon
from stretto.timing.timestamp import Timestamp
from stretto.timing.unit import TimeUnit

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
class KnownCounts(Timestamp):
    """A timestamp that raises an error if a hidden count is read."""

    hidden: frozenset[str] = frozenset()

    def __getattribute__(self, name: str) -> Any:
        if name in Timestamp._fields and name in self.hidden:
            raise UnknownCountError(name)
        return super().__getattribute__(name)

    @classmethod
    def of(cls, timestamp: Timestamp, hidden: frozenset[str]) -> KnownCounts:
        """Return `timestamp` without the counters `hidden`.

        >>> KnownCounts.of(Timestamp(sample=3, token=9), frozenset({"token"})).sample
        3
        """
        known = cls(*timestamp)
        known.hidden = hidden
        return known


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
