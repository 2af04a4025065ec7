"""Iterables on several ranks: the same on each, or sharded. Ranks are threads here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.policies import cycled
from tests.data.records import loader_with
from tests.data.test_resume import Batches, StatefulBatches
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    HashStore,
    _set_thread_isolation_mode,
)
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from stretto.data import DataSpec, Step, StepLoader
from stretto.errors import CheckpointError, DataError
from stretto.timing import LastBatch

Result = TypeVar("Result")


def on_ranks(world_size: int, work: Callable[[int], Result]) -> list[Result]:
    """Return what `work(rank)` returns on each of some ranks, threads with torch's own group."""
    found: dict[int, Any] = {}
    world: Any = threaded._install_threaded_pg()
    store = HashStore()
    _set_thread_isolation_mode(True)

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            found[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001  raised again in the main thread
            found[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if world is dist.distributed_c10d._world:
                dist.destroy_process_group()

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank waits for one that does not come"
    finally:
        _set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
    results = [found[rank] for rank in range(world_size)]
    for one in results:
        if isinstance(one, BaseException):
            raise one
    return results


def refusals(world_size: int, work: Callable[[int], object], kind: type[Exception]) -> list[str]:
    """Return what each rank says when all of them refuse."""

    def refused(rank: int) -> str:
        with pytest.raises(kind) as found:
            work(rank)
        return str(found.value)

    return on_ranks(world_size, refused)


class Offset(StatefulBatches):
    """A rank's own stream: each epoch the same batches of numbers from 1000 times its rank on."""

    def __init__(self, rank: int, lengths: Sequence[int]) -> None:
        super().__init__([*lengths])
        self.rank = rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in super().__iter__():
            yield batch + 1000 * self.rank

    @property
    def numbers(self) -> list[int]:
        return [1000 * self.rank + number for number in range(sum(self.lengths))]


class Counted(Offset):
    """One without a state of its own."""

    state_dict: Any = property()
    load_state_dict: Any = property()


def values(step: Step) -> list[int]:
    return [value for micro in step if micro.num_samples for value in micro.batch.tolist()]


def taken(loader: StepLoader) -> list[tuple[Any, ...]]:
    """What a loader gives from here on: the clock, the size, weights and samples of each step."""
    return [
        (step.timestamp[:7], step.num_samples, [micro.weight for micro in step], values(step))
        for step in loader
    ]


STREAM = st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any)
STREAMS = st.lists(STREAM, min_size=1, max_size=4)
SIZES = st.lists(st.integers(4, 15), min_size=1, max_size=3)
MODES = st.sampled_from(["keep", "drop", "carry"])


@settings(max_examples=40)
@given(STREAMS, SIZES, MODES, st.sampled_from([None, 1, 3]), st.booleans())
def test_sharded_streams_make_the_batches_that_one_stream_of_all_samples_would(
    streams: list[list[int]],
    sizes: list[int],
    last_batch: LastBatch,
    micro: int | None,
    known: bool,
) -> None:
    """However uneven they are: all ranks finish together, and each sample counts once an epoch."""
    n, world = sum(map(sum, streams)), len(streams)
    sizes = [max(world, min(size, n)) for size in sizes]
    if last_batch == "drop" and max(sizes) > n:
        return
    run: dict[str, Any] = {"max_duration": "2ep", "last_batch": last_batch}

    def work(rank: int) -> list[tuple[Any, ...]]:
        spec = DataSpec(Offset(rank, streams[rank]), num_samples=n if known else None, sharded=True)
        policy = cycled(sizes, planned=False)
        return taken(loader_with(spec, policy, micro_batch_size=micro, **run))

    by_rank = on_ranks(world, work)
    whole = DataSpec(Batches([n]), num_samples=n if known else None)
    alone = taken(loader_with(whole, cycled(sizes, planned=False), **run))
    seen: list[int] = []
    for steps, (at, size, *_) in zip(zip(*by_rank, strict=True), alone, strict=True):
        assert {step[:2] for step in steps} == {(at, size)}
        assert len({len(step[2]) for step in steps}) == 1, "ranks have equally many micro-batches"
        for _, _, weights, own in steps:
            assert sum(weights) == pytest.approx(len(own) * world / size)
            seen += own
            most = -(-max(sizes) // world) if micro is None else micro
            assert max(weights) * size / world < most + 0.5, "nor larger than a rank's share"
    each = [number for rank in range(world) for number in Offset(rank, streams[rank]).numbers]
    if last_batch != "drop":
        assert sorted(seen) == sorted(2 * each)
    assert set(seen) <= set(each)


@settings(max_examples=15)
@given(st.lists(STREAM, min_size=2, max_size=3), SIZES, MODES, st.sampled_from([Offset, Counted]))
def test_sharded_streams_are_returned_to_where_each_of_them_was(
    streams: list[list[int]], sizes: list[int], last_batch: LastBatch, kind: type[Offset]
) -> None:
    n, world = sum(map(sum, streams)), len(streams)
    sizes = [max(world, min(size, n)) for size in sizes]
    if last_batch == "drop" and max(sizes) > n:
        return

    def make(rank: int) -> StepLoader:
        spec = DataSpec(kind(rank, streams[rank]), sharded=True)
        policy = cycled(sizes, planned=False)
        return StepLoader(spec, policy, max_duration="2ep", loading={"last_batch": last_batch})

    def work(rank: int) -> list[str]:
        loader, records = make(rank), []
        steps = []
        for step in loader:
            records.append(json.dumps(loader.state_dict(again=True)))
            steps.append((step.timestamp[:7], step.num_samples, values(step)))
        for number, record in enumerate(records):
            resumed = make(rank)
            resumed.load_state_dict(json.loads(record))
            again = [(at, size, own) for at, size, _, own in taken(resumed)]
            assert again == steps[number:]
        return [json.dumps(json.loads(record)["source"]) for record in records]

    records = on_ranks(world, work)
    assert all(one == records[0] for one in records), "the record is the same on every rank"


def test_streams_that_differ_are_refused_unless_they_are_said_to_be_sharded() -> None:
    def work(rank: int) -> object:
        return list(StepLoader(Offset(rank, [4, 4]), 4, max_duration="1ep"))

    for said in refusals(3, work, DataError):
        assert "the first batch is not the same on every rank" in said
        assert "DataSpec(data, sharded=True)" in said


def test_an_empty_stream_beside_others_is_refused_on_every_rank() -> None:
    def work(rank: int, sharded: bool | None) -> object:
        data = DataSpec(Offset(rank, [4 * (rank != 1)]), sharded=sharded)
        return list(StepLoader(data, 4, max_duration="1ep"))

    for said in refusals(3, lambda rank: work(rank, None), DataError):
        assert "the first batch is not the same on every rank" in said
    for said in refusals(3, lambda rank: work(rank, True), DataError):
        assert "rank 1 has no samples" in said


@pytest.mark.parametrize("sharded", [None, False])
def test_the_same_stream_on_every_rank_is_shared(sharded: bool | None) -> None:
    def work(rank: int) -> list[int]:
        data = DataSpec(Offset(0, [5, 4]), sharded=sharded)
        return [value for step in StepLoader(data, 4, max_duration="1ep") for value in values(step)]

    assert on_ranks(2, work) == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]


def test_nothing_is_compared_where_the_streams_are_said_to_be_the_same() -> None:
    def work(rank: int) -> int:
        data = DataSpec(Offset(rank, [5, 4]), sharded=False)
        return len(list(StepLoader(data, 4, max_duration="1ep")))

    assert on_ranks(2, work) == [3, 3]


def test_the_same_stream_said_to_be_sharded_is_refused() -> None:
    def work(rank: int) -> int:
        data = DataSpec(Offset(min(rank, 1), [5, 4]), sharded=True)
        return len(list(StepLoader(data, 4, max_duration="1ep")))

    for said in refusals(3, work, DataError):
        assert "the first batch is the same on ranks 1 and 2" in said


def test_another_number_of_ranks_cannot_go_on_in_sharded_streams() -> None:
    def work(rank: int, record: dict[str, Any] | None = None) -> dict[str, Any]:
        loader = StepLoader(DataSpec(Offset(rank, [4, 4]), sharded=True), 4, max_duration="1ep")
        if record is not None:
            loader.load_state_dict(record)
        next(loader)
        loader.finish()
        return loader.state_dict(again=True)

    record = on_ranks(2, work)[0]
    assert record["source"]["ranks"][1]["skip"] == 2
    for said in refusals(3, lambda rank: work(rank, record), CheckpointError):
        assert "resume with world_size=2" in said
    with pytest.raises(CheckpointError, match="sharded"):
        StepLoader(Offset(0, [4, 4]), 4, max_duration="1ep").load_state_dict(record)
    plain = StepLoader(Offset(0, [4, 4]), 4, max_duration="1ep").state_dict()
    with pytest.raises(CheckpointError, match="sharded"):
        work(0, plain)


def test_a_state_that_one_rank_cannot_save_is_refused_on_every_rank() -> None:
    class Odd(Offset):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | ({"object": object()} if self.rank else {})

    def work(rank: int) -> object:
        loader = StepLoader(DataSpec(Odd(rank, [3, 9]), sharded=True), 9, max_duration="1ep")
        next(loader)
        loader.finish()
        return loader.state_dict(again=True)

    for said in refusals(2, work, DataError):
        assert "object is of type object" in said


def test_a_data_loader_over_a_ranks_own_samples_is_a_stream_of_its_own() -> None:
    numbers = TensorDataset(torch.arange(11))

    def work(rank: int) -> list[int]:
        sampler: Any = DistributedSampler(numbers, num_replicas=2, rank=rank, drop_last=True)
        data = DataSpec(DataLoader(numbers, 3, sampler=sampler), sharded=True)
        loader = StepLoader(data, 4, max_duration="2ep")
        return [value for step in loader for micro in step for value in micro.batch[0].tolist()]

    both = on_ranks(2, work)
    assert sorted(map(len, both)) == [10, 10]
    own = DataSpec(DataLoader(TensorDataset(torch.arange(6)), 4, shuffle=True), sharded=True)
    assert not own.is_map_style
    assert own.known_num_samples is None
    assert sum(step.num_samples for step in StepLoader(own, 4, max_duration="1ep")) == 6


def test_ranks_that_cannot_speak_to_each_other_cannot_share_sharded_streams() -> None:
    data = DataSpec(Offset(1, [4, 4]), sharded=True)
    loader = StepLoader(data, 4, max_duration="1ep", rank=1, world_size=2)
    with pytest.raises(DataError, match="distributed"):
        next(loader)
