"""Micro-batches with a budget of tokens: cut alike by any ranks, and read by any workers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from stretto.batching import NoiseScale, Plateau, Signals, SizeFunction
from stretto.data import DataSpec, StepLoader
from stretto.errors import BatchSizeError, DataError
from stretto.planning.plan import plan_prepared
from stretto.settings import Loading
from stretto.timing import LastBatch


class Texts(Dataset[dict[str, Any]]):
    """Sample i has `lengths[i]` tokens, each of them i."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.rand(()) + random.random()
        ids = torch.full((self.lengths[index],), index)
        return {"input_ids": ids, "index": index, "noise": noise}


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Join samples in rows, with -1 as padding."""
    ids = [one["input_ids"] for one in samples]
    rows = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)
    return {"input_ids": rows, **rest_of(samples)}


def joined(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Join samples in one row, without padding."""
    ids = torch.cat([one["input_ids"] for one in samples])
    return {"input_ids": ids[None], **rest_of(samples)}


def rest_of(samples: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the indices of samples, and what chance gave them."""
    return {name: [float(one[name]) for one in samples] for name in ("index", "noise")}


class Rank(NamedTuple):
    """How one of the ranks of a run loads."""

    rank: int = 0
    world_size: int = 1
    budget: Any = 60
    workers: int = 0
    packed: bool = False


def loader_of(
    lengths: list[int], batch_size: Any, place: Rank, *, ends: LastBatch = "keep", **more: Any
) -> StepLoader:
    """Return the loader of one rank."""
    loading = Loading(
        collate_fn=joined if place.packed else padded,
        packed=place.packed,
        num_workers=place.workers,
        last_batch=ends,
        **more,
    )
    return StepLoader(
        DataSpec(Texts(lengths), lengths=lengths),
        batch_size,
        max_duration="3ep",
        micro_batch_size=place.budget,
        loading=loading,
        rank=place.rank,
        world_size=place.world_size,
        idle_ranks=True,
    )


MEASURED = Signals(noise_numerator=24.0, noise_denominator=1.0)


class Seen(NamedTuple):
    """What one rank had in one step."""

    start: int
    size: int
    samples: list[int]
    passes: int
    noise: list[float]


def read(loader: StepLoader, lengths: list[int], *, steps: int | None = None) -> list[Seen]:
    """Read some steps, and check each micro-batch."""
    found: list[Seen] = []
    budget = int(loader.micro_batch_size or 0)
    known = loader.horizon.lengths
    assert known is not None
    while steps is None or len(found) < steps:
        step = next(loader, None)
        if step is None:
            break
        samples, noise = [], []
        for micro in step:
            ids, own = micro.batch["input_ids"], [*map(int, micro.batch["index"])]
            assert ids.numel() <= budget
            assert sorted(own) == sorted(ids[:, 0].tolist()) or ids.size(0) == 1
            noise += micro.batch["noise"]
            if micro.num_samples:
                assert len(own) == micro.num_samples
                assert micro.num_tokens == sum(lengths[one] for one in own)
                samples += own
            else:
                assert (len(own), micro.num_tokens) == (1, 0)
            weight = micro.num_samples * loader.world_size / step.num_samples
            assert micro.weight == weight
        start, size = step.timestamp.sample, step.num_samples
        found.append(Seen(start, size, samples, len(step), noise))
        tokens = known.tokens(start, start + size)
        loader.finish(tokens=tokens, seconds=0.0, signals=MEASURED)
    return found


def together(ranks: list[list[Seen]]) -> list[tuple[int, int, list[int]]]:
    """Return the steps over all ranks: where each starts, its size and its samples."""
    assert len({len(steps) for steps in ranks}) == 1
    found = []
    for steps in zip(*ranks, strict=True):
        assert len({(one.start, one.size, one.passes) for one in steps}) == 1
        samples = sorted(sample for one in steps for sample in one.samples)
        assert len(samples) == steps[0].size
        found.append((steps[0].start, steps[0].size, samples))
    return found


def run_of(
    lengths: list[int],
    batch_size: Any,
    world_size: int,
    budget: int,
    *,
    ends: LastBatch = "keep",
    packed: bool = False,
    state: str | None = None,
    steps: int | None = None,
) -> tuple[list[tuple[int, int, list[int]]], str]:
    """Run some steps on all ranks; return them, and the state afterwards."""
    ranks = []
    for rank in range(world_size):
        place = Rank(rank, world_size, f"{budget}tok", packed=packed)
        loader = loader_of(lengths, batch_size, place, ends=ends)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        ranks.append(read(loader, lengths, steps=steps))
    return together(ranks), json.dumps(loader.state_dict())


POLICIES: list[Any] = [
    5,
    "0sp:3 20sp:11",
    SizeFunction(lambda timestamp, current: 3 + timestamp.batch % 5, 3),
    Plateau("validation/loss", start=3, maximum=9),
    NoiseScale(4, 12),
    "90tok",
    "0tok:60tok 300tok:150tok",
    NoiseScale("50tok", "200tok"),
]

ways = st.tuples(st.sampled_from(POLICIES), st.integers(1, 4), st.integers(40, 200))
"""A policy, a number of ranks and a budget."""


@settings(max_examples=25, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=12, max_size=40),
    halves=st.tuples(ways, ways),
    packed=st.booleans(),
    ends=st.sampled_from(["keep", "drop", "carry"]),
    cut=st.integers(0, 12),
)
def test_any_ranks_budgets_and_policies_may_follow_any_others(
    lengths: list[int],
    halves: tuple[tuple[Any, int, int], ...],
    *,
    packed: bool,
    ends: LastBatch,
    cut: int,
) -> None:
    first, second = halves
    if sum(lengths) < 200:
        ends = "carry"  # under drop, each batch must fit into an epoch
    before, state = run_of(lengths, *first, ends=ends, packed=packed, steps=cut)
    after, _ = run_of(lengths, *second, ends=ends, packed=packed, state=state)
    alone, _ = run_of(lengths, second[0], 1, 41, ends=ends, state=state)
    assert after == alone  # neither ranks nor budgets change a batch
    seen = [sample for *_, samples in before + after for sample in samples]
    order = loader_of(lengths, 1, Rank()).spec.order(Loading())
    if ends != "drop":
        assert sorted(seen) == sorted([*range(len(lengths))] * 3)
    for start, size, samples in before + after:
        assert samples == sorted(order[start + place] for place in range(size))


@pytest.mark.parametrize(
    "policy",
    [12, SizeFunction(lambda timestamp, current: 12, 12), NoiseScale(12, 40)],
    ids=["planned", "reactive", "noise"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_workers_change_nothing(policy: Any, packed: bool, small_chunks: None) -> None:
    chance = random.Random(3)
    lengths = [chance.randint(1, 40) for _ in range(100)]

    def steps(rank: int, workers: int, cut: int = 0) -> list[Seen]:
        place = Rank(rank, 3, "90tok", workers, packed)
        loader = loader_of(lengths, policy, place, keyed_randomness=True)
        if cut:
            first = loader_of(lengths, policy, place, keyed_randomness=True)
            read(first, lengths, steps=cut)
            loader.load_state_dict(first.state_dict())
        return read(loader, lengths)

    ranks = [steps(rank, 0) for rank in range(3)]
    together(ranks)
    assert steps(1, 2) == ranks[1]
    assert steps(2, 1, cut=5) == ranks[2][5:]


def test_worker_seeds_follow_the_position_and_not_the_workers(small_chunks: None) -> None:
    lengths = [1 + place % 30 for place in range(60)]
    once, twice = (
        read(loader_of(lengths, 10, Rank(0, 2, "90tok", workers)), lengths) for workers in (1, 2)
    )
    assert once == twice
    assert once[0].noise != once[6].noise


def test_the_noise_is_measured_on_even_parts_in_the_order_of_the_run() -> None:
    lengths = [1 + place % 30 for place in range(60)]
    loader = loader_of(lengths, NoiseScale(24, 40), Rank(1, 2, "90tok"))
    step = next(loader)
    sizes = [micro.num_samples for micro in step]
    assert max(sizes) - min(sizes) <= 1
    order = loader.spec.order(Loading())
    own = [sample for micro in step for sample in micro.batch["index"]]
    assert own == [order[position] for position in range(1, 24, 2)]


@pytest.mark.parametrize("sizes", ["0sp:7 30sp:31", "0tok:150tok 600tok:650tok"])
def test_a_plan_knows_the_passes_of_each_batch(sizes: str) -> None:
    chance = random.Random(5)
    lengths = [chance.randint(1, 40) for _ in range(90)]
    loader = loader_of(lengths, sizes, Rank(1, 2, "80tok"))
    planned = plan_prepared(loader.prepared, world_size=2, micro_batch_size="80tok")
    passes = [one.accumulation for one in planned.batches()]
    assert passes == [one.passes for one in read(loader, lengths)]
    second = planned.stages[1].first.batch
    assert [stage.accumulation for stage in planned.stages] == [passes[0], passes[second]]
    assert planned.to_json()["micro_batch_size"] == "80tok"


@pytest.mark.parametrize("make", [loader_of], ids=["loader"])
def test_a_sample_above_the_budget_is_named_before_the_run(make: Callable[..., Any]) -> None:
    lengths = [3, 50, 61, 4]
    with pytest.raises(BatchSizeError, match="sample 2 of 61 tokens"):
        make(lengths, 2, Rank(budget="60tok"))
    loader = make(lengths, 2, Rank(budget="61tok"))
    with pytest.raises(BatchSizeError, match="sample 2 of 61 tokens"):
        plan_prepared(loader.prepared, micro_batch_size="60tok")


def test_samples_of_equal_length_are_counted_in_rows() -> None:
    spec = DataSpec([torch.zeros(8)] * 20, tokens_per_sample=8)
    loader = StepLoader(spec, 10, max_duration="1ep", micro_batch_size="30tok")
    assert loader.micro_batch_size == 3
    assert [micro.num_samples for micro in next(loader)] == [3, 3, 2, 2]
    with pytest.raises(BatchSizeError, match="of 8 tokens"):
        StepLoader(spec, 10, max_duration="1ep", micro_batch_size="7tok")


def test_a_budget_needs_lengths() -> None:
    with pytest.raises(DataError, match="lengths=") as caught:
        StepLoader(Texts([1, 2]), 2, max_duration="1ep", micro_batch_size="8tok")
    assert "tokens_per_sample" in caught.value.message.instead


def test_the_budget_may_change_between_steps() -> None:
    lengths = [1 + place % 30 for place in range(60)]
    loader = loader_of(lengths, 20, Rank(budget="300tok"))
    first = next(loader)
    loader.finish(first, signals=Signals())
    loader.set_micro_batch_size("60tok")
    assert len(next(loader)) > len(first)
