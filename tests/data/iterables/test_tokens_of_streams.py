"""Batches of an amount in tokens from iterables: they are decided while reading."""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.iterables.test_streams import on_ranks
from tests.data.records import assert_resumes
from torch import Tensor
from torch.utils.data import IterableDataset

from stretto import plan
from stretto.batching import NoiseScale, SizeFunction, Tokens
from stretto.batching.policy import BatchSizePolicy
from stretto.data import DataSpec, Step, StepLoader
from stretto.errors import BatchSizeError, DataError, PlanError
from stretto.timing import Horizon, LastBatch, TimeUnit


def padded(lengths: Sequence[int], first: int, *, side: str = "right") -> dict[str, Tensor]:
    """Return samples of these lengths as one batch, with their numbers."""
    mask = torch.zeros(len(lengths), max(lengths, default=0), dtype=torch.int64)
    for row, length in zip(mask, lengths, strict=True):
        row[:length] = 1
    numbers = torch.arange(first, first + len(lengths))
    mask = mask if side == "right" else mask.flip(1)
    return {"input_ids": mask * 7, "attention_mask": mask, "number": numbers}


class Texts:
    """Batches of padded texts, each epoch the same; with a state of its own or without."""

    def __init__(self, lengths: Sequence[int], chunks: Sequence[int], *, first: int = 0) -> None:
        self.lengths, self.chunks, self.first, self.place = [*lengths], [*chunks], first, 0

    def __iter__(self) -> Iterator[Any]:
        start, number, self.place = 0, 0, 0
        while start < len(self.lengths):
            size = self.chunks[number % len(self.chunks)]
            yield padded(self.lengths[start : start + size], self.first + start)
            start, number = start + size, number + 1


def numbers(batch: Any) -> list[int]:
    return batch["number"].tolist()


def own(step: Step) -> list[int]:
    return [one for micro in step if micro.num_samples for one in numbers(micro.batch)]


def expected(
    lengths: Sequence[int], tokens: Sequence[int], epochs: int, last: str
) -> list[list[int]]:
    """Return the samples of each batch by the plainest reading of what a batch is."""
    found: list[list[int]] = []
    line = [*range(len(lengths))] * epochs if last == "carry" else [*range(len(lengths))]
    for _ in range(1 if last == "carry" else epochs):
        place = 0
        while place < len(line):
            left, batch = tokens[len(found) % len(tokens)], list[int]()
            while place < len(line) and (not batch or lengths[line[place]] <= left):
                left -= lengths[line[place]]
                batch.append(line[place])
                place += 1
            if last == "drop" and place == len(line) and left > 0:
                break
            found.append(batch)
    return found


