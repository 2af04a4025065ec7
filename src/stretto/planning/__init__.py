"""Plans of runs: where every batch begins, its size, and the events."""

from stretto.planning.bind import Prepared, bind_run
from stretto.planning.plan import Plan, PlannedBatch, plan
from stretto.planning.sizes import PlannedSizes, StepPlan, UnknownSizes, next_step, walk
from stretto.planning.stages import Event, FirstLast, Stage, bound_of, check_least

__all__ = [
    "Event",
    "FirstLast",
    "Plan",
    "PlannedBatch",
    "PlannedSizes",
    "Prepared",
    "Stage",
    "StepPlan",
    "UnknownSizes",
    "bound_of",
    "check_least",
    "next_step",
    "plan",
    "bind_run",
    "walk",
]
