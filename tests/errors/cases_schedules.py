"""Wrong input at schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Curve,
    Custom,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    Periods,
    Polynomial,
    Product,
    StepDecay,
    as_schedule,
)
from stretto.timing import Horizon, Timestamp

RUN = Horizon("10ep", dataset_num_samples=100)


def wrong(value: object) -> Any:
    """Return what the types forbid."""
    return value


def negative(_: object) -> float:
    """Return what is no factor."""
    return -0.5


CASES: list[tuple[str, Callable[[], object]]] = [
    ("schedules-factor-negative", lambda: Linear(-1, 0)),
    ("schedules-factor-nan", lambda: Cosine(end=math.nan)),
    ("schedules-factor-infinite", lambda: Constant(math.inf)),
    ("schedules-factor-text", lambda: Constant(wrong("0.1"))),
    ("schedules-factor-bool", lambda: Constant(wrong(True))),
    ("schedules-warmup-start-negative", lambda: Cosine(warmup="5%", warmup_start=-0.1)),
    ("schedules-warmup-negative", lambda: Cosine(warmup="-5%")),
    ("schedules-warmup-number", lambda: Cosine(warmup=wrong(500))),
    ("schedules-warmup-text", lambda: Cosine(warmup="500 steps")),
    ("schedules-warmup-too-long", lambda: Cosine(warmup="11ep").bind(RUN)),
    (
        "schedules-warmup-too-long-in-period",
        lambda: Periods([("10%", Cosine(warmup="2ep")), ("rest", 1)]).bind(RUN),
    ),
    ("schedules-warmup-unknown-batches", lambda: Cosine(warmup="500ba").bind(RUN)),
    ("schedules-warmup-seconds", lambda: Cosine(warmup="5m").bind(RUN)),
    ("schedules-warmup-part-of-epoch", lambda: Cosine(warmup="5%").bind(Horizon("90ep"))),
    ("schedules-epoch-of-unknown-size", lambda: Cosine().bind(Horizon("1ep"))),
    (
        "schedules-part-of-a-period-unknown",
        lambda: Periods(
            [("4ba", 1.0), ("rest", lambda t: t.get_current_period_frac_elapsed())]
        ).bind(RUN)(Timestamp(batch=4)),
    ),
    ("schedules-floor", lambda: InverseSqrt("1ba", floor=2)),
    ("schedules-over-negative", lambda: Linear(over="-1ep")),
    ("schedules-power-zero", lambda: Polynomial(power=0)),
    ("schedules-curve-not-callable", lambda: Curve(wrong(0.5))),
    ("schedules-curve-negative", lambda: Curve(negative).bind(RUN)),
    ("schedules-custom-not-callable", lambda: Custom(wrong("cosine"))),
    ("schedules-custom-negative", lambda: Custom(negative).bind(RUN)(Timestamp())),
    ("schedules-interval-zero", lambda: StepDecay("0ep")),
    ("schedules-gamma-negative", lambda: Exponential("1ep", -0.5)),
    ("schedules-gamma-grows", lambda: Exponential("1sp", 10).bind(RUN)),
    ("schedules-gamma-grows-at-milestones", lambda: MultiStep(["1ep", "2ep"], 1e200)),
    ("schedules-milestones-text", lambda: MultiStep(wrong("30ep"))),
    ("schedules-milestones-none", lambda: MultiStep([])),
    ("schedules-milestone-zero", lambda: MultiStep(["0ep"])),
    ("schedules-milestones-unsorted", lambda: MultiStep(["5ep", "30%"]).bind(RUN)),
    ("schedules-milestones-twice", lambda: MultiStep(["5ep", "5ep"]).bind(RUN)),
    ("schedules-restarts-multiplier", lambda: CosineRestarts("1ep", wrong(1.5))),
    ("schedules-inverse-sqrt-scale", InverseSqrt),
    ("schedules-wsd-shape", lambda: WSD("20%", shape=wrong("sqrt"))),
    ("schedules-wsd-too-long", lambda: WSD("9ep", warmup="2ep").bind(RUN)),
    ("schedules-periods-none", lambda: Periods([])),
    ("schedules-periods-not-a-pair", lambda: Periods([wrong(Cosine())])),
    ("schedules-periods-minus-one", lambda: Periods([("5%", 1), (wrong(-1), 1)])),
    ("schedules-periods-negative", lambda: Periods([("-1ep", 1)])),
    ("schedules-periods-rest-twice", lambda: Periods([("rest", 1), ("rest", 0.1)])),
    ("schedules-periods-too-long", lambda: Periods([("60%", 1), ("5ep", 0.1)]).bind(RUN)),
    ("schedules-product-of-none", Product),
    ("schedules-not-a-schedule", lambda: as_schedule("cosine")),
    ("schedules-digits", lambda: as_schedule(10**400)),
    ("schedules-class", lambda: as_schedule(Cosine)),
    ("schedules-scaled-by-zero", lambda: Cosine().scaled(0)),
    ("schedules-scaled-by-nan", lambda: Cosine().scaled(math.nan)),
]
