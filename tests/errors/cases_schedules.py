"""Wrong input at schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stretto.schedules import (
    Cosine,
    Curve,
    Custom,
    Exponential,
    Periods,
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
    ("schedules-factor-nan", lambda: Cosine(end=math.nan)),
    ("schedules-warmup-start-negative", lambda: Cosine(warmup="5%", warmup_start=-0.1)),
    ("schedules-warmup-negative", lambda: Cosine(warmup="-5%")),
    ("schedules-curve-negative", lambda: Curve(negative).bind(RUN)),
    ("schedules-custom-not-callable", lambda: Custom(wrong("cosine"))),
    ("schedules-custom-negative", lambda: Custom(negative).bind(RUN)(Timestamp())),
    ("schedules-gamma-negative", lambda: Exponential("1ep", -0.5)),
    ("schedules-periods-rest-twice", lambda: Periods([("rest", 1), ("rest", 0.1)])),
]
