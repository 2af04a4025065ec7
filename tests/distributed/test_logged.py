"""Values logged on several ranks, with ranks that only exchange texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from stretto.distributed.logged import Logged
from stretto.errors import TrainingError


class Others:
    """Ranks of which this is one; what the others say is known before."""

    is_loss_rank = True

    def __init__(self, *others: dict[str, Any], rank: int = 0) -> None:
        self.texts = [json.dumps(other) for other in others]
        self.rank = rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, text: str, *, call: str = "") -> list[str]:
        return [*self.texts[: self.rank], text, *self.texts[self.rank :]]


def test_a_mean_counts_every_value_of_every_rank_once() -> None:
    logged = Logged()
    logged.add("a", 1.0)
    logged.add("a", torch.tensor(3.0))
    logged.add("b", 2.0, weight=3)
    others: Any = Others({"a": ["mean", 5.0, 1.0], "c": ["sum", 7.0, 2.0]}, {})
    assert logged.take(others) == {"a": 3.0, "b": 2.0, "c": 7.0}
    assert not logged


@pytest.mark.parametrize("rank", [0, 1])
def test_the_last_value_is_that_of_the_first_rank_that_has_one(rank: int) -> None:
    logged = Logged()
    logged.add("a", 1.0, reduce="last")
    logged.add("a", torch.tensor(2.0), reduce="last")
    others: Any = Others({"a": ["last", 9.0, 1.0]}, rank=rank)
    assert logged.take(others) == {"a": 2.0 if rank == 0 else 9.0}


def test_ranks_that_reduce_one_name_in_two_ways_are_refused() -> None:
    logged = Logged()
    logged.add("a", 1.0)
    others: Any = Others({"a": ["sum", 1.0, 1.0]})
    with pytest.raises(TrainingError, match="reduce"):
        logged.take(others)


def test_tensors_are_read_when_the_line_is_written_as_they_were_when_logged() -> None:
    logged, value = Logged(), torch.zeros(())
    for _ in range(1000):
        value += 1
        logged.add("a", value, reduce="sum")
    ranks: Any = Others()
    assert logged.take(ranks) == {"a": 500500.0}


def test_saved_values_come_back_on_the_first_rank_alone() -> None:
    logged = Logged()
    logged.add("a", 1.0)
    one: Any = Others()
    saved = json.loads(json.dumps(logged.state_dict(one)))
    assert logged.take(one) == {"a": 1.0}, "looking takes nothing away"
    for rank in range(2):
        again, ranks = Logged(), Others({}, rank=rank)
        again.load_state_dict(saved, ranks)  # type: ignore[arg-type]
        assert bool(again) == (rank == 0)
