"""Refuses tokens on data that cannot count them."""

from __future__ import annotations

from stretto.errors import PlanError
from stretto.planning.prepare import Prepared
from stretto.timing import TimeUnit


def check_tokens(run: Prepared) -> None:
    """Refuse a run that needs tokens from data that do not count them.

    Raises:
        PlanError: its length, the batch size, a schedule or a trigger follows tokens.
    """
    if run.facts.max_duration.unit is TimeUnit.TOKEN:
        _refuse(f"run for {run.facts.max_duration}", "max_duration")
    if TimeUnit.TOKEN in run.bound_policy.units:
        _refuse("follow tokens with the batch size", "batch_size")
    for name, schedule in run.schedules.items():
        if TimeUnit.TOKEN in schedule.reads(run.facts):
            _refuse("follow tokens with a schedule", name)
    for name, trigger in run.bound_triggers.items():
        if TimeUnit.TOKEN in trigger.units:
            _refuse("wait for tokens", name)


def _refuse(what: str, where: str) -> None:
    raise PlanError.cannot(
        what,
        why="the data cannot count their tokens",
        instead="write it in 'sp' or 'ep', or pass get_num_tokens_in_batch with the data",
        where=where,
    )
