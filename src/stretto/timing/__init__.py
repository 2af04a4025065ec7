"""Exact time: units, amounts, the clock, the length of a run, conversion and triggers."""

from stretto.timing.conversion import convert
from stretto.timing.epochs import advance
from stretto.timing.grammar import TimeUnit
from stretto.timing.horizon import BatchSizes, Horizon, LastBatch
from stretto.timing.time import Time, TimeLike, read_wall_clock
from stretto.timing.timer import Timer
from stretto.timing.timestamp import Axis, Timestamp
from stretto.timing.triggers import AnyOf, At, BoundTrigger, Every, Trigger, parse_trigger

__all__ = [
    "AnyOf",
    "At",
    "Axis",
    "BatchSizes",
    "BoundTrigger",
    "Every",
    "Horizon",
    "LastBatch",
    "Time",
    "TimeLike",
    "TimeUnit",
    "Timer",
    "Timestamp",
    "Trigger",
    "advance",
    "convert",
    "parse_trigger",
    "read_wall_clock",
]
