"""A loader over map-style data: exact sizes, every sample once, ranks in step."""

from __future__ import annotations

import json
import math
import pickle
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.data.policies import cycled, policies
from tests.data.records import StepRecord, loader_with, read
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from stretto.batching import (
    AtLeast,
    BatchSizePolicy,
    Bound,
    Fixed,
    NoiseScale,
    PolicyState,
    Signals,
    SizeFunction,
)
from stretto.data import DataSpec, StepLoader
from stretto.data.loader import agreed
from stretto.errors import BatchSizeError, ConfigError, ConversionError, DataError, PlanError
from stretto.ordering import SampleOrder, share
from stretto.planning import walk
from stretto.runtime import Ranks
from stretto.timing import Horizon, LastBatch, Timestamp

MODES = st.sampled_from(["keep", "drop", "carry"])


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n))


def values(batch: Any) -> list[int]:
    tensor = batch[0] if isinstance(batch, (list, tuple)) else batch
    listed: list[int] = tensor.tolist()
    return listed


def ranks(
    n: int, policy: BatchSizePolicy, world: int, *, duration: str = "2ep", **settings: Any
) -> list[list[StepRecord]]:
    """What each of the ranks reads."""
    return [
        list(
            read(
                loader_with(
                    numbers(n),
                    policy,
                    max_duration=duration,
                    rank=rank,
                    world_size=world,
                    **settings,
                ),
                values,
            )
        )
        for rank in range(world)
    ]


@given(st.integers(1, 24), st.sampled_from([1, 2, 3, 4, 64]), st.integers(1, 9), MODES, st.data())
def test_every_sample_of_an_epoch_is_seen_once_by_one_rank(
    n: int, world: int, micro: int, last_batch: LastBatch, data: st.DataObject
) -> None:
    most = n if last_batch == "drop" else 3 * n
    least = 8 if world > 4 else 1  # so that there are few steps for so many ranks
    sizes = data.draw(st.lists(st.integers(min(least, most), most), min_size=1, max_size=5))
    policy = cycled(sizes, planned=False)  # sizes below the world size are allowed here
    loading: dict[str, Any] = {"micro_batch_size": micro, "last_batch": last_batch, "seed": 3}
    by_rank = ranks(n, policy, world, **loading)
    order = SampleOrder(n, 3)
    seen: Counter[int] = Counter()
    for steps in zip(*by_rank, strict=True):
        start, size = steps[0].sample, steps[0].size
        assert {(step.sample, step.size, step.micro_batches) for step in steps} == {
            (start, size, math.ceil(math.ceil(size / world) / micro))
        }
        for rank, step in enumerate(steps):
            owned = share(start, size, rank, world)
            assert list(step.samples) == [order[p] for p in owned]
            seen.update(owned)
        assert sum(sum(step.weights) for step in steps) == pytest.approx(world, rel=1e-12)
    assert max(seen.values()) == 1
    if last_batch != "drop":
        assert sorted(seen) == list(range(2 * n))


@given(st.integers(1, 80), policies(), MODES)
def test_a_run_follows_its_plan(n: int, policy: BatchSizePolicy, last_batch: LastBatch) -> None:
    settings: dict[str, Any] = {"max_duration": "3ep", "last_batch": last_batch}
    try:
        loader = loader_with(numbers(n), policy, **settings)
    except BatchSizeError:  # under `drop`, a size that no epoch holds
        assert last_batch == "drop"
        return
    planned = list(walk(loader.horizon, policy.bind(loader.horizon)))
    for plan, step in zip(planned, loader, strict=True):
        clock = step.timestamp._replace(
            run_nanoseconds=0, job_nanoseconds=0, epoch_nanoseconds=0, batch_nanoseconds=0
        )
        assert (clock, step.num_samples, step.batch_size) == (
            plan.timestamp,
            plan.size,
            plan.decided,
        )
        assert step.local_num_samples == plan.size
    assert loader.timer.epoch == 3
    assert loader.timer.sample == 3 * n


@pytest.mark.parametrize(
    ("settings", "carried"),
    [({}, [8, 8, 8, 6, 8, 8, 8, 6]), ({"last_batch": "carry"}, [8] * 7 + [4])],
    ids=["keep", "carry"],
)
def test_micro_batches_are_weighed_to_one_batch(
    settings: dict[str, Any], carried: list[int]
) -> None:
    loader = loader_with(numbers(30), 8, max_duration="2ep", micro_batch_size=3, **settings)
    steps = [
        (step.num_samples, [(micro.num_samples, micro.weight) for micro in step]) for step in loader
    ]
    assert [size for size, _ in steps] == carried
    assert steps[0][1] == [(3, 3 / 8), (3, 3 / 8), (2, 2 / 8)]


