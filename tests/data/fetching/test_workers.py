"""Worker processes: the same samples, and the size of each step still the policy's at that step."""

from __future__ import annotations

import json
import multiprocessing
import random
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.policies import cycled
from tests.data.records import assert_resumes, loader_with, read
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from stretto.batching import (
    BatchSizePolicy,
    Bound,
    LinearRamp,
    PolicyState,
    Signals,
    SizeFunction,
)
from stretto.data import DataSpec, StepLoader, sample_seed
from stretto.data.indices import Bundle
from stretto.errors import DataError
from stretto.ordering import SampleOrder, share
from stretto.timing import Horizon, Timestamp


class Numbers(Dataset[int]):
    """Its samples are their own indices."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Samples with chance in them, from every generator there is."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(
            [float(index), torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
        )


def values(batch: Any) -> list[Any]:
    tensor = batch[0] if isinstance(batch, list) else batch
    listed: list[Any] = tensor.tolist()
    return [tuple(row) if isinstance(row, list) else row for row in listed]


def steps(loader: StepLoader) -> list[tuple[int, int, tuple[Any, ...]]]:
    return [(one.sample, one.size, one.samples) for one in read(loader, values)]


def generators() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()  # noqa: NPY002  the generator that data sets draw from
    return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist()


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "reactive"])
@pytest.mark.parametrize("rank", [0, 1])
def test_workers_change_nothing_but_where_samples_are_fetched(planned: bool, rank: int) -> None:
    def make(num_workers: int) -> StepLoader:
        return StepLoader(
            Numbers(70),
            cycled([5, 41, 2, 17], planned=planned),
            max_duration="2ep",
            micro_batch_size=4,
            rank=rank,
            world_size=2,
            loading={"num_workers": num_workers, "last_batch": "carry"},
        )

    with_workers = steps(make(2))
    assert with_workers == steps(make(0))
    order = SampleOrder(70)
    for start, size, samples in with_workers:
        assert list(samples) == [order[p] for p in share(start, size, rank, 2)]


@pytest.mark.parametrize("prefetch_factor", [1, 5])
def test_the_size_is_decided_at_the_step_however_far_workers_are_ahead(
    prefetch_factor: int,
) -> None:
    sizes = [3, 50, 2, 2, 31, 64, 1, 7]
    wanted: list[int] = []
    loader = StepLoader(
        Numbers(200), SizeFunction(lambda timestamp, current: wanted[-1], planned=False),
        max_duration="160sp", loading={"num_workers": 2, "prefetch_factor": prefetch_factor},
    )  # fmt: skip
    for size in sizes:
        wanted.append(size)  # known only now
        assert next(loader).num_samples == size


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "reactive"])
@pytest.mark.usefixtures("small_chunks")
def test_a_run_with_workers_is_cut_and_resumed(planned: bool) -> None:
    assert_resumes(
        lambda: StepLoader(
            Numbers(20),
            cycled([9, 4], planned=planned),
            max_duration="1.5ep",
            loading={"num_workers": 1},
            micro_batch_size=3,
        ),
        values,
    )


@pytest.mark.usefixtures("small_chunks")
def test_other_workers_and_micro_batches_may_go_on() -> None:
    def make(num_workers: int, micro: int, planned: bool) -> StepLoader:
        return StepLoader(
            Numbers(50), cycled([7, 4], planned=planned), max_duration="1ep",
            loading={"num_workers": num_workers}, micro_batch_size=micro,
        )  # fmt: skip

    whole = steps(make(0, 99, True))
    state, taken = None, []
    for num_workers, micro, planned in [(2, 3, False), (0, 5, True), (1, 2, True), (0, 1, False)]:
        loader = make(num_workers, micro, planned)
        if state is not None:
            loader.load_state_dict(state)
        reader = read(loader, values)
        taken += [(one.sample, one.size, one.samples) for one in islice(reader, 2)]
        loader.finish()
        state = loader.state_dict()
    assert taken == whole[: len(taken)]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": 2},
        {"micro_batch_size": 2},
        {"batch_size": 11},
        {"num_workers": 1, "batch_size": cycled([2, 9], planned=False)},
    ],
    ids=["workers", "micro-batches", "another size", "chunks"],
)
@pytest.mark.usefixtures("small_chunks")
def test_keyed_chance_depends_on_the_sample_alone(settings: dict[str, Any]) -> None:
    def rows(**given: Any) -> list[Any]:
        loader = loader_with(
            Noisy(12),
            given.pop("batch_size", 6),
            max_duration="2ep",
            loading={"seed": 5, "keyed_randomness": True, "last_batch": "carry"},
            **given,
        )
        return [row for step in loader for micro in step for row in values(micro.batch)]

    plain = rows()
    assert len(set(plain)) == 24
    assert rows(**settings) == plain


def test_keyed_chance_can_be_had_by_hand_and_leaves_the_generators_alone() -> None:
    before = generators()
    loader = StepLoader(
        Noisy(3),
        3,
        max_duration="1ep",
        loading={"shuffle": False, "keyed_randomness": True, "seed": 9},
    )
    row = values(next(loader).micro_batches[0].batch)[2]
    assert generators() == before
    seed = sample_seed(9, 0, 2)
    expected = torch.rand((), generator=torch.Generator().manual_seed(seed)).item()
    assert row[1] == pytest.approx(expected)


def test_workers_see_the_users_data_set_and_repeat_their_seeds() -> None:
    class Spy(Numbers):
        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            assert info is not None
            assert info.dataset is self
            return torch.tensor([index, info.seed])

    def seeds() -> list[Any]:
        given = DataLoader(Spy(6), num_workers=1, batch_size=99)
        return [values(micro.batch) for step in StepLoader(given, 4, max_duration="1ep")
                for micro in step]  # fmt: skip

    state = torch.get_rng_state()
    assert seeds() == seeds()
    assert torch.equal(torch.get_rng_state(), state)


def test_whole_batches_come_from_workers_too() -> None:
    loader = StepLoader(
        TensorDataset(torch.arange(9)), 4, max_duration="1ep", loading={"num_workers": 1}
    )
    order = SampleOrder(9)
    assert steps(loader) == [
        (start, min(4, 9 - start), tuple(order[p] for p in range(start, min(9, start + 4))))
        for start in (0, 4, 8)
    ]


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "reactive"])
def test_a_loader_that_is_dropped_takes_its_workers_with_it(planned: bool) -> None:
    loader = StepLoader(
        Numbers(99), cycled([5], planned=planned), max_duration="1ep", loading={"num_workers": 1}
    )
    next(loader)
    assert len(multiprocessing.active_children()) == 1
    gone = weakref.ref(loader)
    del loader
    assert gone() is None
    assert multiprocessing.active_children() == []


def test_a_length_that_lies_is_found_out_in_a_worker() -> None:
    class Lies(Numbers):
        def __getitem__(self, index: int) -> int:
            return [0, 1, 2][index]

    loader = StepLoader(
        Lies(6), 4, max_duration="1ep", loading={"num_workers": 1, "shuffle": False}
    )
    with pytest.raises(DataError, match="index"):
        list(loader)


class Texts(Dataset[dict[str, Any]]):
    """Sequences of one to seven tokens, each a number of its own."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": torch.arange(10 * index, 10 * index + 1 + index % 7), "name": str(index)}


