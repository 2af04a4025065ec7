"""Counts that a data set gives itself, and those that are stated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stretto.data import DataSpec, StepLoader
from stretto.errors import DataError


class Counts:
    """A data set with the methods that the proposals of Composer name."""

    def __init__(self, **methods: Any) -> None:
        self.__dict__ |= methods

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(5)}


@pytest.mark.parametrize(
    ("methods", "count"),
    [
        ({"num_tokens": lambda: 60}, 60),
        ({"get_num_tokens": lambda: 60}, 60),
        ({"num_tokens": 60}, 60),
        ({"get_num_tokens": lambda: None}, None),
        ({"get_num_tokens": lambda batch: 7}, None),
        ({"num_tokens": "many"}, None),
    ],
)
def test_a_data_set_is_asked_for_its_tokens(methods: dict[str, Any], count: int | None) -> None:
    own: Any = Counts(**methods)
    for data in (own, DataLoader(own, 4)):
        assert DataSpec(data).known_num_tokens == count
    assert DataSpec(Counts(**methods), num_tokens=61).known_num_tokens == 61


def test_tokens_of_a_data_set_must_be_a_number() -> None:
    with pytest.raises(DataError, match="get_num_tokens"):
        _ = DataSpec(Counts(get_num_tokens=lambda: 1.5)).known_num_tokens


def test_a_data_set_counts_the_samples_and_tokens_of_a_batch() -> None:
    spec = DataSpec(Counts(get_batch_size=lambda batch: 3, get_num_tokens=lambda batch: 7))
    assert (spec.count_samples(torch.zeros(2)), spec.count_tokens(torch.zeros(2))) == (3, 7)
    both: Any = Counts(get_num_tokens=lambda batch=None: 60 if batch is None else 7)
    assert DataSpec(both).count_tokens(torch.zeros(2)) == 7
    assert DataSpec(both).known_num_tokens == 60
    own = DataSpec(Counts(get_batch_size=lambda batch: 3), get_num_samples_in_batch=lambda batch: 4)
    assert own.count_samples(torch.zeros(2)) == 4
    other = DataSpec(Counts(get_batch_size=lambda: 64))  # of a loader, not of a batch
    assert other.count_samples(torch.zeros(2)) == 2


@pytest.mark.parametrize("sized", [True, False])
def test_a_number_of_tokens_that_is_not_that_of_an_epoch_is_warned_of_once(sized: bool) -> None:
    def run(stated: int, **settings: Any) -> StepLoader:
        listed: Any = [Counts()[index] for index in range(12)]
        data = Counts() if sized else DataLoader(listed, 4, sampler=[*range(12)])
        spec = DataSpec(data, num_tokens=stated)
        loader = StepLoader(spec, 4, max_duration="2ep", **settings)
        assert sum(step.num_tokens for step in loader) == 120
        return loader

    assert run(60).timer.token == 120
    with pytest.warns(UserWarning, match="num_tokens") as caught:
        run(59)
    assert len(caught) == 1
