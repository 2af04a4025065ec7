"""Schedules and sizes that Seesaw and its relative cannot couple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.batching import Seesaw
from stretto.schedules import Cosine, Schedule
from stretto.timing import Horizon

RUN = Horizon("2ep", dataset_num_samples=100)


def bind(decay: Schedule, size: Any = 8, run: Horizon = RUN, **options: Any) -> object:
    """Bind the sizes of a Seesaw."""
    return Seesaw(decay, size, **options).policy.bind(run)


CASES: list[tuple[str, Callable[[], object]]] = [
    ("seesaw-wall-time", lambda: bind(Cosine(), run=Horizon("1h"))),
]
