"""Schedules and sizes that Seesaw and its relative cannot couple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.batching import PeriodSizes, Seesaw
from stretto.config import build_plan
from stretto.config.run import RunConfig
from stretto.planning import plan
from stretto.schedules import Constant, Cosine, CosineRestarts, Custom, Linear, Periods, Schedule
from stretto.timing import Horizon

RUN = Horizon("2ep", dataset_num_samples=100)
DROPPING = Horizon("900ep", dataset_num_samples=100, last_batch="drop")
PERIODS = PeriodSizes([("10%", 8), ("rest", 16)])


def bind(decay: Schedule, size: Any = 8, run: Horizon = RUN, **options: Any) -> object:
    """Bind the sizes of a Seesaw."""
    return Seesaw(decay, size, **options).policy.bind(run)


def follow_batches(timer: Any) -> float:
    """A schedule of your own that reads batches."""
    return 1 / (1 + float(timer.batch))


in_a_period = Periods([("10%", 1.0), ("rest", Seesaw(Cosine(), 8).schedule)])


SEESAW = {"Seesaw": {"decay": {"Cosine": {}}, "size": 8}}


def read(**values: Any) -> object:
    """Read and plan a run file with a Seesaw in it."""
    least = {"max_duration": "2ep", "data": {"target": "a:b", "num_samples": 100}}
    return build_plan(RunConfig.parse({**least, **values}))


CASES: list[tuple[str, Callable[[], object]]] = [
    ("seesaw-factor", lambda: Seesaw(Cosine(), 8, factor=1)),
    ("seesaw-factor-text", lambda: Seesaw(Cosine(), 8, factor="smooth")),  # type: ignore[arg-type]
    ("seesaw-batches", lambda: bind(Linear(over="100ba"))),
    ("seesaw-wall-time", lambda: bind(Cosine(), run=Horizon("1h"))),
    ("seesaw-mixed", lambda: bind(Linear(over="9tok") * Cosine())),
    ("seesaw-counters", lambda: bind(Custom(follow_batches))),
    ("seesaw-constant", lambda: bind(Constant())),
    ("seesaw-restarts", lambda: bind(CosineRestarts("30%"))),
    ("seesaw-factor-large", lambda: Seesaw(Cosine(), 8, factor=10**400)),
    ("seesaw-dropped", lambda: plan(DROPPING, Seesaw(Cosine(), 16).policy)),
    ("seesaw-ranks", lambda: plan(RUN, Seesaw(Cosine(), 4).policy, world_size=8)),
    (
        "seesaw-uneven",
        lambda: plan(RUN, Seesaw(Cosine(), 12).policy, world_size=8, micro_batch_size=2, even=True),
    ),
    ("seesaw-beyond", lambda: bind(Cosine(), maximum=4)),
    ("seesaw-sizes", lambda: bind(Cosine(), PERIODS, reference=16)),
    ("seesaw-reference", lambda: Seesaw(Cosine(), PERIODS)),
    ("seesaw-period", lambda: in_a_period.bind(RUN)),
    ("seesaw-file-rule", lambda: read(rule={"sqrt": 8}, batch_size=SEESAW)),
    ("seesaw-file-schedule", lambda: read(schedules={"lr": 0.5}, batch_size=SEESAW)),
]
