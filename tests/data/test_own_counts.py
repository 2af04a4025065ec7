"""Counts are those that are stated, whatever a data set calls its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.records import loader_with
from torch.utils.data import DataLoader

from stretto.data import DataSpec, StepLoader


class Counts:
    """A data set with attributes of its own meaning."""

    def __init__(self, **own: Any) -> None:
        self.__dict__ |= own

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(5)}


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("called without being asked to")


NAMES = [
    "num_tokens", "get_num_tokens", "tokens_per_sample", "num_samples", "get_batch_size",
    "get_num_samples_in_batch", "get_num_tokens_in_batch", "get_batch", "collate", "collate_fn",
    "sampler", "batch_sampler", "dataset", "split_batch", "batch_size", "drop_last", "sharded",
]  # fmt: skip


@given(names=st.sets(st.sampled_from(NAMES), min_size=1), is_method=st.booleans())
def test_nothing_is_guessed_from_the_names_of_a_data_set(names: set[str], is_method: bool) -> None:
    own: Any = Counts(**dict.fromkeys(names, never if is_method else 7))
    for data in (own, DataLoader(own, 4)):
        spec = DataSpec(data)
        assert [*spec.counts.values()] == [12, None, None]
        batches = [
            micro.batch for step in StepLoader(data, 5, max_duration="1ep") for micro in step
        ]
        assert [spec.count_samples(batch) for batch in batches] == [5, 5, 2]
        assert [spec.count_tokens(batch) for batch in batches] == [25, 25, 10]


@given(names=st.sets(st.sampled_from(NAMES), min_size=1), is_method=st.booleans())
def test_nothing_is_guessed_from_the_names_of_an_iterable(names: set[str], is_method: bool) -> None:
    class Stream(Counts):
        __len__: Any = None
        __getitem__: Any = None

        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.arange(12).split(4)

    loader = StepLoader(
        Stream(**dict.fromkeys(names, never if is_method else 7)), 5, max_duration="2ep"
    )
    assert [step.num_samples for step in loader] == [5, 5, 2] * 2
    assert loader.timer.token == 0


def test_what_is_stated_counts() -> None:
    spec = DataSpec(Counts(), num_tokens=61, get_num_samples_in_batch=lambda batch: 3)
    assert (spec.counts["dataset_num_tokens"], spec.count_samples(torch.zeros(2))) == (61, 3)
    spec = DataSpec(Counts(), tokens_per_sample=5, get_num_tokens_in_batch=lambda batch: 7)
    assert (spec.counts["tokens_per_sample"], spec.count_tokens(torch.zeros(2))) == (5, 7)


@pytest.mark.parametrize("sized", [True, False])
def test_a_number_of_tokens_that_is_not_that_of_an_epoch_is_warned_of_once(sized: bool) -> None:
    def run(stated: int, **settings: Any) -> StepLoader:
        listed: Any = [Counts()[index] for index in range(12)]
        data = Counts() if sized else DataLoader(listed, 4, sampler=[*range(12)])
        spec = DataSpec(data, num_tokens=stated)
        loader = loader_with(spec, 4, max_duration="2ep", **settings)
        assert sum(step.num_tokens for step in loader) == 120
        return loader

    assert run(60).timer.token == 120
    with pytest.warns(UserWarning, match="num_tokens") as caught:
        run(59)
    assert len(caught) == 1
