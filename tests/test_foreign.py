"""Words of other libraries are answered, and objects of others are left as they are."""

from __future__ import annotations

import dataclasses
from collections import UserDict, UserList
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from stretto.batching import Seesaw
from stretto.config import parse_run_file
from stretto.data import count_samples, count_tokens, move_batch, take_samples
from stretto.data.containers import join_samples, nodes
from stretto.errors import BatchSizeError, ConfigError, ScheduleError, StrettoError
from stretto.schedules import Cosine, Linear, as_schedule
from stretto.training import Trainer, prepare

DATA = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))


def trainer(**settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"max_duration": "2ep", "batch_size": 8, "loss": nn.MSELoss()}
    return Trainer(model, DATA, optimizer=optimizer, **given | settings)


@pytest.mark.parametrize(
    ("call", "write"),
    [
        (lambda: trainer(max_epochs=3), "max_duration"),
        (lambda: trainer(gradient_clip_val=1.0), "clip_norm"),
        (lambda: trainer(stepping={"max_grad_norm": 1.0}), "clip_norm"),
        (lambda: trainer(validate_frequency=2), "evaluate"),
        (lambda: trainer(batch_increase_function=len), "IncreaseFunction"),
        (lambda: trainer(get_factor=len), "schedules="),
        (lambda: Cosine(T_max=100), "over"),  # type: ignore[call-arg]
        (lambda: Linear(warmup_ratio=0.1), "warmup"),  # type: ignore[call-arg]
        (lambda: prepare(DATA, 8, epochs=3), "max_duration"),  # type: ignore[call-arg]
        (lambda: parse_run_file("epochs: 3\nbatch_size: 8\ndata: {target: 'a:b'}"), "max_duration"),
    ],
)
def test_words_of_others_are_answered(call: Callable[[], Any], write: str) -> None:
    with pytest.raises(ConfigError, match=write):
        call()


def test_a_scheduler_of_torch_is_answered() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ScheduleError, match="from_torch"):
        as_schedule(torch.optim.lr_scheduler.StepLR(optimizer, 3))


def test_only_a_trainer_finds_how_many_samples_fit() -> None:
    with pytest.raises(BatchSizeError, match="Trainer finds it"):
        prepare(DATA, "auto", max_duration="1ep")
    with pytest.raises(ConfigError, match="find_batch_size"):
        prepare(DATA, 8, max_duration="1ep", use_maximum_batch_size=True)  # type: ignore[call-arg]


def test_a_pair_sets_sizes_and_schedule() -> None:
    pair = Seesaw(Cosine(), 8, maximum=32)
    both = trainer(batch_size=pair)
    schedules = {"lr": pair.schedule}
    apart = trainer(batch_size=pair.policy, schedules=schedules, rule=pair.rule)
    assert both.plan is not None
    assert apart.plan is not None
    assert list(both.plan.batches()) == list(apart.plan.batches())
    assert both.run.hyperparameters.schedules == apart.run.hyperparameters.schedules
    rules = {"lr": pair.rule}
    assert both.run.hyperparameters.rules == apart.run.hyperparameters.rules == rules
    run = prepare(DATA, pair, max_duration="2ep")
    assert run.prepared.schedules == schedules
    assert run.prepared.rules == rules
    for wrong in (
        {"batch_size": pair, "schedules": {"lr": Cosine()}},
        {"batch_size": pair, "rule": pair.rule},
    ):
        with pytest.raises(StrettoError):
            trainer(**wrong)


# Batches and data sets of others.


