"""Cut anywhere, go on in any other way: every sample exactly once."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.policies import cycled, policies
from tests.data.records import assert_resumes, loader_with, read
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stretto.batching import (
    AtLeast,
    AtMost,
    BatchSizePolicy,
    Bound,
    Fixed,
    Hysteresis,
    IncreaseFunction,
    LinearRamp,
    Monotone,
    MultipleOf,
    NoiseScale,
    PeriodSizes,
    PiecewiseConstant,
    Plateau,
    PolicyState,
    PowerOfTwo,
    Signals,
)
from stretto.data import DataSpec, Step, StepLoader
from stretto.errors import CheckpointError, DataError
from stretto.ordering import SampleOrder
from stretto.timing import Horizon, LastBatch, Timestamp


def values(batch: Any) -> list[int]:
    listed: list[int] = (batch[0] if isinstance(batch, list) else batch).tolist()
    return listed


@settings(max_examples=15)
@given(st.integers(1, 25), policies(), st.sampled_from(["keep", "carry"]), st.integers(1, 6))
def test_a_run_that_is_cut_before_any_step_goes_on_as_if_it_had_not_been(
    n: int, policy: Any, last_batch: LastBatch, micro: int
) -> None:
    data = TensorDataset(torch.arange(n))
    assert_resumes(
        lambda: StepLoader(
            data,
            policy,
            max_duration="2ep",
            loading={"last_batch": last_batch},
            micro_batch_size=micro,
        ),
        values,
    )


@pytest.mark.parametrize(
    "policy",
    [
        PeriodSizes([("7sp", 2), ("rest", Monotone(PiecewiseConstant("0sp:6 12sp:3")))]),
        PeriodSizes([("7sp", 2), ("rest", Hysteresis(LinearRamp(2, 9, "1ep"), 1.5, wait="9sp"))]),
        AtMost(PeriodSizes([("9sp", 3), ("rest", IncreaseFunction(lambda epoch, _: 1, 2, 7))]), 6),
    ],
    ids=["monotone", "hysteresis", "increase"],
)
def test_a_run_that_is_cut_in_a_later_period_goes_on_as_if_it_had_not_been(policy: Any) -> None:
    data = TensorDataset(torch.arange(17))
    assert_resumes(lambda: StepLoader(data, policy, max_duration="3ep"), values)


def periodic(*periods: tuple[str, Any]) -> StepLoader:
    return StepLoader([*range(400)], PeriodSizes(periods), max_duration="1ep")


def test_other_periods_start_afresh() -> None:
    """Also where there are fewer of them than the saved one's number."""
    three = periodic(("5sp", 2), ("5sp", 3), ("rest", 4))
    for step in three:
        if step.batch_size == 4:
            break
    two = periodic(("5sp", 2), ("rest", 5))
    two.load_state_dict(three.state_dict(again=True))
    assert next(two).batch_size == 5
    other_inside = periodic(("5sp", 2), ("rest", Monotone(Fixed(6))))
    other_inside.load_state_dict(two.state_dict(again=True))
    assert next(other_inside).batch_size == 6


def test_a_period_that_has_not_begun_may_become_another() -> None:
    """The present one goes on where it was, also where it is counted from its own beginning."""
    before = periodic(("20sp", 4), ("9ba", 8), ("rest", 16))
    for step in before:
        if step.timestamp.batch == 9:
            break
    before.finish()
    after = periodic(("20sp", 4), ("9ba", 8), ("rest", LinearRamp(20, 30, "50sp")))
    after.load_state_dict(before.state_dict(again=True))
    assert [next(after).batch_size for _ in range(5)] == [8, 8, 8, 8, 20]


def grown(policy: Any) -> StepLoader:
    """A loader of 40 measured steps, whose sizes have grown from 8."""
    loader = StepLoader([*range(4000)], policy, max_duration="1ep")
    for _ in range(40):
        loader.finish(next(loader), signals=Signals(noise_numerator=24.0, noise_denominator=1.0))
    return loader


