"""A run without training: where every batch begins, how large it is, what happens when."""

from stretto.planning.clock import (
    StepPlan,
    advance,
    check_plannable,
    next_step,
    pass_over,
    tick,
    walk,
)

__all__ = ["StepPlan", "advance", "check_plannable", "next_step", "pass_over", "tick", "walk"]
