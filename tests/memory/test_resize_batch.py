"""A batch of any size from one that is at hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stretto.memory.examples import resize_batch

BATCH = {
    "x": torch.arange(12).reshape(3, 4),
    "mask": torch.ones(3, 4, 4),
    "label": torch.tensor([0, 1, 2]),
    "names": ["a", "b", "c"],
    "scale": 0.5,
    "pair": (torch.zeros(3), torch.tensor(1.0)),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_all_leaves_have_the_size(size: int) -> None:
    batch = resize_batch(BATCH, size)
    assert batch["x"].shape == (size, 4)
    assert batch["label"].tolist() == [i % 3 for i in range(size)]
    assert batch["names"] == [["a", "b", "c"][i % 3] for i in range(size)]
    assert batch["scale"] == 0.5
    assert batch["pair"][0].shape == (size,)
    assert batch["pair"][1] == 1.0


def test_it_owns_its_memory() -> None:
    given = torch.zeros(8, 2)
    resized = resize_batch(given, 3)
    assert resized.untyped_storage().nbytes() == 3 * 2 * 4
    resized.add_(1)
    assert not given.any()


def test_lists_of_tensors_are_columns() -> None:
    batch: Any = [torch.zeros(2, 3), torch.zeros(2)]
    assert [tensor.shape[0] for tensor in resize_batch(batch, 6)] == [6, 6]