@pytest.mark.parametrize(
    ("wrapped", "size"),
    [(AtMost, 20), (AtLeast, 32), (MultipleOf, 24), (lambda policy, _: PowerOfTwo(policy), 16)],
)
def test_a_wrapper_that_keeps_nothing_may_come_and_go(wrapped: Any, size: int) -> None:
    policy = NoiseScale(8, 64)
    argument = 24 if wrapped is MultipleOf else size
    plain, other = grown(policy), grown(wrapped(policy, argument))
    for before, after, expected in ((plain, wrapped(policy, argument), size), (other, policy, 24)):
        loader = StepLoader([*range(4000)], after, max_duration="1ep")
        loader.load_state_dict(json.loads(json.dumps(before.state_dict(again=True))))
        assert next(loader).batch_size == expected
        assert not loader.has_dropped_state


def test_a_state_that_is_of_no_use_is_told() -> None:
    loader = StepLoader([*range(4000)], Monotone(NoiseScale(8, 64)), max_duration="1ep")
    loader.load_state_dict(grown(NoiseScale(8, 64)).state_dict(again=True))
    assert next(loader).batch_size == 8
    assert loader.has_dropped_state
    plain = StepLoader([*range(4000)], 4, max_duration="1ep")
    next(plain)
    loader.load_state_dict(plain.state_dict(again=True))
    assert not loader.has_dropped_state, "there was none"


@pytest.mark.parametrize(
    ("policy", "place", "value"),
    [
        (NoiseScale(8, 64), ("policy", "state", "size"), "8"),
        (NoiseScale(8, 64), ("policy", "state", "weight"), "x"),
        (Hysteresis(LinearRamp(2, 9, "1ep"), 1.5), ("policy", "state", "size"), "8"),
        (Monotone(LinearRamp(2, 9, "1ep")), ("policy", "state", "largest"), 9.5),
        (NoiseScale(8, 64), ("clock",), []),
        (NoiseScale(8, 64), ("signals",), 7),
        (NoiseScale(8, 64), ("order",), None),
        (NoiseScale(8, 64), ("policy",), {}),
    ],
)
def test_a_damaged_record_is_refused_when_it_is_read(
    policy: Any, place: tuple[str, ...], value: Any
) -> None:
    loader = StepLoader([*range(40)], policy, max_duration="2ep")
    next(loader)
    record = loader.state_dict(again=True)
    within: Any = record
    for name in place[:-1]:
        within = within[name]
    within[place[-1]] = value
    with pytest.raises(CheckpointError, match="damaged"):
        StepLoader([*range(40)], policy, max_duration="2ep").load_state_dict(record)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda policy: policy,
        lambda policy: AtMost(policy, 64),
        Monotone,
        lambda policy: Hysteresis(policy, 1.5),
        lambda policy: AtMost(PeriodSizes([("rest", policy)]), 64),
    ],
)
def test_a_policy_of_ones_own_may_keep_what_it_likes(wrapped: Any) -> None:
    class Grows(BatchSizePolicy):
        def bind(self, horizon: Horizon) -> Bound:
            return Bound(decide=self.decide, start={"size": 2.0, "largest": "none"})

        def scaled(self, ratio: object) -> Grows:
            return self

        def decide(
            self, timestamp: Timestamp, state: PolicyState, signals: Signals
        ) -> tuple[int, PolicyState]:
            size = float(state["size"]) * 1.3
            return int(size), {**state, "size": size}

    whole, first, second = (
        StepLoader([*range(60)], wrapped(Grows()), max_duration="1ep") for _ in range(3)
    )
    sizes = [step.num_samples for step in whole]
    seen = [next(first).num_samples for _ in range(3)]
    first.finish()
    second.load_state_dict(json.loads(json.dumps(first.state_dict(again=True))))
    assert seen + [step.num_samples for step in second] == sizes


