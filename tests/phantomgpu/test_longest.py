"""Longest samples, without a phantom: what a DataLoader then gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phantomgpu import longest


class Texts(Dataset[dict[str, list[int]]]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, at: int) -> dict[str, list[int]]:
        return {"input_ids": [at] * (1 + at * 7 % 100)}


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(8, 4))


@pytest.fixture(autouse=True)
def longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)
    monkeypatch.setattr(longest, "NOTES", {})
    longest.start()


def lengths(loader: DataLoader[Any]) -> list[list[int]]:
    return [[len(one["input_ids"]) for one in batch] for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
def test_each_batch_has_the_longest_samples(workers: int) -> None:
    """The first step has no state of the optimizer yet, and workers make batches beforehand."""
    loader = DataLoader(Texts(), 8, shuffle=True, collate_fn=list, num_workers=workers)
    batches = lengths(loader)
    assert batches == [[*range(100, 92, -1)]] * 12 + [[100, 99, 98, 97]]
    assert lengths(loader) == batches
    assert [*longest.NOTES] == ["looked at 100 of 100 samples; the longest has 100 elements"]


def test_of_batches_of_different_sizes_the_largest_is_given() -> None:
    own = [[0, 1, 2, 3], [50], [99, 98], [4, 5, 6, 7, 8, 9]]
    batches = lengths(DataLoader(Texts(), batch_sampler=own, collate_fn=list))
    assert [[len(batch), max(batch)] for batch in batches] == [[6, 64]] * 4


def test_what_cannot_be_ordered_is_said() -> None:
    assert len(list(DataLoader(Stream(), 4))) == 2
    assert "not possible for Stream" in "".join(longest.NOTES)


def test_a_script_without_a_loader_is_said() -> None:
    assert [*longest.NOTES] == ["no DataLoader was asked"]
