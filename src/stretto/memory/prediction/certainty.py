"""How certain a prediction is, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from stretto.memory.prediction.fake_values import FakeValues
from stretto.memory.prediction.modules import compiled_modules
from stretto.memory.prediction.recording import Place
from stretto.memory.step import WholeStep

Certainty = Literal["exact", "upper bound", "estimate", "extrapolated", "calibrated", "tried"]


def judge(found: Sequence[FakeValues], *, is_compiled: bool) -> tuple[Certainty, str]:
    """Return the certainty of traces, and why.

    Args:
        found: what each trace met that fake tensors do not have.
        is_compiled: whether the step runs compiled code.
    """
    scratch, worst = (
        _places([getattr(one, what) for one in found]) for what in ("scratch", "worst_cases")
    )
    reads = reads_of_values(found)
    doubts = []
    if scratch:
        where = f"in {_listed(scratch)}, which is bounded from above"
        doubts.append(f"kernels allocate for themselves {where}")
    if reads:
        doubts.append(f"values are read in {_listed(reads)}: it was taken with 0 and with 1")
    if doubts:
        return "estimate", "; ".join(doubts)
    if is_compiled:
        return "upper bound", "compiled code was followed as if it were not"
    if worst:
        where = f"in {_listed(worst)}: they were taken as the largest"
        return "upper bound", f"shapes depend on values {where}"
    return "exact", "every allocation of the step was followed on fake tensors"


def reads_of_values(found: Sequence[FakeValues]) -> list[Place]:
    """Return where values are read in the forward and backward passes.

    Optimizers read values to scale or skip the update; the larger trace includes the update.
    """
    places = _places([one.reads for one in found])
    return [place for place in places if place.phase != "optimizer"]


def is_compiled(step: WholeStep) -> bool:
    """Return whether a part of a step runs as compiled code."""
    return any(map(_is_compiled, vars(step.step).values()))


def _is_compiled(part: object) -> bool:
    # torch has no public name for the mark of a compiled function.
    is_function = hasattr(part, "_torchdynamo_orig_callable")
    return is_function or (isinstance(part, nn.Module) and bool(compiled_modules(part)))


def _places(found: Sequence[dict[str, Place]]) -> list[Place]:
    return list(dict.fromkeys(place for one in found for place in one.values()))


def _listed(places: Sequence[Place]) -> str:
    names = list(dict.fromkeys(place.module or f"the {place.phase}" for place in places))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
