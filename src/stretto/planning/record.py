"""A plan as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.planning.stages import Stage
from stretto.timing import Horizon, Timestamp

if TYPE_CHECKING:
    from stretto.planning.plan import Plan

COUNTS = Timestamp._fields[:7]
"""The counts of the clock, without its times."""


def to_record(plan: Plan) -> dict[str, object]:
    """Return the plan as plain values that JSON keeps exactly."""
    horizon = plan.horizon
    return {
        "max_duration": str(horizon.max_duration),
        "dataset_num_samples": horizon.dataset_num_samples,
        "dataset_num_tokens": horizon.dataset_num_tokens,
        "tokens_per_sample": horizon.tokens_per_sample,
        "last_batch": horizon.last_batch,
        "batch_size": repr(plan.policy),
        "world_size": plan.world_size,
        "micro_batch_size": plan.micro_batch_size,
        "is_exact": plan.is_exact,
        "num_batches": plan.num_batches,
        "num_samples": plan.num_samples,
        "end": clock(horizon, plan.end),
        "stages": [_stage(horizon, stage) for stage in plan.stages],
        "events": [
            {
                "name": event.name,
                "count": event.count,
                "is_exact": event.is_exact,
                "follows": event.follows,
                "first": [clock(horizon, timestamp) for timestamp in event.first],
            }
            for event in plan.events
        ],
        "warnings": list(plan.warnings),
    }


def clock(horizon: Horizon, timestamp: Timestamp | None) -> dict[str, int | str] | None:
    """Return the counts of a timestamp, and the exact epoch and fraction of the run as times."""
    if timestamp is None:
        return None
    state = timestamp.to_state()
    counts: dict[str, int | str] = {name: state[name] for name in COUNTS}
    counts["ep"] = str(horizon.position(timestamp, "ep"))
    counts["dur"] = str(horizon.position(timestamp, "dur"))
    return counts


def _stage(horizon: Horizon, stage: Stage) -> dict[str, object]:
    values = {name: value._asdict() for name, value in stage.values.items()}
    return {
        **{name: getattr(stage, name) for name in ("number", "size", "batches", "samples")},
        "skipped": stage.skipped,
        "cut_sizes": list(stage.cut_sizes),
        "shares": list(stage.shares),
        "accumulation": stage.accumulation,
        "first": clock(horizon, stage.first),
        "end": clock(horizon, stage.end),
        "values": values,
    }
