"""Iterables of batches, cut anew into exact ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.policies import cycled
from tests.data.records import loader_with, read
from torch.utils.data import DataLoader, IterableDataset

from stretto.data import DataSpec, StepLoader
from stretto.errors import ConversionError, DataError
from stretto.ordering import share
from stretto.planning import plan, walk
from stretto.timing import LastBatch


class Chunks:
    """Batches of given lengths; each epoch counts on."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        start = self.epochs[-1] * sum(self.lengths)
        for length in self.lengths:
            yield torch.arange(start, start + length)
            start += length


def values(batch: Any) -> list[int]:
    listed: list[int] = batch.tolist()
    return listed


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)
SIZES = st.lists(st.integers(1, 15), min_size=1, max_size=4)
MODES = st.sampled_from(["keep", "drop", "carry"])


@given(LENGTHS, SIZES, MODES, st.sampled_from([1, 2, 3, 7]), st.sampled_from([None, 1, 3]))
def test_ranks_share_every_batch_that_a_source_gives(
    lengths: list[int], sizes: list[int], last_batch: LastBatch, world: int, micro: int | None
) -> None:
    n = sum(lengths)
    sizes = [min(size, n) for size in sizes] if last_batch == "drop" else sizes
    for known in (None, n):
        by_rank = [
            list(
                read(
                    StepLoader(
                        DataSpec(Chunks(lengths), num_samples=known),
                        cycled(sizes, planned=False),
                        max_duration="3ep",
                        loading={"last_batch": last_batch},
                        rank=rank,
                        world_size=world,
                        micro_batch_size=micro,
                    ),
                    values,
                )
            )
            for rank in range(world)
        ]
        for steps in zip(*by_rank, strict=True):
            start, size, micros = steps[0].sample, steps[0].size, steps[0].micro_batches
            assert {(one.sample, one.size, one.micro_batches) for one in steps} == {
                (start, size, micros)
            }
            for rank, step in enumerate(steps):
                assert list(step.samples) == list(share(start, size, rank, world))
            assert sum(sum(step.weights) for step in steps) == pytest.approx(world)


@given(LENGTHS, SIZES, MODES)
def test_an_iterable_of_known_length_follows_the_plan_as_a_data_set_does(
    lengths: list[int], sizes: list[int], last_batch: LastBatch
) -> None:
    n = sum(lengths)
    policy = cycled([min(size, n) for size in sizes])
    loader = StepLoader(
        DataSpec(Chunks(lengths), num_samples=n),
        policy,
        max_duration="2.5ep",
        loading={"last_batch": last_batch},
    )
    planned = [
        (plan.timestamp.sample, plan.size)
        for plan in walk(loader.horizon, policy.bind(loader.horizon))
    ]
    assert [(step.timestamp.sample, step.num_samples) for step in loader] == planned


@given(LENGTHS, SIZES, st.sampled_from(["keep", "carry"]))
def test_an_unknown_length_gives_the_same_batches_as_a_known_one(
    lengths: list[int], sizes: list[int], last_batch: LastBatch
) -> None:
    clocks = []
    for known in (None, sum(lengths)):
        spec = DataSpec(Chunks(lengths), num_samples=known, tokens_per_sample=2)
        loader = StepLoader(
            spec,
            cycled(sizes, planned=False),
            max_duration="3ep",
            loading={"last_batch": last_batch},
        )
        clocks.append([(*loader.finish(step)[:7], step.num_samples) for step in loader])
    assert clocks[0] == clocks[1]


def test_what_drop_leaves_out_of_an_unknown_length_is_passed_over() -> None:
    loader = StepLoader(Chunks([4, 3]), 3, max_duration="2ep", loading={"last_batch": "drop"})
    assert [(step.timestamp.epoch, step.timestamp.sample) for step in loader] == [
        (0, 0),
        (0, 3),
        (1, 7),
        (1, 10),
    ]
    assert (loader.timer.epoch, loader.timer.sample, loader.timer.batch) == (2, 14, 4)


def test_every_epoch_is_told_to_the_source() -> None:
    source = Chunks([4])
    assert len(list(StepLoader(source, 2, max_duration="3ep"))) == 6
    assert source.epochs == [0, 1, 2]


def test_views_are_cut_and_never_joined() -> None:
    chunk = torch.arange(10.0)
    loader = StepLoader([chunk][:0] or iter([chunk]), 4, max_duration="1ep")
    for step in loader:
        for micro in step:
            assert micro.batch.untyped_storage().data_ptr() == chunk.untyped_storage().data_ptr()


def test_a_generator_serves_one_epoch() -> None:
    loader = StepLoader((torch.zeros(3) for _ in range(2)), 4, max_duration="1ep")
    assert [step.num_samples for step in loader] == [4, 2]
    with pytest.raises(DataError, match="once"):
        StepLoader((torch.zeros(3) for _ in range(2)), 4, max_duration="2ep")
    loader = StepLoader((torch.zeros(3) for _ in range(2)), 4, max_duration="7sp")
    with pytest.raises(DataError, match="generator"):
        list(loader)


@pytest.mark.parametrize(
    ("lengths", "match"),
    [([5, 4], "they end after 9"), ([5, 5, 1], "they have more")],
    ids=["short", "long"],
)
def test_a_length_that_is_not_the_sources_is_found_out(lengths: list[int], match: str) -> None:
    loader = StepLoader(DataSpec(Chunks(lengths), num_samples=10), 3, max_duration="2ep")
    with pytest.raises(DataError, match=match):
        list(loader)


