"""Ranks as threads of one process: they exchange what they say, and no process group is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from stretto.runtime import Ranks


def on_threads(work: Sequence[Callable[[Ranks], Any]]) -> list[Any]:
    """Run each function as a rank; return what each returns, or the error that it raises."""
    barrier, said = Barrier(len(work), timeout=60), [None] * len(work)

    def run(rank: int) -> Any:
        def gather(value: Any, **_: object) -> list[Any]:
            said[rank] = value
            barrier.wait()
            found = list(said)
            barrier.wait()
            return found

        def agree(values: Sequence[float]) -> list[float]:
            return [sum(column) for column in zip(*gather(list(values)), strict=True)]

        ranks: Any = Ranks()
        ranks.rank, ranks.world_size = rank, len(work)
        ranks.gather, ranks.agree = gather, agree
        try:
            return work[rank](ranks)
        except Exception as error:  # noqa: BLE001  it is what is looked at
            return error

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, range(len(work))))
