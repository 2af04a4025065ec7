from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from stretto.data import DataSpec, StepLoader
from stretto.errors import DataError
from stretto.training import Loading


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Text(list[int]):
    num_tokens = 90
    tokens_per_sample = 30


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("data", "is_map_style", "num_samples"),
    [
        (numbers(5), True, 5),
        ([1, 2, 3], True, 3),
        (DataLoader(numbers(5), batch_size=2), True, 5),
        (DataLoader(numbers(5), shuffle=True, drop_last=True), True, 5),
        (DataLoader(numbers(5), sampler=RandomSampler(numbers(5), num_samples=8)), False, 8),
        (DataLoader(numbers(7), sampler=[0, 1, 2, 3], batch_size=3, drop_last=True), False, 3),
        (
            DataLoader(
                numbers(5), batch_sampler=OwnBatches(SequentialSampler(numbers(5)), 2, False)
            ),
            False,
            None,
        ),
        (DataLoader(numbers(5), batch_size=None), False, None),
        (DataLoader(Stream(), batch_size=2), False, None),
        (Stream(), False, None),
        (iter([1]), False, None),
    ],
)
def test_what_the_data_are(data: Any, is_map_style: bool, num_samples: int | None) -> None:
    spec = DataSpec.of(data)
    assert (spec.is_map_style, spec.known_num_samples) == (is_map_style, num_samples)
    assert DataSpec.of(spec) is spec


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"data": numbers(5), "num_samples": 6}, "num_samples=6: the data have 5"),
        ({"data": numbers(5), "num_samples": 0}, "num_samples=0"),
        ({"data": numbers(5), "tokens_per_sample": 1.5}, "tokens_per_sample=1.5"),
        ({"data": numbers(5), "num_tokens": True}, "num_tokens=True"),
        ({"data": numbers(0)}, "empty"),
        ({"data": "text"}, "data of type str"),
        ({"data": None}, "data of type NoneType"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        DataSpec(**settings)


def test_own_functions_count_and_cut() -> None:
    spec = DataSpec(
        iter([]),
        get_num_samples_in_batch=len,
        get_num_tokens_in_batch=sum,
        split_batch=lambda batch, part: batch[part],
    )
    assert spec.count_samples("abc") == 3
    assert spec.count_tokens([3, 4]) == 7
    assert spec.take_samples("abcd", slice(1, 3), 4) == "bc"


def test_a_whole_batch_is_not_cut() -> None:
    batch = {"x": torch.zeros(3)}
    assert DataSpec([1]).take_samples(batch, slice(0, 3), 3) is batch


def test_a_packed_batch_is_not_cut_by_the_tensors_that_happen_to_have_its_length() -> None:
    """The row of all tokens would be taken whole for each part."""
    spec = DataSpec(range(9), get_num_samples_in_batch=lambda batch: len(batch["lengths"]))
    batch = {"input_ids": torch.ones(1, 6), "lengths": torch.tensor([1, 2, 3])}
    assert spec.take_samples(batch, slice(0, 3), 3) is batch
    with pytest.raises(DataError, match="DataSpec"):
        spec.take_samples(batch, slice(0, 1), 3)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_data_loader_that_drops_its_last_batch_says_what_happens_to_ours(drop_last: bool) -> None:
    given = DataLoader(numbers(10), batch_size=4, drop_last=drop_last)
    sizes = [4, 4] if drop_last else [4, 4, 2]
    assert [step.num_samples for step in StepLoader(given, 4, max_duration="1ep")] == sizes
    kept = StepLoader(given, 4, max_duration="1ep", loading={"last_batch": "keep"})
    assert [step.num_samples for step in kept] == [4, 4, 2]
    stream = DataLoader(Stream(), batch_size=2, drop_last=drop_last)
    sizes = [2] if drop_last else [2, 1]
    assert [step.num_samples for step in StepLoader(stream, 2, max_duration="1ep")] == sizes


def test_the_sampler_in_a_given_batch_sampler_is_the_order() -> None:
    data = TensorDataset(torch.arange(9))

    def loader(sampler: Any) -> DataLoader[Any]:
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 4, drop_last=True))

    own = DataSpec(loader(SubsetRandomSampler(range(6))))
    assert not own.is_map_style
    assert own.known_num_samples == 4
    shuffled = DataSpec(loader(RandomSampler(data)))
    assert shuffled.is_map_style
    assert shuffled.last_batch == "drop"
    assert shuffled.order(Loading()).shuffle
    assert not DataSpec(loader(SequentialSampler(data))).order(Loading()).shuffle
    with pytest.raises(DataError, match="dealt to the ranks twice"):
        DataSpec(loader(DistributedSampler(data, 2, 0)))
