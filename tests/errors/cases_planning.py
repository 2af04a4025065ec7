"""Wrong runs at plans."""

from __future__ import annotations

from collections.abc import Callable

from stretto.batching import SizeFunction
from stretto.planning import plan
from stretto.timing import Horizon

RUN = Horizon("2ep", dataset_num_samples=1000)

CASES: list[tuple[str, Callable[[], object]]] = [
    ("planning-function", lambda: plan(RUN, SizeFunction(lambda now, size: 8 + now.token))),
]