def test_a_rank_without_samples_has_a_dummy_that_does_not_count() -> None:
    loader = StepLoader(
        numbers(10), cycled([3], planned=False), max_duration="3sp", rank=5, world_size=8
    )
    (step,) = loader
    (dummy,) = step
    assert (dummy.num_samples, dummy.num_tokens, dummy.weight) == (0, 0, 0.0)
    assert len(values(dummy.batch)) == 1


def test_the_clock_is_moved_when_the_step_is_over() -> None:
    loader = StepLoader(numbers(10), 4, max_duration="1ep", clock=iter(range(0, 900, 7)).__next__)
    step = next(loader)
    assert (loader.timer.batch, step.timestamp.batch) == (0, 0)
    after = loader.finish(step, seconds=2.0, tokens=12)
    assert (after.batch, after.sample, after.token, after.run_nanoseconds) == (1, 4, 12, 2 * 10**9)
    next(loader)
    assert loader.timer.batch == 1
    next(loader)
    assert loader.timer.batch == 2


def test_a_loop_that_is_left_goes_on_where_it_was() -> None:
    loader = StepLoader(numbers(10), 3, max_duration="1ep", loading={"shuffle": False})
    first = [
        values(micro.batch) for step in loader for micro in [*step] if step.timestamp.batch < 9
    ]
    assert first == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert list(loader) == []
    again = StepLoader(numbers(10), 3, max_duration="1ep", loading={"shuffle": False})
    for step in again:
        if step.timestamp.batch == 1:
            break
    assert [step.timestamp.sample for step in again] == [6, 9]


class FollowLoss(BatchSizePolicy):
    """Takes the last loss as the size."""

    def bind(self, horizon: Horizon) -> Bound:
        return Bound(decide=self.decide, start={"asked": 0})

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        asked = state["asked"]
        assert isinstance(asked, int)
        return int(signals.loss or 2), {"asked": asked + 1}


def test_the_size_follows_what_was_measured_just_before() -> None:
    loader = StepLoader(numbers(100), FollowLoss(), max_duration="30sp")
    sizes, losses = [], iter([5.0, 3.0, 9.0, 7.0, 4.0, 1.0])
    for step in loader:
        sizes.append(step.num_samples)
        loader.finish(step, signals=Signals(loss=next(losses)))
    assert sizes == [2, 5, 3, 9, 7, 4]
    assert loader.state_dict()["policy"]["state"] == {"asked": 6}


def test_a_run_may_end_by_the_wall_clock() -> None:
    loader = StepLoader(numbers(10), 4, max_duration="10s")
    count = 0
    for step in loader:
        loader.finish(step, seconds=3.0)
        count += 1
    assert count == loader.timer.batch == 4