class InTurn(BatchSizePolicy):
    """Decides these tokens in turn; counts batches that were not dropped."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    @property
    def unit(self) -> TimeUnit:
        return TimeUnit.TOKEN

    def bind(self, horizon: Horizon) -> Any:
        sizes = SizeFunction(lambda now, _: self.tokens[now.batch % len(self.tokens)], 1)
        return sizes.bind(horizon)


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=25)
CHUNKS = st.lists(st.integers(1, 6), min_size=1, max_size=3)
AMOUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=3)
MODES = st.sampled_from(["keep", "drop", "carry"])


@settings(max_examples=60)
@given(LENGTHS, CHUNKS, AMOUNTS, MODES, st.sampled_from([None, 1, 3]), st.booleans())
def test_a_batch_is_the_longest_run_of_samples_with_that_many_tokens(  # noqa: PLR0917
    lengths: list[int],
    chunks: list[int],
    tokens: list[int],
    last: LastBatch,
    micro: int | None,
    is_sized: bool,
) -> None:
    wanted = expected(lengths, tokens, 2, last)
    spec = DataSpec(Texts(lengths, chunks), num_samples=len(lengths) if is_sized else None)
    for world in (1, 3):
        loaders = [
            StepLoader(
                spec, InTurn(tokens), max_duration="2ep", micro_batch_size=micro, rank=rank,
                world_size=world, loading={"last_batch": last},
            )
            for rank in range(world)
        ]  # fmt: skip
        found = []
        for steps in zip(*loaders, strict=True):
            sizes = {step.num_samples for step in steps}
            assert len({len(step) for step in steps}) == 1
            samples = sorted(one for step in steps for one in own(step))
            assert sizes == {len(samples)}
            weights = sum(micro.weight for step in steps for micro in step)
            assert weights == pytest.approx(world)
            found.append(samples)
            counted = sum(step.num_tokens for step in steps)
            for loader in loaders:
                loader.finish(tokens=counted, seconds=0.0)
        assert found == [sorted(batch) for batch in wanted]
        now = loaders[0].timer.timestamp
        assert (now.epoch, now.batch, now.sample) == (2, len(wanted), 2 * len(lengths))
        if last != "drop":
            assert now.token == 2 * sum(lengths)


@settings(max_examples=15)
@given(LENGTHS, CHUNKS, AMOUNTS, MODES, st.booleans())
def test_it_resumes_with_the_next_sample(
    lengths: list[int], chunks: list[int], tokens: list[int], last: LastBatch, is_sized: bool
) -> None:
    spec = DataSpec(Texts(lengths, chunks), num_samples=len(lengths) if is_sized else None)
    assert_resumes(
        lambda: StepLoader(spec, InTurn(tokens), max_duration="2ep", loading={"last_batch": last}),
        numbers,
    )


def ranks_of(lengths: Sequence[Sequence[int]]) -> Callable[[int], DataSpec]:
    return lambda rank: DataSpec(Texts(lengths[rank], [3, 2], first=1000 * rank), sharded=True)


@settings(max_examples=15)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=2, max_size=3),
    st.integers(3, 40),
    MODES,
    st.sampled_from([None, 2]),
)
def test_each_rank_takes_its_share_of_the_tokens_from_its_own_stream(
    lengths: list[list[int]], tokens: int, last: LastBatch, micro: int | None
) -> None:
    world, make = len(lengths), ranks_of(lengths)

    def work(rank: int) -> list[tuple[Any, ...]]:
        loader = StepLoader(
            make(rank), Tokens(tokens), max_duration="2ep", micro_batch_size=micro,
            loading={"last_batch": last},
        )  # fmt: skip
        return [
            (step.timestamp[:7], step.num_samples, len(step), own(step),
             sum(micro.weight for micro in step), step.num_tokens)
            for step in loader
        ]  # fmt: skip

    seen: list[int] = []
    for steps in zip(*on_ranks(world, work), strict=True):
        samples = [one for step in steps for one in step[3]]
        assert {step[:3] for step in steps} == {steps[0][:3]}
        assert steps[0][1] == len(samples)
        assert sum(step[4] for step in steps) == pytest.approx(world)
        counts = [sum(lengths[one // 1000][one % 1000] for one in step[3]) for step in steps]
        assert counts == [step[5] for step in steps]
        # One sample of a rank may be longer than its share.
        spare = [1 for step, count in zip(steps, counts, strict=True) if len(step[3]) == 1]
        assert sum(counts) <= tokens or spare
        seen += samples
    each = [1000 * rank + one for rank, some in enumerate(lengths) for one in range(len(some))]
    if last != "drop":
        assert sorted(seen) == sorted(2 * each)


def test_ranks_whose_streams_end_early_leave_their_tokens_to_the_others() -> None:
    make = ranks_of([[4, 4], [4] * 10])

    def work(rank: int) -> list[list[int]]:
        return [own(step) for step in StepLoader(make(rank), "16tok", max_duration="1ep")]

    first, second = on_ranks(2, work)
    assert first == [[0, 1], [], []]
    assert second == [[1000, 1001], [1002, 1003, 1004, 1005], [1006, 1007, 1008, 1009]]


def test_sharded_streams_are_returned_to_where_each_was() -> None:
    make = ranks_of([[4, 2, 7, 1, 3], [5, 5, 1, 9, 2, 2, 2]])

    def load(rank: int) -> StepLoader:
        return StepLoader(make(rank), "13tok", max_duration="2ep")

    def work(rank: int) -> None:
        loader, records, steps = load(rank), [], []
        for step in loader:
            records.append(json.dumps(loader.state_dict(again=True)))
            steps.append((step.timestamp[:7], own(step)))
        for number, record in enumerate(records):
            again = load(rank)
            again.load_state_dict(json.loads(record))
            assert [(step.timestamp[:7], own(step)) for step in again] == steps[number:]

    on_ranks(2, work)


def steps_of(data: Any, tokens: str = "8tok", **settings: Any) -> list[tuple[int, int]]:
    data = iter(data) if isinstance(data, list) else data
    loader = StepLoader(data, tokens, max_duration="1ep", **settings)
    return [(step.num_samples, step.num_tokens) for step in loader]


class Encoding(UserDict[str, Tensor]):
    """A mapping that is no dict, as the encodings of transformers are."""


class Row(dict[str, Tensor]):
    """A dict of another class."""


def nested(lengths: Sequence[int]) -> dict[str, Tensor]:
    rows = [torch.full((length,), 3) for length in lengths]
    return {"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}


MIXED = [3, 5, 2, 4]


@pytest.mark.parametrize(
    "batch",
    [
        padded(MIXED, 0),
        padded(MIXED, 0, side="left"),
        padded(MIXED, 0) | {"labels": torch.full((4, 5), -100)},
        Encoding(padded(MIXED, 0)),
        Row(padded(MIXED, 0)),
        {"text": padded(MIXED, 0), "image": torch.zeros(4, 3, 8, 8)},
        {"attention_mask": padded(MIXED, 0)["attention_mask"].bool()},
    ],
    ids=["right", "left", "labels", "encoding", "dict", "nested", "mask alone"],
)
def test_tokens_are_counted_sample_by_sample_without_padding(batch: Any) -> None:
    assert DataSpec(range(9)).tokens_of_samples(batch, 4) == MIXED
    assert steps_of([batch]) == [(2, 8), (2, 6)]


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor], ids=["int", "numpy", "tensor"])
def test_a_function_counts_where_there_are_no_ids(kind: Any) -> None:
    def count(batch: Any) -> Any:
        return kind(int(batch["frames"].sum()))

    batches = [{"x": torch.zeros(4, 5), "frames": torch.tensor(MIXED)}]
    assert steps_of(DataSpec(batches.__iter__(), get_num_tokens_in_batch=count)) == [(2, 8), (2, 6)]


def test_ids_without_a_mask_count_with_their_padding() -> None:
    ids = padded(MIXED, 0)["input_ids"]
    assert DataSpec(range(9)).tokens_of_samples({"input_ids": ids}, 4) == [5, 5, 5, 5]


def test_a_pair_of_texts_counts_both() -> None:
    pair = {"chosen": padded([3, 1], 0), "rejected": padded([2, 2], 0)}
    assert DataSpec(range(9)).tokens_of_samples(pair, 2) == [5, 3]


@pytest.mark.parametrize(
    ("batch", "word"),
    [
        ({"x": torch.zeros(4, 5)}, "count the tokens"),
        (nested(MIXED), "cannot be sliced"),
    ],
    ids=["no ids", "a nested tensor"],
)
def test_what_cannot_be_counted_is_refused(batch: Any, word: str) -> None:
    with pytest.raises(DataError, match=word):
        steps_of(iter([batch]))


def test_a_packed_batch_is_refused_unless_it_can_be_cut() -> None:
    """Positions begin anew in it, so no slice of its one row is a sample."""
    packed = {
        "input_ids": torch.ones(1, 14, dtype=torch.int64),
        "position_ids": torch.cat([torch.arange(length) for length in MIXED])[None],
    }
    ends = [0, 3, 8, 10, 14]

    def samples(batch: Any) -> int:
        return int((batch["position_ids"] == 0).sum())

    spec = DataSpec(iter([packed]), get_num_samples_in_batch=samples)
    with pytest.raises(DataError, match="packed"):
        steps_of(spec)

    def cut(batch: Any, part: slice) -> Any:
        first, stop, _ = part.indices(4)
        return {name: one[:, ends[first] : ends[stop]] for name, one in batch.items()}

    spec = DataSpec(iter([packed]), get_num_samples_in_batch=samples, split_batch=cut)
    assert steps_of(spec) == [(2, 8), (2, 6)]


class Stream(IterableDataset[Any]):
    """Samples one by one."""

    def __iter__(self) -> Iterator[Any]:
        for length in MIXED:
            yield {"input_ids": torch.ones(length), "attention_mask": torch.ones(length)}


def test_a_stream_of_samples_is_collated_first() -> None:
    def pad(rows: Any) -> Any:
        return {
            name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)
            for name in rows[0]
        }

    assert steps_of(Stream(), loading={"collate_fn": pad}) == [(2, 8), (2, 6)]


def test_equal_samples_need_no_ids() -> None:
    spec = DataSpec([torch.zeros(3, 4), torch.zeros(4, 4)].__iter__(), tokens_per_sample=4)
    assert steps_of(spec, "9tok") == [(2, 8), (2, 8), (2, 8), (1, 4)]


def test_a_sample_longer_than_the_batch_is_a_batch() -> None:
    assert steps_of([padded([9, 1, 1], 0)], "3tok") == [(1, 9), (2, 2)]


def test_a_run_may_end_inside_a_batch() -> None:
    loader = StepLoader(Texts([3] * 9, [4]), "12tok", max_duration="6sp")
    assert [step.num_samples for step in loader] == [4, 2]
    loader = StepLoader(Texts([3] * 9, [4]), "12tok", max_duration="25tok")
    assert [step.num_samples for step in loader] == [4, 4, 1]


@pytest.mark.parametrize("number", [5, 12])
@pytest.mark.parametrize("last", ["keep", "drop", "carry"])
def test_another_number_of_samples_than_stated_is_refused(number: int, last: LastBatch) -> None:
    spec = DataSpec(Texts([3] * 9, [4]), num_samples=number)
    with pytest.raises(DataError, match="num_samples"):
        list(StepLoader(spec, "12tok", max_duration="2ep", loading={"last_batch": last}))


def test_a_stream_without_samples_is_refused() -> None:
    with pytest.raises(DataError, match="no samples"):
        steps_of(Texts([], [4]))


def test_map_style_data_need_lengths() -> None:
    texts = [{"input_ids": torch.ones(length)} for length in MIXED]
    with pytest.raises(PlanError, match="lengths"):
        StepLoader(texts, "8tok", max_duration="1ep")
    with pytest.raises(PlanError, match="lengths"):
        plan(Horizon("1ep", dataset_num_samples=4), "8tok")


def test_a_step_that_is_taken_back_comes_again() -> None:
    loader = StepLoader(Texts(MIXED, [4]), "8tok", max_duration="1ep")
    first = own(next(loader))
    loader.take_back()
    assert (own(next(loader)), first) == ([0, 1], [0, 1])
    assert loader.extent["batch size"] == 8
    assert loader.extent["number of samples"] == 2


def test_learning_rates_follow_the_tokens_that_were_decided() -> None:
    loader = StepLoader(Texts(MIXED, [4]), "0tok:8tok 8tok:16tok", max_duration="1ep")
    assert [repr(step.batch_size) for step in loader] == ["'8tok'", "'16tok'"]


# --- micro-batches with a budget of tokens


def budgeted(spec: Any, budget: int, **settings: Any) -> list[StepLoader]:
    world = settings.pop("world", 1)
    return [
        StepLoader(
            spec,
            settings.get("batch_size", "40tok"),
            max_duration="1ep",
            micro_batch_size=Tokens(budget),
            rank=rank,
            world_size=world,
        )
        for rank in range(world)
    ]


@settings(max_examples=40)
@given(LENGTHS, CHUNKS, st.integers(9, 40), st.sampled_from([1, 2, 4]), st.integers(1, 60))
def test_no_micro_batch_exceeds_the_budget_with_its_padding(
    lengths: list[int], chunks: list[int], budget: int, world: int, tokens: int
) -> None:
    loaders = budgeted(
        Texts(lengths, chunks), budget, world=world, batch_size=Tokens(max(world, tokens))
    )
    seen = []
    for steps in zip(*loaders, strict=True):
        assert len({len(step) for step in steps}) == 1
        for step in steps:
            for micro in step:
                ids, mask = micro.batch["input_ids"], micro.batch["attention_mask"]
                assert ids.numel() <= budget
                assert ids.shape == mask.shape
                assert torch.equal(ids, mask * 7)
                assert mask.sum(1).max() == mask.size(1), "padded to its longest row alone"
                assert not micro.num_samples or micro.num_tokens == int(mask.sum())
                assert micro.weight == micro.num_samples * world / step.num_samples
            seen += own(step)
        for loader in loaders:
            loader.finish(tokens=0, seconds=0.0)
    assert sorted(seen) == [*range(len(lengths))]


def test_ranks_with_their_own_streams_run_equally_many_micro_batches() -> None:
    make = ranks_of([[8, 8, 8, 8], [2] * 20])

    def work(rank: int) -> list[list[list[int]]]:
        loader = StepLoader(make(rank), "32tok", max_duration="1ep", micro_batch_size=Tokens(8))
        for step in loader:
            assert all(micro.batch["input_ids"].numel() <= 8 for micro in step)
        loader = StepLoader(make(rank), "32tok", max_duration="1ep", micro_batch_size=Tokens(8))
        return [[numbers(one.batch) if one.num_samples else [] for one in step] for step in loader]

    first, second = on_ranks(2, work)
    assert list(map(len, first)) == list(map(len, second))
    assert [one for step in first for micro in step for one in micro] == [0, 1, 2, 3]
    assert sorted(one for step in second for micro in step for one in micro) == [*range(1000, 1020)]


def test_samples_of_like_length_are_together() -> None:
    (loader,) = budgeted(Texts([8, 1, 8, 1, 1, 1], [6]), 16)
    assert [numbers(micro.batch) for micro in next(loader)] == [[0, 2], [1, 3, 4, 5]]


def test_they_are_not_sorted_where_the_noise_is_measured() -> None:
    sizes = NoiseScale(Tokens(20), Tokens(40))
    (loader,) = budgeted(Texts([8, 1, 8, 1, 1, 1], [6]), 16, batch_size=sizes)
    assert [numbers(micro.batch) for micro in next(loader)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("data", [Texts([3, 2, 30, 4], [2]), Texts([3, 2, 30], [9])])
def test_a_sample_above_the_budget_is_refused_with_its_place_and_length(data: Texts) -> None:
    (loader,) = budgeted(data, 16)
    with pytest.raises(BatchSizeError, match=r"sample 2 of 30 tokens.* 16 tokens"):
        list(loader)


def unlike(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"scores": torch.zeros(batch["input_ids"].shape)}


def ids_alone(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in batch.items() if name != "attention_mask"}


@pytest.mark.parametrize(
    "batch",
    [
        padded([2, 4, 1, 1], 0, side="left"),
        unlike(padded([2, 4, 1, 1], 0)),
        ids_alone(padded([2, 4, 1, 1], 0)),
        padded([2, 4, 1, 1], 0) | {"labels": torch.zeros(4, 4, dtype=torch.int64)},
    ],
    ids=["left padding", "something unknown", "no mask", "targets in the padding"],
)
def test_only_what_is_padding_is_cut_off(batch: Any) -> None:
    """The others cost their whole width."""
    (loader,) = budgeted(iter([batch]), 8)
    micros = [micro for step in loader for micro in step]
    assert [micro.batch["input_ids"].shape for micro in micros] == [(2, 4), (2, 4)]


def test_labels_are_cut_like_their_inputs() -> None:
    labels = torch.where(padded([2, 4, 1, 1], 0)["attention_mask"] > 0, 5, -100)
    (loader,) = budgeted(iter([padded([2, 4, 1, 1], 0) | {"labels": labels}]), 4)
    micros = [micro.batch for micro in next(loader)]
    assert max(micro["labels"].numel() for micro in micros) == 4
    assert all(micro["labels"].shape == micro["input_ids"].shape for micro in micros)


def test_a_function_of_yours_prices_all_like_the_longest() -> None:
    batches = iter([{"x": torch.arange(8.0).view(4, 2), "frames": torch.tensor([3, 5, 2, 4])}])
    spec = DataSpec(batches, get_num_tokens_in_batch=lambda batch: int(batch["frames"].sum()))
    (loader,) = budgeted(spec, 10)
    assert [micro.batch["frames"].tolist() for micro in next(loader)] == [[3, 5], [2, 4]]


def test_names_go_with_their_samples() -> None:
    batch: dict[str, Any] = {**padded([1, 4, 1, 4], 0), "names": ["a", "b", "c", "d"]}
    (loader,) = budgeted(iter([Row(batch)]), 8)
    assert [micro.batch["names"] for micro in next(loader)] == [["b", "d"], ["a", "c"]]
