"""Wrong input at the clock: times, conversions, horizons, timers, triggers."""

from __future__ import annotations

from collections.abc import Callable

from stretto.timing import Time, Timestamp, convert

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
    # The clock.
    ("timing-state-count", lambda: Timestamp.from_state({"epoch": -1})),
    ("timing-state-unknown", lambda: Timestamp.from_state({**Timestamp().to_state(), "step": 1})),
    # Triggers.
]