class Kept(MutableMapping[str, Any]):
    """A mapping whose shallow copies share what is in it, and that is neither true nor false."""

    def __init__(self, **items: Any) -> None:
        self._inner = {"items": items}
        self.shape = self.kind = "own"

    def __getitem__(self, key: str) -> Any:
        return self._inner["items"][key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._inner["items"][key] = value

    def __delitem__(self, key: str) -> None:
        del self._inner["items"][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner["items"])

    def __len__(self) -> int:
        return len(self._inner["items"])

    def __bool__(self) -> bool:
        raise TypeError("asked whether a batch is true")

    def to(self, *_: Any) -> Any:
        raise TypeError("moved in a way of its own")

    get_batch = num_tokens = collate = to


class Slots(Mapping[str, Any]):
    """An immutable mapping whose class takes something else than items."""

    __slots__ = ("_keys", "_values")

    def __init__(self, keys: list[str], values: list[Any]) -> None:
        self._keys, self._values = keys, values

    def __getitem__(self, key: str) -> Any:
        return self._values[self._keys.index(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    __bool__ = Kept.__bool__


class Encoding(UserDict[str, Any]):
    """As an encoding of Hugging Face: items are attributes, and `to` moves them in place."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> Any:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Names(list[Any]):
    """A list with an attribute, and a class that takes other arguments."""

    def __init__(self, first: Any, *others: Any) -> None:
        super().__init__([first, *others])
        self.kind = "own"

    def count_samples(self) -> int:
        raise TypeError("called")


class Couple(tuple[Any, ...]):
    def __new__(cls, x: Any, y: Any) -> Couple:
        return super().__new__(cls, (x, y))


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Computes something of what it is made of."""

    x: Any
    y: Any
    shape: tuple[int, ...] = (2, 2)
    doubled: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x + 100)
        object.__setattr__(self, "doubled", self.x * 2)


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "kept": lambda x, y: Kept(x=x, y=y),
    "slots": lambda x, y: Slots(["x", "y"], [x, y]),
    "proxy": lambda x, y: MappingProxyType({"x": x, "y": y}),
    "encoding": lambda x, y: Encoding({"shape": x, "y": y}),
    "list with attributes": Names,
    "tuple of two": Couple,
    "dataclass": Scaled,
    "dict": lambda x, y: {"x": x, "y": y},
    "pair": lambda x, y: [x, y],
}


def plain(batch: Any) -> Any:
    """A batch as plain values, with the types and attributes of its containers."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, Mapping):
        items: list[Any] = [(key, plain(batch[key])) for key in batch]
    elif isinstance(batch, (list, tuple, UserList)):
        items = [plain(item) for item in batch]
    elif dataclasses.is_dataclass(batch):
        items = [plain(getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    else:
        return batch
    return type(batch).__name__, vars(batch).get("kind") if hasattr(batch, "kind") else None, items


@st.composite
def foreign_batches(draw: st.DrawFn, size: int) -> Any:
    """A batch of `size` samples of nested containers, with things beside the tensors."""
    rows = torch.arange(3 * size).reshape(size, 3) + 10 * draw(st.integers(0, 3))
    beside: list[Callable[[], Any]] = [
        lambda: torch.arange(size) * 7,
        lambda: [f"n{i}" for i in range(size)],
        lambda: UserList(f"n{i}" for i in range(size)),
        lambda: None,
        lambda: 0.5,
        lambda: "text",
        lambda: torch.tensor(2.0),
        lambda: torch.Size([3] * size),
    ]
    batch: Any = rows
    for _ in range(draw(st.integers(1, 3))):
        make = CONTAINERS[draw(st.sampled_from(sorted(CONTAINERS)))]
        if make is not Scaled or isinstance(batch, torch.Tensor):
            batch = make(batch, draw(st.sampled_from(beside))())
    return batch


def tensors_of(batch: Any) -> list[torch.Tensor]:
    return [node for node in nodes(batch) if isinstance(node, torch.Tensor) and node.dim()]


@given(data=st.data(), size=st.integers(1, 4), at=st.integers(0, 4))
def test_cutting_a_foreign_batch_leaves_it_alone_and_joins_again(
    data: st.DataObject, size: int, at: int
) -> None:
    batch = data.draw(foreign_batches(size))
    before, storage = plain(batch), [one.data_ptr() for one in tensors_of(batch)]
    at = min(at, size)
    cuts = [slice(0, at), slice(at, size)] if 0 < at < size else [slice(0, size)]
    parts = [take_samples(batch, cut, size) for cut in cuts]
    assert plain(batch) == before
    assert [one.data_ptr() for one in tensors_of(batch)] == storage
    assert [count_samples(part) for part in parts] == [cut.stop - cut.start for cut in cuts]
    assert plain(join_samples(parts, [cut.stop - cut.start for cut in cuts])) == before
    moved = move_batch(batch, "meta")
    assert {one.device.type for one in tensors_of(moved)} == {"meta"}
    assert plain(batch) == before
    assert count_tokens(batch) is None