def test_an_error_of_the_data_is_not_one_of_the_record() -> None:
    class Broken(IterableDataset[int]):
        def __init__(self, *, breaks: bool) -> None:
            self.breaks = breaks

        def __iter__(self) -> Iterator[int]:
            if self.breaks:
                raise ValueError("shard-3.tar: bad header")
            yield from range(40)

    loader = StepLoader(Broken(breaks=False), 4, max_duration="20sp")
    next(loader)
    loader.finish()
    record, other = (
        loader.state_dict(again=True),
        StepLoader(Broken(breaks=True), 4, max_duration="20sp"),
    )
    with pytest.raises(ValueError, match="header"):
        other.load_state_dict(record)


def test_what_another_policy_has_measured_is_not_taken_over() -> None:
    """Its state is of another quantity; inside periods and wrappers as well."""
    loaders = [
        StepLoader([*range(40)], AtMost(PeriodSizes([("rest", one)]), 64), max_duration="1ep")
        for one in (NoiseScale(8, 64), Plateau("a/b", start=6, maximum=64))
    ]
    next(loaders[0])
    loaders[1].load_state_dict(loaders[0].state_dict(again=True))
    assert next(loaders[1]).batch_size == 6


@given(st.integers(1, 40), st.integers(0, 99), st.data())
def test_any_world_size_and_policy_may_follow_any_other(
    n: int, seed: int, data: st.DataObject
) -> None:
    dataset, order = TensorDataset(torch.arange(n)), SampleOrder(n, seed)
    state: dict[str, Any] | None = None
    seen: dict[int, int] = {}
    position = 0
    while position < 2 * n:
        world = data.draw(st.sampled_from([1, 2, 3, 5, 8]))
        sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
        micro = data.draw(st.sampled_from([None, 1, 4]))
        steps = data.draw(st.integers(1, 4))
        loaders = [
            StepLoader(
                dataset,
                cycled(sizes, planned=False),
                max_duration="2ep",
                loading={"seed": seed, "last_batch": "carry"},
                rank=rank,
                world_size=world,
                micro_batch_size=micro,
            )
            for rank in range(world)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            readings = [next(read(loader, values), None) for loader in loaders]
            for rank, reading in enumerate(readings):
                if reading is None:
                    continue
                for place, index in enumerate(reading.samples):
                    first = reading.sample + (rank - reading.sample) % world
                    assert seen.setdefault(first + place * world, index) == index
                position = reading.sample + reading.size
            for loader in loaders:
                if loader._pending is not None:
                    loader.finish(tokens=0)
        states = [loader.state_dict(again=True) for loader in loaders]
        state = states[0]
        assert {json.dumps({**one, "clock": one["clock"]["sample"]}) for one in states} == {
            json.dumps({**state, "clock": position})
        }
    assert seen == {p: order[p] for p in range(2 * n)}


class Batches:
    """An iterable of batches of odd sizes; with a state of its own, or without."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.reads = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        start = 0
        for length in self.lengths:
            self.reads += 1
            yield torch.arange(start, start + length)
            start += length


class StatefulBatches(Batches):
    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.number = 0
        self.start_at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.number, self.start_at = self.start_at, 0
        while self.number < len(self.lengths):
            start = sum(self.lengths[: self.number])
            self.number += 1
            self.reads += 1
            yield torch.arange(start, start + self.lengths[self.number - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"place": (self.number,), "noise": torch.tensor([1.5]), "raw": b"\x00"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["noise"].item() == 1.5
        assert state["raw"] == b"\x00"
        (self.start_at,) = state["place"]


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    st.lists(st.integers(1, 15), min_size=1, max_size=3),
    st.sampled_from(["keep", "drop", "carry"]),
    st.sampled_from([Batches, StatefulBatches]),
)
def test_an_iterable_is_returned_to_where_it_was(
    lengths: list[int], sizes: list[int], last_batch: LastBatch, kind: type[Batches]
) -> None:
    assert_resumes(
        lambda: StepLoader(
            kind(lengths),
            cycled(sizes, planned=False),
            max_duration="3ep",
            loading={"last_batch": last_batch},
            micro_batch_size=4,
        ),
        values,
    )


def test_the_sources_own_state_saves_reading_again() -> None:
    first = StepLoader(StatefulBatches([5] * 20), 7, max_duration="1ep")
    for step in first:
        if step.timestamp.sample == 63:
            break
    first.finish()
    source = StatefulBatches([5] * 20)
    loader = StepLoader(source, 7, max_duration="1ep")
    loader.load_state_dict(first.state_dict(again=True))
    assert values(next(loader).micro_batches[0].batch) == [70, 71, 72, 73, 74]
    assert source.reads == 2  # the chunks of 70 and of 75; the 14 before were left out
    loader.finish()
    assert loader.state_dict(again=True)["source"]["skip"] == 2


class Samples(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@pytest.mark.usefixtures("small_chunks")
def test_a_torch_iterable_yields_samples() -> None:
    assert_resumes(lambda: StepLoader(Samples(), 7, max_duration="2ep"), values)


def test_a_shuffled_order_of_a_data_loaders_own_is_repeated() -> None:
    def make() -> StepLoader:
        sampler = torch.utils.data.WeightedRandomSampler([1.0, 2.0, 3.0], 10)
        data = DataLoader(TensorDataset(torch.arange(3)), sampler=sampler, batch_size=4)
        return StepLoader(data, 3, max_duration="2ep", loading={"seed": 4})

    assert_resumes(make, values)


def test_data_that_have_become_shorter_are_found_out() -> None:
    first = StepLoader(Batches([5] * 4), 7, max_duration="1ep")
    next(first)
    next(first)
    first.finish()
    second = StepLoader(Batches([5]), 7, max_duration="1ep")
    with pytest.raises(DataError, match="data"):
        second.load_state_dict(first.state_dict(again=True))


def test_a_state_that_json_does_not_keep_is_refused() -> None:
    class Odd(StatefulBatches):
        def state_dict(self) -> dict[str, Any]:
            return {"object": object()}

    loader = StepLoader(Odd([3, 3]), 4, max_duration="1ep")
    next(loader)
    loader.finish()
    with pytest.raises(DataError, match="object"):
        loader.state_dict(again=True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 2}, "seed=0"),
        ({"shuffle": False}, "shuffle=True"),
        ({"data": TensorDataset(torch.arange(9))}, "num_samples=10"),
        ({"data": Batches([10])}, "saved from a map-style data set"),
    ],
    ids=["seed", "shuffle", "length", "kind"],
)
def test_another_order_is_refused(change: dict[str, Any], match: str) -> None:
    state = StepLoader(TensorDataset(torch.arange(10)), 4, max_duration="1ep").state_dict()
    other: dict[str, Any] = {"data": TensorDataset(torch.arange(10)), "max_duration": "1ep"}
    other |= change
    with pytest.raises(CheckpointError, match=match):
        loader_with(other.pop("data"), 4, **other).load_state_dict(state)


def test_another_version_is_refused() -> None:
    loader = StepLoader([1], 1, max_duration="1ep")
    with pytest.raises(CheckpointError, match="version"):
        loader.load_state_dict({**loader.state_dict(again=True), "version": 9})


def test_the_state_of_a_policy_goes_to_a_policy_of_its_kind_alone() -> None:
    def grow(epoch: int, current: int) -> int:
        return 3

    def make(policy: Any) -> StepLoader:
        return StepLoader(list(range(20)), policy, max_duration="9ep")

    first = make(IncreaseFunction(grow, 5, max_batch_size=100))
    for step in first:
        if step.timestamp.epoch == 2:
            break
    first.finish()
    state = first.state_dict(again=True)
    same = make(IncreaseFunction(grow, 5, max_batch_size=90))
    same.load_state_dict(state)
    assert next(same).batch_size == first.state_dict(again=True)["policy"]["state"]["size"]
    other = make(AtMost(Fixed(8), 4))
    other.load_state_dict(state)
    assert next(other).batch_size == 4


@pytest.mark.parametrize("last_batch", ["keep", "drop", "carry"])
@pytest.mark.parametrize("kind", [list, Batches, StatefulBatches])
def test_a_step_in_hand_is_trained_anew_after_a_resume(kind: Any, last_batch: LastBatch) -> None:
    """A record agrees with the clock: an open step is not counted, and reading it moves nothing."""

    def make() -> StepLoader:
        data = [*range(11)] if kind is list else kind([4, 2, 5])
        sizes = cycled([3, 2], planned=False)
        return StepLoader(
            data, sizes, max_duration="2ep", loading={"last_batch": last_batch, "seed": 1}
        )

    def contents(step: Step) -> list[list[int]]:
        return [values(micro.batch) for micro in step]

    first, whole = make(), list(map(contents, make()))
    for number, step in enumerate(first):
        before = first.timer.timestamp
        record = first.state_dict(again=True)
        assert first.state_dict(again=True) == record, "looking changes nothing"
        assert first.timer.timestamp == before == step.timestamp
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(record)))
        assert resumed.timer.sample == step.timestamp.sample
        assert list(map(contents, resumed)) == whole[number:]
    assert contents(step) == whole[-1]


@pytest.mark.parametrize("kind", [Batches, StatefulBatches])
def test_no_sample_is_lost_where_the_data_fail_inside_a_step(kind: Any) -> None:
    class Failing(kind):  # type: ignore[misc]
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number, batch in enumerate(super().__iter__()):
                if number == 2:
                    raise OSError("the disk is gone")
                yield batch

    loader = StepLoader(Failing([2, 5, 3]), 4, max_duration="1ep")
    next(loader)
    with pytest.raises(OSError, match="disk"):
        next(loader)
    resumed = StepLoader(kind([2, 5, 3]), 4, max_duration="1ep")
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict(again=True))))
    assert [values(micro.batch) for step in resumed for micro in step] == [
        [4, 5, 6],
        [7],
        [8, 9],
    ]


@pytest.mark.parametrize("data", [[*range(9)], iter([torch.arange(4), torch.arange(4, 9)])])
def test_a_step_that_is_taken_back_comes_again(data: Any) -> None:
    loader = StepLoader(data, 3, max_duration="1ep", loading={"shuffle": False})
    seen: list[int] = []
    for number, step in enumerate(loader):
        if number == 1:
            loader.take_back()
            continue
        seen += [value for micro in step for value in values(micro.batch)]
    assert seen == [*range(9)]


class Streaming:
    """As an `IterableDataset` of `datasets` that was shuffled: its state leaves the buffer out."""

    def __init__(self, count: int) -> None:
        self.count, self.start, self.place = count, 0, 0

    def rows(self) -> Iterator[int]:
        generator, buffer = random.Random(0), list[int]()
        start, self.start = self.start, 0
        for row in range(start, self.count):
            self.place = row + 1
            buffer.append(row)
            if len(buffer) == 8:
                generator.shuffle(buffer)
                yield from (buffer.pop() for _ in range(4))
        yield from buffer

    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = self.rows()
        while batch := [*islice(rows, 3)]:
            yield torch.tensor(batch)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["place"]


def test_no_sample_of_a_shuffle_buffer_is_lost() -> None:
    """The buffer's content is in no state, so such data must be read again from the start."""

    def make(**stated: Any) -> StepLoader:
        return StepLoader(DataSpec(Streaming(40), **stated), 5, max_duration="2ep")

    loader = make()
    for _ in range(3):
        next(loader)
        loader.finish()
    with pytest.raises(CheckpointError, match="resumes_by='reading'"):
        make().load_state_dict(loader.state_dict(again=True))
    assert_resumes(lambda: make(resumes_by="reading"), values)


def test_a_step_that_may_have_been_trained_is_not_saved_silently() -> None:
    loader = StepLoader(list(range(8)), 2, max_duration="1ep", loading={"seed": 0})
    step = next(loader)
    with pytest.raises(DataError, match=r"finish\(\)"):
        loader.state_dict()
    again = loader.state_dict(again=True)
    loader.finish()
    trained = loader.state_dict()
    found = []
    for state in (again, trained):
        other = StepLoader(list(range(8)), 2, max_duration="1ep", loading={"seed": 0})
        other.load_state_dict(state)
        found.append(next(other).timestamp.batch)
    assert (step.timestamp.batch, *found) == (0, 0, 1)
