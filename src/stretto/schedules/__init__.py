"""Schedules: factors as pure functions of time, bound to a run once."""

from stretto.schedules.curves import (
    WSD,
    Cosine,
    CosineRestarts,
    Curve,
    DecayShape,
    InverseSqrt,
    Linear,
    Polynomial,
)
from stretto.schedules.intervals import Exponential, MultiStep, StepDecay
from stretto.schedules.periods import Periods, Rest
from stretto.schedules.schedule import (
    Constant,
    Custom,
    Floor,
    Product,
    Schedule,
    ScheduleLike,
    Sum,
    as_schedule,
)
from stretto.schedules.scope import BoundSchedule, Scope

__all__ = [
    "BoundSchedule",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Curve",
    "Custom",
    "DecayShape",
    "Exponential",
    "Floor",
    "InverseSqrt",
    "Linear",
    "MultiStep",
    "Periods",
    "Polynomial",
    "Product",
    "Rest",
    "Schedule",
    "ScheduleLike",
    "Scope",
    "StepDecay",
    "Sum",
    "WSD",
    "as_schedule",
]
