"""Streams with workers, chance and resumes: each sample once, or an error before the first step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.records import loader_with
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from stretto.data import DataSpec, StepLoader
from stretto.errors import CheckpointError, DataError
from stretto.training import Evaluation, Trainer, prepare

COUNT = 60


class Shared(IterableDataset[int]):
    """Shares its samples out over workers; in an order of each epoch, if it shuffles."""

    def __init__(self, *, shuffles: bool = False) -> None:
        self.shuffles, self.epoch = shuffles, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = [*range(COUNT)]
        if self.shuffles:
            random.Random(self.epoch).shuffle(order)
        info = get_worker_info()
        yield from order if info is None else order[info.id :: info.num_workers]


class Whole(IterableDataset[int]):
    """Yields all its samples in each worker."""

    def __iter__(self) -> Iterator[int]:
        yield from range(COUNT)


def seen(loader: StepLoader, steps: int | None = None) -> list[int]:
    found: list[int] = []
    for number, step in enumerate(loader, 1):
        found += [int(one) for micro in step for one in micro.batch]
        if number == steps:
            loader.finish()
            break
    return found


def stream(workers: int, batch_size: int, **settings: Any) -> StepLoader:
    data: Any = DataLoader(Shared(), batch_size=batch_size, num_workers=workers, **settings)
    return StepLoader(DataSpec(data, worker_sharded=True), 4, max_duration="2ep")


@pytest.mark.parametrize(
    ("before", "after", "is_exact"),
    [
        ((2, 4), (2, 4), True),
        ((2, 4), (3, 4), False),
        ((2, 4), (1, 4), False),
        ((2, 4), (0, 4), False),
        ((2, 4), (2, 6), False),
        ((1, 4), (2, 4), False),
        ((0, 4), (1, 4), True),
        ((1, 4), (0, 10), True),
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_stream_with_other_workers_goes_on_exactly_or_not_at_all(
    before: tuple[int, int], after: tuple[int, int], is_exact: bool
) -> None:
    first = stream(*before)
    found = seen(first, 7)
    state, resumed = first.state_dict(), stream(*after)
    if not is_exact:
        with pytest.raises(CheckpointError, match="num_workers"):
            resumed.load_state_dict(state)
        return
    resumed.load_state_dict(state)
    assert Counter(found + seen(resumed)) == dict.fromkeys(range(COUNT), 2)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_next_epoch_may_have_other_workers() -> None:
    first = stream(2, 4)
    found = seen(first, COUNT // 4)
    resumed = stream(3, 7)
    resumed.load_state_dict(first.state_dict())
    assert Counter(found + seen(resumed)) == dict.fromkeys(range(COUNT), 2)


@pytest.mark.parametrize("data", [Whole(), Shared()])
def test_workers_that_may_read_the_same_are_refused(data: Any) -> None:
    loader: Any = DataLoader(data, batch_size=4, num_workers=2)
    model = torch.nn.Linear(1, 1)
    given: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": lambda model, batch: model(batch).mean(),
        "max_duration": "1ba",
        "batch_size": 4,
    }
    calls: list[Callable[[], Any]] = [
        lambda: StepLoader(loader, 4, max_duration="1ba"),
        lambda: StepLoader(data, 4, max_duration="1ba", loading={"num_workers": 2}),
        lambda: prepare(loader, 4, max_duration="1ba"),
        lambda: prepare(data, 4, max_duration="1ba", loading={"num_workers": 2}),
        lambda: Trainer(model, loader, **given),
        lambda: Trainer(model, data, loading={"num_workers": 2}, **given),
        lambda: Trainer(model, torch.zeros(9, 1), evaluate=Evaluation(loader), **given),
    ]
    for call in calls:
        with pytest.raises(DataError, match="worker_sharded=True"):
            call()
    StepLoader(
        DataSpec(data, worker_sharded=True), 4, max_duration="1ba", loading={"num_workers": 2}
    )
    StepLoader(data, 4, max_duration="1ba", loading={"num_workers": 1})


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_hear_of_each_epoch(persistent: bool) -> None:
    data: Any = DataLoader(
        Shared(shuffles=True), batch_size=8, num_workers=1, persistent_workers=persistent
    )
    found = seen(StepLoader(data, 4, max_duration="3ep"))
    epochs = [found[start : start + COUNT] for start in range(0, 3 * COUNT, COUNT)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == [*range(COUNT)] for epoch in epochs)
    assert data.persistent_workers == persistent


def test_what_no_loader_can_repeat_or_tell_is_refused() -> None:
    class Other(DataLoader[Any]):
        """A loader that stretto does not copy."""

    told = Other(Shared(), num_workers=1, persistent_workers=True)
    unordered: Any = DataLoader(Shared(), num_workers=2, in_order=False)
    for data, name in ((told, "persistent_workers"), (unordered, "in_order")):
        with pytest.raises(DataError, match=name):
            StepLoader(DataSpec(data, worker_sharded=True), 4, max_duration="1ba")
    settings: Any
    for settings in ({"num_workers": 1}, {"collate_fn": list}):
        with pytest.raises(DataError, match=next(iter(settings))):
            loader_with(DataLoader(Whole()), 4, max_duration="1ba", **settings)


DRAWS: dict[str, Callable[[int], int]] = {
    "python": random.randrange,
    "torch": lambda count: int(torch.randint(count, ())),
    "numpy": lambda count: int(np.random.randint(count)),  # noqa: NPY002  what sources draw from
}


class Buffered(IterableDataset[int]):
    """Shuffles through a buffer, draw by draw, with a generator of the process."""

    def __init__(self, draw: Callable[[int], int], *, size: int) -> None:
        self._draw, self._size = draw, size

    def __iter__(self) -> Iterator[int]:
        buffer = list[int]()
        for one in range(COUNT):
            buffer.append(one)
            if len(buffer) == self._size:
                yield buffer.pop(self._draw(self._size))
        while buffer:
            yield buffer.pop(self._draw(len(buffer)))


@given(
    kind=st.sampled_from(sorted(DRAWS)),
    size=st.integers(2, 30),
    chunk=st.integers(1, 9),
    at=st.integers(1, 22),
    draws=st.lists(st.integers(0, 2), min_size=30, max_size=30),
)
def test_a_shuffle_buffer_repeats_itself_whatever_else_draws(
    kind: str, size: int, chunk: int, at: int, draws: list[int]
) -> None:
    def make() -> StepLoader:
        data: Any = DataLoader(Buffered(DRAWS[kind], size=size), batch_size=chunk)
        return StepLoader(data, 5, max_duration="2ep")

    def read(loader: StepLoader, steps: int | None = None) -> list[int]:
        found: list[int] = []
        for number, step in enumerate(loader, 1):
            found += [int(one) for micro in step for one in micro.batch]
            for _ in range(draws[number]):
                DRAWS[kind](7)
            if number == steps:
                loader.finish()
                break
        return found

    whole = read(make())
    first = make()
    before, resumed = read(first, at), make()
    DRAWS[kind](3)
    resumed.load_state_dict(first.state_dict())
    assert before + read(resumed) == whole
    assert Counter(whole) == dict.fromkeys(range(COUNT), 2)
    assert whole[:COUNT] != whole[COUNT:]


def test_an_order_that_cannot_be_repeated_is_refused() -> None:
    generator = random.Random(0)  # goes on from one reading to the next
    spec = DataSpec(Buffered(generator.randrange, size=20))
    first = StepLoader(spec, 5, max_duration="1ep")
    seen(first, 4)
    resumed = StepLoader(spec, 5, max_duration="1ep")
    with pytest.raises(CheckpointError, match="resumes_by='reading'"):
        resumed.load_state_dict(first.state_dict())


def test_augmentation_that_differs_may_be_stated() -> None:
    generator = torch.Generator()

    class Noisy(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for one in range(COUNT):
                yield one, torch.rand((), generator=generator)

    def make(**stated: Any) -> StepLoader:
        return StepLoader(DataSpec(Noisy(), **stated), 5, max_duration="1ep")

    first = make()
    next(first), first.finish()
    with pytest.raises(CheckpointError, match="augmentation"):
        make().load_state_dict(first.state_dict())
    resumed = make(resumes_by="reading")
    resumed.load_state_dict(first.state_dict())
    assert [int(one) for step in resumed for micro in step for one in micro.batch[0]] == [
        *range(5, COUNT)
    ]
    with pytest.raises(DataError, match="state_dict"):
        make(resumes_by="state")


class OwnChance(IterableDataset[int]):
    """Shuffles with a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        order = [*range(COUNT)]
        self.random.shuffle(order)
        yield from order


