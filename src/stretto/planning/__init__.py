"""Plans of runs: where every batch begins, its size, and the events."""

from stretto.planning.bind import Prepared, bind_run
from stretto.planning.borders import Change
from stretto.planning.plan import Plan, plan
from stretto.planning.resume import passes, resumed
from stretto.planning.sizes import (
    PlannedBatch,
    PlannedSizes,
    Stage,
    UnknownSizes,
    next_step,
    walk,
)
from stretto.planning.stages import Event, bound_of, check_least

__all__ = [
    "Change",
    "Event",
    "Plan",
    "PlannedBatch",
    "PlannedSizes",
    "Prepared",
    "Stage",
    "UnknownSizes",
    "bound_of",
    "check_least",
    "next_step",
    "passes",
    "plan",
    "resumed",
    "bind_run",
    "walk",
]
