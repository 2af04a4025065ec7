"""What the processes of a group tell each other, on two processes."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.threaded_ranks import on_threads
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from stretto.errors import DataError, StrettoError, TrainingError
from stretto.runtime.ranks import Ranks, all_same, is_started, marks


def exchange(ranks: Ranks) -> dict[str, Any]:
    sums = ranks.agree([*marks(7), *marks(ranks.rank)])
    return {
        "texts": ranks.gather("ab\u00e9" * ranks.rank),
        "rows": ranks.gather_dp((ranks.dp_rank, 2**40 + ranks.dp_rank)),
        "sums": ranks.agree([2.0**53 - 2 if ranks.rank else 1.0, 0.5]),
        "same": [all_same(sums[:2], 2), all_same(sums[2:], 2)],
        "first": ranks.from_first(lambda: f"rank {ranks.rank}"),
    }


def work(rank: int, folder: Path, results: Any) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    assert is_started()
    ranks = Ranks.of()
    over_default = exchange(ranks)
    results.put((over_default, exchange(ranks.join())))
    dist.destroy_process_group()


def test_all_processes_get_the_same_in_order(
    fork_server: ForkServerContext, tmp_path: Path
) -> None:
    """Over the default group, and over one of their own."""
    results = fork_server.Queue()
    processes = [fork_server.Process(target=work, args=(at, tmp_path, results)) for at in (0, 1)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    expected = {
        "texts": ["", "ab\u00e9"],
        "rows": [(0, 2**40), (1, 2**40 + 1)],
        "sums": [2.0**53 - 1, 1.0],
        "same": [True, False],
        "first": "rank 0",
    }
    assert found == [(expected, expected)] * 2


class NoPickleError(Exception):
    def __init__(self, text: str, *, more: str) -> None:
        super().__init__(text + more)


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [(OSError(28, "full"), OSError), (NoPickleError("a", more="b"), StrettoError)],
)
def test_what_fails_on_one_rank_fails_on_all(error: Exception, elsewhere: type) -> None:
    def fail(ranks: Ranks) -> Any:
        def second() -> int:
            if ranks.rank == 1:
                raise error
            return 1

        return ranks.together(second)

    first, second, third = on_threads([fail] * 3)
    assert second is error
    assert isinstance(first, elsewhere)
    assert isinstance(third, elsewhere)


def test_ranks_that_nobody_has_connected_are_refused_when_they_must_talk() -> None:
    ranks = Ranks.of(1, 2)
    assert (ranks.dp_rank, ranks.dp_world_size, ranks.agree([3.0])) == (1, 2, [3.0])
    with pytest.raises(DataError, match="not started"):
        ranks.gather_dp(1)


def test_a_rank_that_ends_after_it_came_is_waited_for_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = HashStore()
    kept.set_timeout(timedelta(seconds=2))
    monkeypatch.setattr("stretto.runtime.ranks.own_store", partial(_under, kept))
    monkeypatch.setattr("stretto.runtime.ranks.is_started", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "gloo")
    other = _under(kept, "meeting/1")
    for name, mark in zip(("marks", "squares"), (1, 1), strict=True):
        other.add(name, mark)
    other.add("here", 1)
    ranks = Ranks(torch.device("cpu"), timedelta(seconds=0.2))
    with pytest.raises(TrainingError, match="rank 1 did not come within"):
        ranks.differing("a seed")


def _under(store: Store, name: str) -> Store:
    return PrefixStore(name, store)