def test_a_source_that_has_failed_is_not_taken_for_one_that_has_ended() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.arange(5)
        raise OSError("the disk is gone")

    loader = StepLoader(broken(), 3, max_duration="1ep")
    next(loader)
    with pytest.raises(OSError, match="disk"):
        next(loader)
    with pytest.raises(DataError, match="reading"):
        next(loader)


def test_an_empty_epoch_is_refused() -> None:
    with pytest.raises(DataError, match="samples"):
        list(StepLoader(Chunks([0, 0]), 3, max_duration="9sp"))


@pytest.mark.parametrize(
    ("duration", "policy"), [("0.5ep", 4), ("9sp", "0ep:4 0.5ep:8")], ids=["run", "policy"]
)
def test_only_units_that_need_the_size_are_refused(duration: str, policy: Any) -> None:
    with pytest.raises(ConversionError, match="samples"):
        StepLoader(Chunks([4]), policy, max_duration=duration)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_workers": 2}, "num_workers=2"),
        ({"collate_fn": len}, "batches already"),
        ({"keyed_randomness": True}, "keyed_randomness"),
        ({"max_duration": "1Ktok"}, "count the tokens"),
    ],
    ids=["workers", "collate", "keyed", "tokens"],
)
def test_what_an_iterable_cannot_do_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        list(loader_with(Chunks([4]), 4, **({"max_duration": "1ep"} | settings)))


def test_tokens_are_counted_chunk_by_chunk() -> None:
    chunks = [{"input_ids": torch.ones(3, 4), "attention_mask": torch.tensor([[1, 1, 0, 0]] * 3)}]
    loader = StepLoader(iter(chunks), 2, max_duration="1ep")
    assert [step.num_tokens for step in loader] == [4, 2]


def test_a_data_loader_over_batches_is_read_as_it_is() -> None:
    batches = [torch.arange(3), torch.arange(3, 8)]
    loader = StepLoader(DataLoader(batches, batch_size=None), 4, max_duration="1ep")  # type: ignore[arg-type]
    assert [values(micro.batch) for step in loader for micro in step] == [
        [0, 1, 2],
        [3],
        [4, 5, 6, 7],
    ]


@given(LENGTHS, st.integers(1, 15), MODES, st.sampled_from(["18sp", "40sp", "7ba"]), st.booleans())
def test_the_plan_of_an_iterable_of_unknown_length_is_exact_or_a_bound(
    lengths: list[int], size: int, last_batch: LastBatch, run: str, grows: bool
) -> None:
    size = min(size, sum(lengths)) if last_batch == "drop" else size
    policy = f"0sp:{size} 10sp:{size + 3}" if grows and last_batch != "drop" else size
    loader = StepLoader(
        Chunks(lengths), policy, max_duration=run, loading={"last_batch": last_batch}
    )
    assert loader.is_planned == (last_batch == "carry")
    planned = plan(loader.horizon, policy)
    taken = [step.num_samples for step in loader]
    assert planned.num_batches is not None
    if planned.is_exact:
        assert [batch.size for batch in planned.batches()] == taken
    elif run == "7ba":
        assert len(taken) == planned.num_batches
        bound = planned.end.sample if planned.end else 0
        assert loader.timer.sample >= bound if last_batch == "drop" else sum(taken) <= bound
    elif last_batch == "keep":
        assert len(taken) >= planned.num_batches
        assert sum(taken) == planned.num_samples
    else:
        assert len(taken) <= planned.num_batches


def test_a_plan_of_an_iterable_says_at_least_where_an_epoch_cuts_a_batch() -> None:
    loader = StepLoader(Chunks([9]), 4, max_duration="18sp")
    assert plan(loader.horizon, 4).num_batches == 5
    assert [step.num_samples for step in loader] == [4, 4, 1, 4, 4, 1]


class Yields(IterableDataset[Any]):
    """Yields what it is given, as a torch `IterableDataset`."""

    def __init__(self, *given: Any) -> None:
        self._given = given

    def __iter__(self) -> Iterator[Any]:
        return iter(self._given * 8)


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(4, 2), torch.ones(4, 1)),
        (torch.ones(4, 2), torch.ones(4)),
        {"input_ids": torch.ones(4, 16), "labels": torch.ones(4, 16)},
    ],
)
def test_samples_that_look_like_batches_are_said(batch: Any) -> None:
    """Torch batches what an `IterableDataset` yields once more."""
    with pytest.warns(UserWarning, match="batch_size=None"):
        next(StepLoader(Yields(batch), 8, max_duration="1ep"))
    step = next(StepLoader(DataLoader(Yields(batch), batch_size=None), 8, max_duration="1ep"))
    assert step.local_num_samples == 8


@pytest.mark.parametrize(
    "sample",
    [
        torch.ones(3),
        (torch.ones(3, 8, 8), 1),
        (torch.ones(3, 8, 8), torch.ones(())),
        (torch.ones(4), torch.ones(4)),
        {"input_ids": torch.ones(16), "attention_mask": torch.ones(16)},
        (torch.ones(1, 2), torch.ones(1, 1)),
    ],
)
def test_samples_are_no_batches(sample: Any) -> None:
    assert next(StepLoader(Yields(sample), 8, max_duration="1ep")).local_num_samples == 8
