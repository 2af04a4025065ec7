"""Processes that agree on a name, played by threads over one store that outlives their attempts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from stretto.errors import TrainingError
from stretto.runtime.rendezvous import agree_on_name


def meet(store: Store, world_size: int, ranks: list[int] | None = None) -> list[str]:
    with ThreadPoolExecutor(world_size) as pool:
        ranks = list(range(world_size)) if ranks is None else ranks
        return list(pool.map(lambda rank: agree_on_name(store, rank, world_size), ranks))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_of_an_attempt_agree_and_no_two_attempts_do(world_size: int) -> None:
    store = HashStore()
    names = [meet(store, world_size) for _ in range(20)]
    assert all(len(set(attempt)) == 1 for attempt in names)
    assert len({attempt[0] for attempt in names}) == 20


def test_another_number_of_processes_may_come_next() -> None:
    store = HashStore()
    names = [set(meet(store, world_size)) for world_size in (3, 2, 4, 1)]
    assert [len(attempt) for attempt in names] == [1, 1, 1, 1]
    assert len(set.union(*names)) == 4


@pytest.mark.parametrize("came", [[0], [1], [0, 1], [1, 2]], ids=str)
def test_what_an_attempt_that_never_began_has_left_does_no_harm(came: list[int]) -> None:
    """Some ranks died before they met: the others waited, and were ended."""
    store = HashStore()
    for rank in came:
        with pytest.raises(TrainingError, match="begin"):
            agree_on_name(store, rank, 3, clock=iter(range(0, 10**6, 100)).__next__)
    assert len(set(meet(store, 3, ranks=[2, 1, 0]))) == 1
