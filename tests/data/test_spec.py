from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from stretto.data import DataSpec, StepLoader
from stretto.errors import DataError


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


def test_counts_come_from_the_data_set_unless_given() -> None:
    loader: Any = DataLoader(Text([1, 2, 3]))  # type: ignore[arg-type]
    for data in (Text([1, 2, 3]), loader):
        spec = DataSpec(data)
        assert (spec.known_num_tokens, spec.known_tokens_per_sample) == (90, 30)
    spec = DataSpec(Text([1, 2, 3]), num_tokens=60, tokens_per_sample=20)
    assert (spec.known_num_tokens, spec.known_tokens_per_sample) == (60, 20)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"data": numbers(5), "num_samples": 6}, "num_samples=6: the data have 5"),
        ({"data": numbers(5), "num_samples": 0}, "num_samples=0"),
        ({"data": numbers(5), "tokens_per_sample": 1.5}, "tokens_per_sample=1.5"),
        ({"data": numbers(5), "num_tokens": True}, "num_tokens=True"),
        ({"data": numbers(0)}, "it has no samples"),
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
    with pytest.raises(DataError, match="so it is packed; pass DataSpec"):
        spec.take_samples(batch, slice(0, 1), 3)


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
    for data in (Counts(**methods), DataLoader(Counts(**methods), 4)):  # type: ignore[arg-type]
        assert DataSpec(data).known_num_tokens == count
    assert DataSpec(Counts(**methods), num_tokens=61).known_num_tokens == 61


def test_tokens_of_a_data_set_must_be_a_number() -> None:
    with pytest.raises(DataError, match=r"cannot use 1.5, which Counts.get_num_tokens\(\) returns"):
        _ = DataSpec(Counts(get_num_tokens=lambda: 1.5)).known_num_tokens


def test_a_data_set_counts_the_samples_and_tokens_of_a_batch() -> None:
    spec = DataSpec(Counts(get_batch_size=lambda batch: 3, get_num_tokens=lambda batch: 7))
    assert (spec.count_samples(torch.zeros(2)), spec.count_tokens(torch.zeros(2))) == (3, 7)
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
    with pytest.warns(UserWarning, match="has 60 tokens, and num_tokens is 59: times") as caught:
        run(59)
    assert len(caught) == 1


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_data_loader_that_drops_its_last_batch_says_what_happens_to_ours(drop_last: bool) -> None:
    given = DataLoader(numbers(10), batch_size=4, drop_last=drop_last)
    sizes = [4, 4] if drop_last else [4, 4, 2]
    assert [step.size for step in StepLoader(given, 4, max_duration="1ep")] == sizes
    kept = StepLoader(given, 4, max_duration="1ep", last_batch="keep")
    assert [step.size for step in kept] == [4, 4, 2]
    stream = DataLoader(Stream(), batch_size=2, drop_last=drop_last)
    sizes = [2] if drop_last else [2, 1]
    assert [step.size for step in StepLoader(stream, 2, max_duration="1ep")] == sizes
