"""Wrong runs at plans."""

from __future__ import annotations

from collections.abc import Callable

from stretto.batching import DoublingRamp, PiecewiseConstant, SizeFunction
from stretto.planning import PlannedSizes, bind_run, plan
from stretto.schedules import Linear, StepDecay
from stretto.timing import Horizon

RUN = Horizon("2ep", dataset_num_samples=1000)
DROPPING = Horizon("2ep", dataset_num_samples=100, last_batch="drop")
MEASURED = SizeFunction(lambda timestamp, current: 8, planned=False)

CASES: list[tuple[str, Callable[[], object]]] = [
    ("planning-ranks", lambda: plan(RUN, PiecewiseConstant("0ep:16 1ep:6"), world_size=8)),
    (
        "planning-uneven",
        lambda: plan(RUN, DoublingRamp(8, 20, "50%"), world_size=2, micro_batch_size=4, even=True),
    ),
    ("planning-measured", lambda: PlannedSizes(RUN, MEASURED)),
    ("planning-wall-clock", lambda: plan(Horizon("1h"), "0sec:8 10m:16")),
    ("planning-function", lambda: plan(RUN, SizeFunction(lambda now, size: 8 + now.token))),
    (
        "planning-endless",
        lambda: PlannedSizes(
            Horizon("1h"), SizeFunction(lambda timestamp, current: 3 + timestamp.batch % 4)
        ),
    ),
    ("planning-tokens", lambda: plan(RUN, "0tok:8 100tok:16")),
    ("planning-epochs", lambda: plan(Horizon("9ep"), "0ep:8 2ep:16")),
    ("planning-dropped", lambda: plan(DROPPING, 128)),
    ("planning-base", lambda: plan(RUN, 8, base={"lr": 0.1})),
    ("planning-length", lambda: plan(Horizon("1e199sp"), 8)),
    ("planning-world-size", lambda: plan(RUN, 8, world_size=0)),
    ("planning-no-tokens-run", lambda: plan(Horizon("1Btok"), 8, tracks_tokens=False)),
    (
        "planning-no-tokens-policy",
        lambda: plan(RUN, "0tok:8 100tok:16", tracks_tokens=False),
    ),
    (
        "planning-no-tokens-schedule",
        lambda: plan(
            Horizon("2ep", dataset_num_samples=1000, dataset_num_tokens=5000),
            8,
            schedules={"lr": StepDecay("900tok")},
            tracks_tokens=False,
        ),
    ),
    (
        "planning-no-tokens-trigger",
        lambda: plan(RUN, 8, triggers={"evaluate": "1Mtok"}, tracks_tokens=False),
    ),
    (
        "planning-mixed-units",
        lambda: Linear(warmup="10ba").bind(bind_run(RUN, MEASURED).horizon),
    ),
]
