"""Fields of a user's classes are checked however the module writes its annotations."""

from dataclasses import dataclass
from typing import Any

import pytest

from stretto.batching import BatchSizePolicy, Fixed
from stretto.batching.policy import Size as Number
from stretto.errors import BatchSizeError, ScheduleError, TimeError
from stretto.schedules import Schedule, fields
from stretto.schedules.fields import Factor as Top
from stretto.timing import Time


@dataclass(frozen=True, repr=False)
class Mine(Schedule):
    """Without `from __future__ import annotations`, by an alias and by a module."""

    top: Top = 1.0
    over: fields.Length = "10ba"
    rest: fields.Interval | None = None

    def within(self, scope: Any) -> Any:
        del scope
        return lambda now: self.top


@dataclass(frozen=True, repr=False)
class Later(BatchSizePolicy):
    start: Number
    after: fields.Interval = "1ep"

    def bind(self, horizon: Any) -> Any:
        return Fixed(self.start).bind(horizon)


def test_fields_of_a_schedule_are_checked_and_converted() -> None:
    found = Mine(0.5, rest="2ep")
    assert found.times() == (Time("10ba"), Time("2ep"))
    assert found.scaled(2).over == Time("20ba")
    for wrong, error in (
        ({"top": -3.0}, ScheduleError),
        ({"over": "nonsense"}, TimeError),
        ({"rest": "0ep"}, ScheduleError),
    ):
        with pytest.raises(error):
            Mine(**wrong)


def test_fields_of_a_policy_are_checked_and_converted() -> None:
    assert Later(4).scaled(2).after == Time("2ep")
    for wrong in ({"start": 0}, {"start": 4, "after": "0ep"}):
        with pytest.raises(BatchSizeError):
            Later(**wrong)
