"""A run without training: where every batch begins, how large it is, what happens when."""

from stretto.planning.cautions import bound_of
from stretto.planning.clock import (
    StepPlan,
    advance,
    check_plannable,
    decided_between,
    next_step,
    tick,
    unplannable,
    walk,
)
from stretto.planning.events import Event
from stretto.planning.length import check_length
from stretto.planning.plan import Plan, PlannedBatch, plan
from stretto.planning.sizes import PlannedSizes, UnknownSizes, known_sizes, resolve_horizon
from stretto.planning.stages import FirstLast, Stage, check_least

__all__ = [
    "Event",
    "FirstLast",
    "Plan",
    "PlannedBatch",
    "PlannedSizes",
    "Stage",
    "StepPlan",
    "UnknownSizes",
    "advance",
    "bound_of",
    "check_least",
    "check_length",
    "check_plannable",
    "decided_between",
    "known_sizes",
    "next_step",
    "plan",
    "resolve_horizon",
    "tick",
    "unplannable",
    "walk",
]
