"""Who did not come, found in a store; the ranks are threads, or have left what they said."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from stretto.errors import TrainingError
from stretto.runtime.rank_monitor import RankMonitor

LATE = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 500ms for recv")
LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


def said(waiting: RankMonitor, error: Exception, *, inside_a_pass: bool = False) -> str:
    with pytest.raises(TrainingError) as caught, waiting.watch(inside_a_pass=inside_a_pass):
        raise error
    return str(caught.value)


def monitor(store: Any, rank: int, world_size: int = 4) -> RankMonitor:
    return RankMonitor(rank, world_size, store=store, timeout=timedelta(seconds=4))


def test_all_that_waited_name_those_that_did_not_come() -> None:
    """Also a rank that only sees that another one, which gave up first, has gone."""
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        errors = {0: LATE, 3: LOST}
        answers = list(pool.map(lambda rank: said(monitor(store, rank), errors[rank]), errors))
    assert all("ranks 1, 2 did not come within 4 s" in one for one in answers)
    # One that was stuck goes on when the others have given up, and sees that they have gone.
    assert "ranks 1, 2 did not come" in said(monitor(store, 1), LOST)


def test_a_rank_that_ended_is_not_called_late() -> None:
    assert "one of them has ended" in said(monitor(HashStore(), 0), LOST)


def test_ranks_that_all_wait_are_told_so() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda rank: said(monitor(store, rank, 2), LATE), range(2)))
    assert all("or one came too late" in one for one in answers)


def test_a_store_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be kept by the very process that is stuck."""
    monkeypatch.setattr("stretto.runtime.rank_monitor._ANSWER_SECONDS", 0.1)
    over = threading.Event()

    class Silent:
        def set(self, key: str, value: str) -> None:
            del key, value
            over.wait()
            raise RuntimeError("the store has ended")

    try:
        assert "look at rank 0" in said(monitor(Silent(), 1), LATE)
    finally:
        over.set()


def test_inside_a_pass_other_errors_stay_what_they_are() -> None:
    shared = monitor(HashStore(), 0).watch(inside_a_pass=True)
    with pytest.raises(RuntimeError, match="shapes") as caught, shared:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not isinstance(caught.value, TrainingError)
