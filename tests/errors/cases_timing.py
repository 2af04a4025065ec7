"""Wrong input at the clock: times, conversions, horizons, timers, triggers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.timing import Horizon, Time, Timestamp, convert


def _axis(run: str, *times: str, **facts: Any) -> object:
    return Horizon(run, **facts).common_axis(map(Time, times))


CASES: list[tuple[str, Callable[[], object]]] = [
    # How a time is written.
    # Other values.
    # Arithmetic.
    ("timing-units-add", lambda: Time("1ep") + Time("1h")),
    # Conversion.
    (
        "timing-convert-share-of-hours",
        lambda: convert("0.1dur", "ba", max_training_duration="10h", batch_size=128),
    ),
    # Horizons.
    ("timing-axis-no-batch-size", lambda: _axis("9ba", "10%", "5sp", "1ep")),
    ("timing-axis-seconds", lambda: _axis("2ep", "1h", "1ep")),
    # The clock.
    ("timing-state-count", lambda: Timestamp.from_state({"epoch": -1})),
    ("timing-state-unknown", lambda: Timestamp.from_state({**Timestamp().to_state(), "step": 1})),
    # Triggers.
]
