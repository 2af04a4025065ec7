"""Batches of any shape: counted, cut, moved."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

from stretto.data import count_samples, move_batch, take_samples
from stretto.data.containers import mapped, opened
from stretto.errors import DataError


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any
    name: str = "train"


class Encoding(collections.UserDict[str, Any]):
    """As a Hugging Face encoding: a mapping with something beside its items."""

    def __init__(self, data: dict[str, Any], kind: str = "fast") -> None:
        super().__init__(data)
        self.kind = kind


class Frozen(Mapping[str, Any]):
    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


class Registered:
    def __init__(self, x: Any) -> None:
        self.x = x


_pytree.register_pytree_node(
    Registered, lambda node: ([node.x], None), lambda items, _: Registered(next(iter(items)))
)

KINDS: dict[str, Any] = {
    "tensor": lambda x, y: x,
    "list": lambda x, y: [x, y],
    "tuple": lambda x, y: (x, y),
    "named tuple": Pair,
    "dataclass": Record,
    "dict": lambda x, y: {"x": x, "y": y},
    "ordered dict": lambda x, y: collections.OrderedDict(x=x, y=y),
    "default dict": lambda x, y: collections.defaultdict(list, x=x, y=y),
    "encoding": lambda x, y: Encoding({"x": x, "y": y}, kind="slow"),
    "frozen mapping": lambda x, y: Frozen({"x": x, "y": y}),
    "nested": lambda x, y: {"inputs": {"ids": x, "more": (x, [y])}, "y": y},
    "registered": lambda x, y: [Registered(x), y],
}


def shown(batch: Any) -> Any:
    """A batch as plain values, with the types of its containers."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch.tolist()
    container = opened(batch)
    if container is None:
        return batch
    extra = getattr(batch, "kind", getattr(batch, "default_factory", None))
    return type(batch).__name__, extra, [shown(item) for item in container.items]


@pytest.mark.parametrize("kind", KINDS)
@given(
    n=st.integers(2, 9), start=st.integers(0, 8), count=st.integers(1, 9), step=st.integers(1, 4)
)
def test_a_part_of_a_batch_is_the_batch_of_that_part(
    kind: str, n: int, start: int, count: int, step: int
) -> None:
    x, y = torch.arange(3 * n).reshape(n, 3), np.arange(n) * 10
    batch, part = KINDS[kind](x, y), slice(start, start + count, step)
    assert count_samples(batch) == n
    assert shown(take_samples(batch, part)) == shown(KINDS[kind](x[part], y[part]))
    assert shown(batch) == shown(KINDS[kind](x, y))


def test_tensors_are_views() -> None:
    x = torch.arange(6.0)
    part = take_samples({"x": x}, slice(1, None, 2))["x"]
    part.zero_()
    assert x.tolist() == [0, 0, 2, 0, 4, 0]


def test_what_belongs_to_the_whole_batch_stays() -> None:
    batch = {
        "x": torch.zeros(4, 2),
        "positions": torch.arange(2)[None],
        "scale": torch.tensor(2.0),
        "rate": 0.5,
        "split": "train",
        "classes": ["cat", "dog"],
        "nothing": None,
    }
    part = take_samples(batch, slice(0, 1))
    assert part.pop("x").shape == (1, 2)
    assert all(part[key] is batch[key] for key in part if key != "classes")
    assert part["classes"] == ["cat", "dog"]


def test_lists_have_an_item_for_each_sample() -> None:
    boxes = [{"boxes": torch.zeros(k, 4)} for k in (2, 0, 5)]
    batch = (torch.zeros(3, 8), boxes, ["a", "b", "c"], (7, 8, 9))
    images, some, names, numbers = take_samples(batch, slice(1, 3))
    assert (len(images), some, names, numbers) == (2, boxes[1:], ["b", "c"], (8, 9))


def test_two_tensors_of_two_samples_are_two_tensors() -> None:
    x, y = take_samples([torch.tensor([1, 2]), torch.tensor([3, 4])], slice(1, 2))
    assert (x.tolist(), y.tolist()) == ([2], [4])


def test_lists_without_tensors_are_counted() -> None:
    assert count_samples({"texts": ["a", "b", "c"]}) == 3
    assert take_samples(["a", "b", "c"], slice(1, 3)) == ["b", "c"]


@pytest.mark.parametrize(
    ("batch", "num_samples", "match"),
    [
        ((torch.zeros(4), torch.zeros(3)), None, "has 3 as its first dimension"),
        (torch.zeros(4), 3, "has 4 as its first dimension"),
        ({"x": 1}, 3, "nothing in it has 3"),
        ({"x": torch.tensor(1.0)}, None, "tensor"),
        (object(), None, "batch of type object"),
    ],
)
def test_contradictions_are_refused(batch: Any, num_samples: int | None, match: str) -> None:
    with pytest.raises(DataError, match=match):
        take_samples(batch, slice(0, 1), num_samples)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_moved_whole(kind: str) -> None:
    x = torch.arange(4)
    moved = move_batch(KINDS[kind](x, x), "meta")
    found = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor.device.type)
        return tensor

    mapped(note, moved)
    assert set(found) == {"meta"}


def test_a_batch_that_moves_itself_does_so() -> None:
    class Own:
        def to(self, device: str) -> str:
            return f"moved to {device}"

    assert move_batch(Own(), "cpu") == "moved to cpu"


class Attributes(dict[str, Any]):
    """Its items are attributes, too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class OneStore(collections.UserDict[str, Any]):
    """A copy of it has the same items."""

    def __copy__(self) -> OneStore:
        result = type(self)()
        result.data = self.data
        return result


@dataclasses.dataclass
class Masked:
    x: Tensor

    def __post_init__(self) -> None:
        self.mask = self.x > 1


class Hidden:
    def __init__(self) -> None:
        self.x = torch.arange(4)


def packed_steps() -> Any:
    return torch.nn.utils.rnn.pack_sequence([torch.ones(1)] * 4)


def test_a_mapping_whose_items_are_attributes_is_cut_as_a_whole() -> None:
    part = take_samples(Attributes(x=torch.arange(4)), slice(1, 3))
    assert part.x is part["x"]
    assert part.x.tolist() == [1, 2]


def test_a_mapping_that_shares_its_items_with_its_copy_is_refused_and_not_changed() -> None:
    batch = OneStore({"x": torch.arange(4)})
    with pytest.raises(DataError, match="__copy__"):
        take_samples(batch, slice(1, 3))
    assert batch["x"].tolist() == [0, 1, 2, 3]


def jagged() -> Tensor:
    rows = [torch.ones(one + 1) for one in range(4)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize(
    "batch",
    [
        Masked(torch.arange(4)),
        (torch.arange(4), Hidden()),
        (torch.arange(4), packed_steps()),
        (torch.arange(4), jagged()),
        (torch.arange(4), torch.eye(4).to_sparse()),
    ],
    ids=["derived", "hidden", "packed", "nested", "sparse"],
)
def test_what_holds_samples_and_cannot_be_cut_is_refused(batch: Any) -> None:
    with pytest.raises(DataError, match="split_batch"):
        take_samples(batch, slice(1, 3))


def test_a_packed_sequence_has_as_many_samples_as_sequences() -> None:
    assert count_samples(torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])) == 2