def pack(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of all tokens, and where each sequence begins and ends, as flash attention has it."""
    lengths = [0, *(len(sample["ids"]) for sample in samples)]
    return {
        "input_ids": torch.cat([sample["ids"] for sample in samples])[None],
        "cu_seqlens": torch.tensor(lengths).cumsum(0),
        "names": " ".join(sample["name"] for sample in samples),
    }


def packed_loader(batch_size: Any, num_workers: int, **settings: Any) -> StepLoader:
    spec = DataSpec(Texts(), get_num_samples_in_batch=lambda batch: len(batch["cu_seqlens"]) - 1)
    given: dict[str, Any] = {"max_duration": "2ep", "micro_batch_size": 5} | settings
    return loader_with(
        spec, batch_size, loading={"collate_fn": pack, "num_workers": num_workers}, **given
    )


def packed_steps(loader: StepLoader, most: int | None = None) -> list[Any]:
    """All that a run does, or its first steps, with a loss in two of three batches."""
    seen: list[Any] = []
    for step in islice(loader, most):
        batches = [
            (micro.batch["input_ids"].tolist(), micro.batch["cu_seqlens"].tolist(),
             micro.batch["names"], micro.num_samples, micro.num_tokens)
            for micro in step
        ]  # fmt: skip
        seen.append((step.timestamp.sample, step.timestamp.token, step.num_samples, batches))
        loss = 1.0 if step.timestamp.batch % 3 else None
        loader.finish(step, tokens=step.num_tokens, seconds=0.0, signals=Signals(loss=loss))
    return seen


class Falling(BatchSizePolicy):
    """Grows by a sample in each batch whose loss is known, up to 12."""

    def bind(self, horizon: Horizon) -> Bound:
        return Bound(decide=self.decide, start={"size": 3})

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        size = min(12, int(state["size"]) + (signals.loss is not None))
        return size, {"size": size}


ADAPTIVE = [LinearRamp(3, 14, "150tok"), Falling()]


@pytest.mark.parametrize("batch_size", ADAPTIVE, ids=["ramp in tokens", "adaptive"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("small_chunks")
def test_packed_batches_of_sizes_decided_at_the_step_are_the_same_with_any_workers(
    batch_size: BatchSizePolicy, rank: int
) -> None:
    def run(num_workers: int, **settings: Any) -> list[Any]:
        return packed_steps(
            packed_loader(batch_size, num_workers, rank=rank, world_size=2, **settings)
        )

    without = run(0)
    assert len({size for _, _, size, _ in without}) > 5
    assert run(2) == without
    assert run(1, last_batch="drop") == run(0, last_batch="drop")


@pytest.mark.parametrize("batch_size", ADAPTIVE, ids=["ramp in tokens", "adaptive"])
@pytest.mark.usefixtures("small_chunks")
def test_a_packed_run_with_workers_is_cut_and_resumed(batch_size: BatchSizePolicy) -> None:
    def make(num_workers: int) -> StepLoader:
        return packed_loader(batch_size, num_workers)

    whole = packed_steps(make(0))
    for cut, before, after in ((2, 1, 2), (9, 2, 0), (5, 0, 1)):
        first = make(before)
        assert packed_steps(first, most=cut) == whole[:cut]
        resumed = make(after)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert packed_steps(resumed) == whole[cut:]


def test_a_collate_function_gets_whole_micro_batches() -> None:
    """Padding is to the longest of a micro-batch, not of what a worker fetches at once."""

    def pad(samples: list[dict[str, Any]]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([one["ids"] for one in samples], batch_first=True)

    def widths(num_workers: int) -> list[int]:
        loader = StepLoader(
            Texts(), cycled([2, 3], planned=False), max_duration="1ep",
            loading={"collate_fn": pad, "num_workers": num_workers, "shuffle": False},
        )  # fmt: skip
        return [micro.batch.shape[1] for step in loader for micro in step]

    assert widths(1) == widths(0)


def test_samples_travel_from_workers_as_they_are() -> None:
    sample: dict[str, Any] = {
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "flags": torch.tensor([[True], [False]]),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "array": np.arange(3),
        "text": ("a", b"b", None),
        "grown": torch.nn.Parameter(torch.ones(2)),
    }
    bundle = Bundle.of([sample, {"x": torch.arange(4)[::2]}])
    first, second = ForkingPickler.loads(ForkingPickler.dumps(bundle)).samples()
    assert second["x"].tolist() == [0, 2]
    assert list(first) == list(sample)
    assert (first["text"], first["array"].tolist()) == (sample["text"], [0, 1, 2])
    for name in ("half", "flags", "none", "scalar", "grown"):
        assert torch.equal(first[name], sample[name]), name
        assert type(first[name]) is type(sample[name])
        assert first[name].dtype is sample[name].dtype


class Slow(Numbers):
    """Says that a worker has it, and then takes longer than a test may."""

    def __init__(self, started: socket.socket) -> None:
        super().__init__(8)
        self.started = started

    def __getitem__(self, index: int) -> int:
        self.started.send(b"!")
        time.sleep(60)
        return index


class SlowStream(IterableDataset[int]):
    def __init__(self, started: socket.socket) -> None:
        self.samples = Slow(started)

    def __iter__(self) -> Iterator[int]:
        yield self.samples[0]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
@pytest.mark.parametrize("kind", ["map", "stream", "loader"])
def test_workers_of_a_killed_rank_let_go_of_its_sockets_at_once(kind: str) -> None:
    """While they have them, no other rank sees that this one is gone."""
    ours, theirs = socket.socketpair()

    def rank() -> None:
        ours.close()
        data: Any = Slow(theirs) if kind == "map" else SlowStream(theirs)
        if kind == "loader":
            data = DataLoader(data, batch_size=2, num_workers=1)
        next(
            StepLoader(
                data,
                2,
                max_duration="1ba",
                loading={"num_workers": None if kind == "loader" else 1},
            )
        )

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    theirs.close()
    with ours:
        ours.settimeout(20)
        assert ours.recv(1) == b"!"
        process.kill()
        process.join()
        assert ours.recv(1) == b""  # the end
