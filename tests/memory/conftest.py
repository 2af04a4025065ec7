"""What tests of memory share: ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest

from stretto.memory.finding.agreement import Agreement

OnRanks: TypeAlias = Callable[[Sequence[Callable[[Agreement], Any]]], list[Any]]


class Meeting:
    """A minimum over threads; breaks where a rank does not come."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.numbers: list[int] = []
        self.lock = threading.Lock()

    def agree(self, number: int) -> int:
        with self.lock:
            self.numbers.append(number)
        self.barrier.wait()
        least = min(self.numbers)
        if self.barrier.wait() == 0:
            self.numbers.clear()
        self.barrier.wait()
        return least


@pytest.fixture
def on_ranks() -> OnRanks:
    """Run a function on each rank, and return their results or errors."""

    def run_all(work: Sequence[Callable[[Agreement], Any]]) -> list[Any]:
        meeting = Meeting(len(work))
        results: list[Any] = [None] * len(work)

        def run(rank: int) -> None:
            try:
                results[rank] = work[rank](Agreement(meeting.agree))
            except Exception as error:  # noqa: BLE001  it is what is looked at
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    return run_all