def test_a_run_in_counted_tokens_ends_with_the_batch_that_reaches_it() -> None:
    data = [{"input_ids": torch.ones(i % 3 + 1, dtype=torch.int64)} for i in range(12)]

    def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = [sample["input_ids"] for sample in samples]
        return {
            "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            "attention_mask": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        }

    loader = StepLoader(
        data, 3, max_duration="20tok", loading={"shuffle": False, "collate_fn": pad}
    )
    assert loader.tracks_tokens
    assert [step.num_tokens for step in loader] == [6, 6, 6, 6]
    assert loader.timer.token == 24


@pytest.mark.parametrize("micro", [None, 2])
def test_tokens_of_a_carried_batch_are_counted_for_the_epoch_that_they_belong_to(
    micro: int | None,
) -> None:
    data = [{"input_ids": torch.ones(1 + 9 * (i == 3), dtype=torch.int64)} for i in range(4)]

    def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
        return {"input_ids": ids, "attention_mask": ids}

    loader = StepLoader(
        data,
        3,
        max_duration="2ep",
        loading={"shuffle": False, "collate_fn": pad, "last_batch": "carry"},
        micro_batch_size=micro,
    )
    tokens = []
    for step in loader:
        after = loader.finish(step)
        tokens.append((after.token, after.token_in_epoch))
    assert tokens == [(3, 3), (15, 2), (26, 0)]


def test_tokens_that_all_samples_have_equally_many_of_are_multiplied() -> None:
    spec = DataSpec(numbers(10), tokens_per_sample=7)
    loader = StepLoader(spec, 4, max_duration="70tok")
    assert [step.num_tokens for step in loader] == [28, 28, 14]
    assert (loader.timer.token, loader.timer.epoch) == (70, 1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_plain_data_loader_gives_its_data_set_and_settings(shuffle: bool) -> None:
    given = DataLoader(
        numbers(7),
        batch_size=99,
        shuffle=shuffle,
        collate_fn=lambda samples: torch.tensor([-int(sample[0]) for sample in samples]),
    )
    loader = StepLoader(given, 3, max_duration="1ep", loading={"seed": 1})
    order = SampleOrder(7, 1, shuffle)
    assert [values(micro.batch) for step in loader for micro in step] == [
        [-order[p] for p in range(start, min(7, start + 3))] for start in (0, 3, 6)
    ]


@pytest.mark.parametrize("count", [None, len], ids=["uncounted", "counted"])
def test_the_advice_about_a_collate_function_that_leaves_samples_out_works(count: Any) -> None:
    def leaves_out(samples: list[Any]) -> torch.Tensor:
        return torch.stack([one[0] for one in samples if int(one[0]) != 3])

    def sizes(**facts: Any) -> list[int]:
        spec, loading = DataSpec(numbers(8), **facts), {"collate_fn": leaves_out, "shuffle": False}
        loader = StepLoader(spec, 4, max_duration="1ep", loading=loading)
        return [len(micro.batch) for step in loader for micro in step]

    with pytest.raises(DataError) as refused:
        sizes(get_num_samples_in_batch=count)
    said = re.search(
        r"DataSpec\(data, get_num_samples_in_batch=(.*)\)", refused.value.message.instead
    )
    assert said is not None
    assert sizes(get_num_samples_in_batch=eval(said[1])) == [3, 4]


def test_other_settings_go_before_those_of_a_data_loader() -> None:
    given = DataLoader(numbers(5), shuffle=True)
    loader = StepLoader(
        given, 5, max_duration="1ep", loading={"shuffle": False, "collate_fn": tuple}
    )
    assert [len(micro.batch) for step in loader for micro in step] == [5]


def test_torchs_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    for _ in StepLoader(numbers(10), 3, max_duration="2ep"):
        pass
    assert torch.equal(torch.get_rng_state(), state)


class Whole(list[int]):
    """A data set that gives batches."""

    def whole(self, indices: list[int]) -> torch.Tensor:
        assert all(type(index) is int for index in indices)
        return torch.tensor(indices) * 10

    get_batch = whole


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_may_be_made_of_indices(num_workers: int) -> None:
    data = Whole(range(5))
    for spec, expected in (
        (DataSpec(data, get_batch=data.whole), [[0, 10], [20, 30], [40]]),
        (DataSpec(data), [[0, 1], [2, 3], [4]]),
    ):
        loader = StepLoader(
            spec, 2, max_duration="1ep", loading={"shuffle": False, "num_workers": num_workers}
        )
        assert [values(micro.batch) for step in loader for micro in step] == expected


def test_whole_batches_have_no_single_samples() -> None:
    spec = DataSpec(Whole(range(5)), get_batch=Whole(range(5)).whole)
    settings: Any
    for settings in ({"collate_fn": list}, {"keyed_randomness": True}):
        with pytest.raises(DataError, match="get_batch"):
            loader_with(spec, 5, max_duration="1ep", **settings)
    with pytest.raises(DataError, match="get_batch"):
        DataSpec(iter([torch.zeros(2)]), get_batch=torch.tensor)


class Lies(list[int]):
    def __len__(self) -> int:
        return super().__len__() + 5


def test_a_data_set_that_is_shorter_than_it_says_is_found_out() -> None:
    loader = StepLoader(Lies(range(5)), 4, max_duration="1ep", loading={"shuffle": False})
    next(loader)
    with pytest.raises(DataError, match="IndexError"):
        next(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_that_could_not_be_read_can_be_asked_for_again(
    num_workers: int, tmp_path: Path
) -> None:
    class Fails(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if index == 4 and not (tmp_path / "failed").exists():
                (tmp_path / "failed").touch()
                raise OSError("the disk is away")
            return super().__getitem__(index)

    loader = StepLoader(
        Fails(range(7)),
        3,
        max_duration="1ep",
        loading={"shuffle": False, "num_workers": num_workers},
    )
    seen = values(next(loader).micro_batches[0].batch)
    with pytest.raises(OSError, match="disk"):
        next(loader)
    seen += [value for step in loader for micro in step for value in values(micro.batch)]
    assert seen == list(range(7))


def test_a_collate_function_that_loses_samples_is_found_out() -> None:
    loader = StepLoader(
        [1, None, 3],
        3,
        max_duration="1ep",
        loading={"collate_fn": lambda samples: torch.tensor([s for s in samples if s is not None])},
    )
    with pytest.raises(DataError, match="collated"):
        next(loader)


def test_packed_batches_are_counted_as_the_data_say() -> None:
    def pack(samples: list[int]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.ones(1, sum(samples)), "lengths": torch.tensor(samples)}

    spec = DataSpec([1, 2, 3, 4], get_num_samples_in_batch=lambda batch: len(batch["lengths"]))
    loader = StepLoader(spec, 2, max_duration="1ep", loading={"collate_fn": pack, "shuffle": False})
    assert [(step.local_num_samples, step.num_tokens) for step in loader] == [(2, 3), (2, 7)]


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"micro_batch_size": 0}, BatchSizeError, "0 as a micro-batch size"),
        ({"batch_size": 0}, BatchSizeError, "0 as a batch size"),
        ({"rank": 0}, DataError, "both"),
        ({"rank": 2, "world_size": 2}, DataError, "rank=2"),
        ({"num_workers": -1}, ConfigError, "num_workers=-1"),
        ({"prefetch_factor": 2, "num_workers": 0}, ConfigError, "nothing is fetched ahead"),
        ({"data": []}, DataError, "empty"),
        ({"data": 7}, DataError, "data of type int"),
        ({"data": {"x": 1}}, DataError, "data of type dict"),
        ({"max_duration": "100tok"}, DataError, "count the tokens of these data"),
        ({"batch_size": "0tok:4 9tok:8"}, DataError, "count the tokens of these data"),
        ({"max_duration": "100"}, ValueError, "100"),
        ({"last_batch": "cut"}, ConversionError, "last_batch='cut'"),
        ({"batch_size": 11, "last_batch": "drop"}, BatchSizeError, "an epoch has only 10"),
        ({"seed": 1.5}, DataError, "seed"),
        (
            {
                "data": DataSpec(list(range(5)), tokens_per_sample=2),
                "max_duration": "1ba",
                "batch_size": "0tok:4 9ep:x",
            },
            BatchSizeError,
            "x",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_construction(
    settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    given: dict[str, Any] = {"data": numbers(10), "batch_size": 4, "max_duration": "1ep"}
    given |= settings
    with pytest.raises(error, match=match):
        loader_with(given.pop("data"), given.pop("batch_size"), **given)


def test_a_stage_that_the_ranks_cannot_share_is_refused_before_the_first_step() -> None:
    loader = StepLoader(numbers(100), "0sp:8 50%:2", max_duration="1ep", rank=0, world_size=4)
    with pytest.raises(PlanError, match="batches"):
        next(loader)


def test_a_least_size_that_the_ranks_cannot_share_is_refused_before_the_first_step() -> None:
    few: dict[str, Any] = {"max_duration": "1ep", "rank": 0, "world_size": 4}
    with pytest.raises(PlanError, match="batches"):
        next(loader_with(numbers(100), NoiseScale(2, 64), **few))
    assert next(loader_with(numbers(100), AtLeast(NoiseScale(2, 64), 4), **few)).num_samples == 4


def test_a_run_that_goes_on_is_refused_where_the_next_batch_cannot_be_shared() -> None:
    one = StepLoader(numbers(100), NoiseScale(2, 64), max_duration="1ep")
    next(one)
    one.finish()
    state = one.state_dict()
    few: dict[str, Any] = {"max_duration": "1ep", "rank": 0, "world_size": 4}
    many = loader_with(numbers(100), NoiseScale(2, 64), **few)
    many.load_state_dict(state)
    with pytest.raises(PlanError, match="batches"):
        next(many)
    many.load_state_dict({**state, "policy": {**state["policy"], "state": grown(state, 8)}})
    assert next(many).num_samples == 8


def grown(state: dict[str, Any], size: int) -> dict[str, Any]:
    """The policy's state as it would be had the batch grown."""
    return {**state["policy"]["state"], "size": size}


def test_a_stage_that_is_over_may_have_been_smaller_than_the_world() -> None:
    one = StepLoader(numbers(100), "0sp:2 50%:8", max_duration="1ep")
    for step in one:
        if step.timestamp.sample >= 48:
            break
    one.finish()
    many = StepLoader(numbers(100), "0sp:2 50%:8", max_duration="1ep", rank=0, world_size=4)
    many.load_state_dict(one.state_dict())
    assert next(many).num_samples == 8


def test_a_step_is_finished_once() -> None:
    loader = StepLoader(numbers(10), 4, max_duration="1ep")
    with pytest.raises(DataError, match="step"):
        loader.finish()
    first = next(loader)
    next(loader)
    with pytest.raises(DataError, match="step"):
        loader.finish(first)


def test_processes_that_hold_parts_of_a_rank_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes, two for each of two ranks; this is the first."""

    def add_three_others(packed: torch.Tensor, group: object = None) -> None:
        del group
        tokens, _, mark, square = packed.tolist()
        for other in (tokens, 5.0, 5.0):  # what the second rank has, twice
            packed += torch.tensor([other, 0.0, mark, square], dtype=torch.float64)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda _=None: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda _=None: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", add_three_others)
    assert agreed(Ranks.of(0, 2), 7, 0.25, None) == (12, 0.25)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert agreed(Ranks.of(0, 2), 7, 0.25, None) == (12, 0.0)
    with pytest.raises(DataError, match="distributed"):
        agreed(Ranks.of(0, 3), 7, 0.25, None)


def test_a_cut_batch_counts_by_its_own_samples() -> None:
    """Of an iterable nobody knows where an epoch ends until it has."""

    class Stream:
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.arange(10).split(5)

    loader = StepLoader(Stream(), NoiseScale(8, 64), max_duration="2ep")
    counted = []
    for step in loader:
        loader.finish(step, signals=Signals(noise_numerator=1.0, noise_denominator=1.0))
        counted.append((step.num_samples, loader.state_dict()["signals"]["num_samples"]))
    assert counted == [(8, 8.0), (2, 2.0), (8, 8.0), (2, 2.0)]


def test_several_ranks_without_a_process_group_must_be_told_the_tokens() -> None:
    data = [{"input_ids": torch.ones(3)}] * 4
    loader = StepLoader(data, 2, max_duration="1ep", rank=0, world_size=2)
    next(loader)
    with pytest.raises(DataError, match="tokens"):
        next(loader)


def test_several_ranks_that_are_told_the_tokens_need_not_speak() -> None:
    data = [{"input_ids": torch.ones(3)}] * 4
    loader = StepLoader(data, 2, max_duration="1ep", rank=0, world_size=2)
    for step in loader:
        loader.finish(step, tokens=6)
    assert loader.timer.token == 12


def test_a_sharded_data_loader_is_refused() -> None:
    sampler: Any = DistributedSampler(numbers(4), num_replicas=2, rank=0)
    with pytest.raises(DataError, match="dealt"):
        StepLoader(DataLoader(numbers(4), sampler=sampler), 2, max_duration="1ep")


def test_a_data_loader_with_an_order_of_its_own_keeps_it() -> None:
    sampler = WeightedRandomSampler([0.0, 1.0, 0.0], 6)
    loader = StepLoader(
        DataLoader(numbers(3), sampler=sampler, batch_size=4), 3, max_duration="1ep"
    )
    assert loader.horizon.dataset_num_samples == 6
    assert [values(micro.batch) for step in loader for micro in step] == [[1] * 3, [1], [1, 1]]


@pytest.mark.parametrize("size", [Fixed(4), SizeFunction(lambda timestamp, _: 4)])
def test_pinning_needs_an_accelerator(size: BatchSizePolicy) -> None:
    loader = StepLoader(numbers(8), size, max_duration="1ep", loading={"pin_memory": True})
    tensors = [micro.batch[0] for step in loader for micro in step]
    assert all(tensor.is_pinned() == torch.accelerator.is_available() for tensor in tensors)


def test_sizes_that_follow_what_no_step_brings_are_told() -> None:
    loader = StepLoader(numbers(400), NoiseScale(2, 64), max_duration="1ep")
    with pytest.warns(RuntimeWarning, match="follow") as told:
        for _ in loader:
            pass
    assert len(told) == 1
    without = StepLoader(numbers(400), NoiseScale(2, 64), max_duration="1ep")
    single = (without.finish(step, signals=Signals(loss=2.0)) for step in without)
    with pytest.warns(RuntimeWarning, match="batches"):
        assert len([*single]) == 200
    brought = StepLoader(numbers(400), NoiseScale(2, 64), max_duration="1ep")
    brought.finish(next(brought), signals=Signals(noise_numerator=1.0, noise_denominator=1.0))
    for _ in brought:
        pass  # a warning would be an error


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_takes_integers_of_numpy(num_workers: int) -> None:
    count: Any = np.int64
    spec = DataSpec(list(range(10)), num_samples=count(10), tokens_per_sample=count(3))
    loader = StepLoader(
        spec,
        count(4),
        max_duration="1ep",
        micro_batch_size=count(2),
        loading={"seed": count(2**40), "num_workers": count(num_workers)},
        rank=count(0),
        world_size=count(1),
    )
    seen = sorted(value for step in loader for micro in step for value in micro.batch.tolist())
    assert seen == list(range(10))
    assert json.loads(json.dumps(loader.state_dict()))["clock"]["token"] == 30


@pytest.mark.parametrize("last_batch", ["keep", "drop", "carry"])
@pytest.mark.parametrize(
    ("run", "policy"),
    [("2ep", 4), ("1.5ep", "0sp:2 50%:5"), ("7ba", 3), ("7ba", NoiseScale(2, 6)), ("16sp", 3)],
)
def test_the_length_of_a_loader_is_its_number_of_steps(
    run: str, policy: Any, last_batch: LastBatch
) -> None:
    def make() -> StepLoader:
        return StepLoader(numbers(10), policy, max_duration=run, loading={"last_batch": last_batch})

    loader = make()
    length = len(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert length == len(list(loader)) == len(loader)


@pytest.mark.parametrize(
    ("data", "policy", "run"),
    [
        (list(range(10)), NoiseScale(2, 6), "2ep"),
        (list(range(10)), 2, "1h"),
        (iter([torch.arange(9)]), 4, "18sp"),
    ],
    ids=["adaptive", "wall clock", "unknown length"],
)
def test_a_loader_has_no_length_where_only_the_run_can_tell(
    data: Any, policy: Any, run: str
) -> None:
    loader = StepLoader(data, policy, max_duration=run)
    with pytest.raises(TypeError, match="steps"):
        len(loader)
    assert loader  # whether there is one can be asked all the same


def test_unpacking_a_micro_batch_says_what_to_unpack() -> None:
    step = next(StepLoader(TensorDataset(torch.ones(4), torch.ones(4)), 4, max_duration="1ep"))
    (micro,) = step
    with pytest.raises(DataError, match="targets"):
        _inputs, _targets = micro  # type: ignore[var-annotated]
    inputs, targets = micro.batch
    assert torch.equal(inputs, targets)
    assert pickle.loads(pickle.dumps(micro)).weight == 1.0


@pytest.mark.parametrize("last_batch", ["keep", "drop", "carry"])
@pytest.mark.parametrize("size", [3, 4, 5, "0ba:4 3ba:2 6ba:4"])
def test_tensors_are_those_of_the_order_at_every_end_of_an_epoch(
    size: int | str, last_batch: LastBatch
) -> None:
    order = SampleOrder(10)
    data = TensorDataset(torch.arange(10))
    for step in StepLoader(data, size, max_duration="9ep", loading={"last_batch": last_batch}):
        start = step.timestamp.sample
        found = [int(value) for micro in step for value in micro.batch[0]]
        assert found == [order[start + number] for number in range(step.num_samples)]


@pytest.mark.parametrize("at", [0, 50_000_000], ids=["start", "middle"])
def test_a_start_costs_the_same_for_any_length_and_number_of_ranks(at: int) -> None:
    """Counted in calls of Python functions, which no other program on the machine changes."""

    def calls(num_samples: int, world_size: int, sample: int) -> int:
        data = Indices(num_samples)
        count = 0

        def see(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(see)
        try:
            loader = StepLoader(
                data,
                "0sp:2048 50%:4096",
                max_duration="1ep",
                rank=world_size - 1,
                world_size=world_size,
            )
            state = loader.state_dict()
            state["clock"] |= {"sample": sample, "sample_in_epoch": sample}
            loader.load_state_dict(state)
            step = next(loader)
        finally:
            sys.setprofile(None)
        assert step.timestamp.sample == sample
        assert step.local_num_samples == step.num_samples // world_size
        return count

    calls(10_000, 1, 0)  # imports
    small = calls(8_192, 512, 0)
    assert calls(100_000_000, 512, at) < small + 500


class Indices(torch.utils.data.Dataset[int]):
    """Samples that are their index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index