class Told(Sampler[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        order = [*range(COUNT)]
        random.Random(self.epoch).shuffle(order)
        yield from order


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * COUNT, COUNT, generator=torch.Generator().manual_seed(5))


ORDERS: dict[str, Callable[[], Any]] = {
    "generator": lambda: DataLoader(range(COUNT), 4, sampler=weighted()),  # type: ignore[arg-type]
    "batch sampler": lambda: DataLoader(
        range(COUNT),  # type: ignore[arg-type]
        batch_sampler=BatchSampler(weighted(), 4, drop_last=False),
    ),
    "told": lambda: DataLoader(
        range(COUNT),  # type: ignore[arg-type]
        batch_sampler=BatchSampler(Told(), 4, drop_last=False),
    ),
    "own": OwnChance,
}


@pytest.mark.parametrize("kind", ORDERS)
def test_an_order_that_goes_on_over_epochs_is_exact_or_refused_at_every_place(kind: str) -> None:
    def make() -> StepLoader:
        return StepLoader(ORDERS[kind](), 20, max_duration="4ep")

    loader = make()
    states, whole = [loader.state_dict()], list[int]()
    for step in loader:
        whole += [int(one) for micro in step for one in micro.batch]
        loader.finish()
        states.append(loader.state_dict())
    epochs = [whole[start : start + COUNT] for start in range(0, len(whole), COUNT)]
    assert all(one != other for one, other in pairwise(epochs))
    refused = 0
    for number, state in enumerate(states):
        resumed = make()
        try:
            resumed.load_state_dict(state)
        except CheckpointError:
            refused += 1
        else:
            assert seen(resumed) == whole[20 * number :]
    assert bool(refused) == (kind == "own")
