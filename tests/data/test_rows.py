"""Rows of several samples: a model in plain Python against loader, plan and every resume."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.policies import cycled
from torch.utils.data import TensorDataset

from stretto.data import DataSpec, StepLoader
from stretto.errors import BatchSizeError, CheckpointError, ConversionError, DataError, StrettoError
from stretto.planning import walk
from stretto.settings import Loading
from stretto.timing import LastBatch

EACH = 2
"""Tokens of a sample."""


class Run(NamedTuple):
    """A run that the model and the loader both understand: sizes and lengths in samples."""

    num_samples: int
    lengths: list[tuple[int, int]]
    """From which sample (or batch) on a row has so many samples."""
    sizes: list[tuple[int, int]]
    end: int
    """In samples."""
    last_batch: LastBatch
    shuffle: bool = True
    unit: str = "sp"

    @property
    def longest(self) -> int:
        return max(row for _, row in self.lengths)

    @property
    def texts(self) -> tuple[str, str]:
        each = EACH if self.unit == "tok" else 1
        rows = (f"{at * each}{self.unit}:{row * EACH}" for at, row in self.lengths)
        return " ".join(f"{at}sp:{size}" for at, size in self.sizes), " ".join(rows)


def expected(run: Run) -> list[tuple[int, int, int]]:
    """Return start, size and row of each batch, by counting."""
    epoch = run.num_samples // run.longest * run.longest
    end, start = math.ceil(run.end / run.longest) * run.longest, 0
    found: list[tuple[int, int, int]] = []
    while start < run.end:
        clock = len(found) if run.unit == "ba" else start
        due = [row for at, row in run.lengths if at <= clock][-1]
        asked = [size for at, size in run.sizes if at <= start][-1]
        row = max(k for k in {1, *(row for _, row in run.lengths)} if k <= due and not start % k)
        stop = start + max(row, asked - asked % row)
        if row != due:
            places = [at for at in range(start + 1, stop + 1) if at % due == 0]
            stop = places[-1] if places else math.ceil(stop / due) * due
        left = epoch - start % epoch
        if run.last_batch == "drop" and stop - start > left:
            start += left
            continue
        if run.last_batch == "keep":
            stop = min(stop, start + left)
        if run.last_batch != "drop":
            stop = min(stop, end)
        found.append((start, stop - start, row))
        if run.last_batch == "drop" and epoch - stop % epoch < stop - start:
            stop += epoch - stop % epoch
        start = stop
    return found


@st.composite
def runs(draw: Any) -> Run:
    shortest = draw(st.integers(1, 2))
    rows = [shortest, shortest * draw(st.integers(1, 3))]
    rows.append(rows[-1] * draw(st.integers(1, 3)))
    times = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=3)))
    lengths = [(at, draw(st.sampled_from(rows))) for at in (0, *times)]
    later = draw(st.integers(1, 40))
    return Run(
        num_samples=draw(st.integers(24, 60)),
        lengths=lengths,
        sizes=[(0, draw(st.integers(1, 9))), (later, draw(st.integers(1, 20)))],
        end=draw(st.integers(1, 80)),
        last_batch=draw(st.sampled_from(["keep", "carry", "drop"])),
        shuffle=draw(st.booleans()),
        unit=draw(st.sampled_from(["sp", "tok", "ba"])),
    )


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sample i has the tokens 2i and 2i + 1, and targets that are one further."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.num_samples:
            raise IndexError(index)
        ids = torch.arange(index * EACH, (index + 1) * EACH)
        return {"input_ids": ids, "labels": ids + 1}


def loader(run: Run, rank: int = 0, world_size: int = 1, **changes: Any) -> StepLoader:
    sizes, lengths = run.texts
    loading = Loading(last_batch=run.last_batch, shuffle=run.shuffle, seed=5)
    given: dict[str, Any] = {"sequence_length": lengths, "loading": loading, "idle_ranks": True}
    given |= changes
    data = given.pop("data", Tokens(run.num_samples))
    return StepLoader(
        DataSpec(data, tokens_per_sample=EACH),
        given.pop("batch_size", sizes),
        max_duration=f"{run.end}sp",
        rank=rank,
        world_size=world_size,
        **given,
    )


def rows_of(step: Any) -> list[list[int]]:
    """Return the tokens of each row of a step on one rank."""
    found = []
    for micro in step:
        batch = micro.batch if isinstance(micro.batch, dict) else {"input_ids": micro.batch[0]}
        if micro.weight:
            assert len(batch["input_ids"]) * micro.row == micro.num_samples
            assert micro.num_tokens == batch["input_ids"].numel()
            found += batch["input_ids"].tolist()
    return found


def all_steps(
    run: Run, world_size: int = 1, *, state: Any = None, until: int | None = None, **changes: Any
) -> tuple[list[tuple[int, int, int, list[list[list[int]]]]], Any]:
    """Return start, size, row and the rows of each rank, of every step; and the last state."""
    loaders = [loader(run, rank, world_size, **changes) for rank in range(world_size)]
    for one in loaders:
        if state is not None:
            one.load_state_dict(state)
    found: list[Any] = []
    while until is None or len(found) < until:
        steps = [next(one, None) for one in loaders]
        first = steps[0]
        if first is None:
            assert steps == [None] * world_size
            break
        size = first.num_samples
        weights = [micro.weight for step in steps for micro in step or ()]
        assert sum(weights) / world_size == pytest.approx(1)
        each = [rows_of(step) for step in steps]
        found.append((first.timestamp.sample, size, first.micro_batches[0].row, each))
        for one in loaders:
            one.finish(tokens=size * EACH, seconds=1.0)
    return found, loaders[0].state_dict()


@given(runs(), st.integers(1, 4), st.data())
def test_the_loader_follows_the_model_on_any_ranks_and_after_any_resume(
    run: Run, world_size: int, data: st.DataObject
) -> None:
    epoch = run.num_samples // run.longest * run.longest
    if run.last_batch == "drop" and max(size for _, size in run.sizes) > epoch - run.longest:
        run = run._replace(last_batch="carry")
    micro = data.draw(st.sampled_from([None, run.longest, 2 * run.longest + 1]))
    tensors = TensorDataset(torch.arange(run.num_samples * EACH).view(-1, EACH))
    source = data.draw(st.sampled_from([tensors, Tokens(run.num_samples)]))
    steps, _ = all_steps(run, world_size, micro_batch_size=micro, data=source)
    batches = [(start, size, row) for start, size, row, _ in steps]
    assert batches == expected(run)
    planned = walk(loader(run).horizon, loader(run).prepared.bound_policy)
    assert batches == [(one.timestamp.sample, one.size, one.row) for one in planned]

    seen: dict[int, int] = {}
    for start, size, row, each in steps:
        first = start // row
        line = [each[j % world_size].pop(0) for j in range(first, first + size // row)]
        assert not any(each)  # rank r has the rows j with j % W == r
        for number, tokens in enumerate(line):
            assert tokens == list(range(tokens[0], tokens[0] + row * EACH))  # contiguous text
            for more in range(row):
                seen[start + number * row + more] = tokens[0] // EACH + more
    for number in range(max(seen) // epoch + 1):
        positions = range(number * epoch, (number + 1) * epoch)
        indices = [seen[at] for at in positions if at in seen]
        assert len(set(indices)) == len(indices)
        assert max(indices) < epoch
        assert run.shuffle or indices == [at % epoch for at in positions if at in seen]

    stop = data.draw(st.integers(0, len(steps)))
    _, state = all_steps(run, world_size, until=stop)
    again, _ = all_steps(run, data.draw(st.integers(1, 4)), state=state, micro_batch_size=micro)
    whole, _ = all_steps(run)
    assert [(*step[:3], sorted(chain(*step[3]))) for step in again] == [
        (*step[:3], sorted(chain(*step[3]))) for step in whole[stop:]
    ]


RUN = Run(100, [(0, 1), (20, 2), (50, 4)], [(0, 6), (30, 12)], 150, "keep")


@pytest.mark.parametrize("is_planned", [True, False], ids=["planned", "at the step"])
def test_workers_read_the_same_rows_also_after_a_resume(is_planned: bool) -> None:
    given: dict[str, Any] = {"batch_size": cycled([5, 6, 14], planned=is_planned)}
    given["micro_batch_size"] = 5
    loading = Loading(shuffle=True, seed=5, num_workers=2)
    assert loader(RUN, **given).is_planned == is_planned
    direct, _ = all_steps(RUN, 2, **given)
    worked, _ = all_steps(RUN, 2, loading=loading, **given)
    assert worked == direct
    assert {row for _, _, row, _ in direct} == {1, 2, 4}
    _, state = all_steps(RUN, 2, until=6, **given)
    again, _ = all_steps(RUN, 2, state=state, loading=loading, **given)
    assert again == direct[6:]


def test_collate_gets_rows() -> None:
    asked: list[Any] = []

    def collate(rows: list[Any]) -> Any:
        asked.append([row["labels"].tolist() for row in rows])
        return {"input_ids": torch.stack([row["input_ids"] for row in rows])}

    loading = Loading(shuffle=False, collate_fn=collate)
    run = RUN._replace(lengths=[(0, 2)], sizes=[(0, 4)], end=4)
    all_steps(run, loading=loading)
    assert asked == [[[1, 2, 3, 4], [5, 6, 7, 8]]]


def test_get_batch_and_keyed_randomness_read_rows() -> None:
    run = RUN._replace(num_samples=103)
    spec = DataSpec(
        Tokens(103),
        tokens_per_sample=EACH,
        get_batch=lambda indices: {
            "input_ids": torch.tensor([[2 * i, 2 * i + 1] for i in indices])
        },
    )
    plain, _ = all_steps(run)
    keyed, _ = all_steps(run, loading=Loading(shuffle=True, seed=5, keyed_randomness=True))
    assert keyed == plain
    sizes, lengths = run.texts
    whole = StepLoader(
        spec, sizes, max_duration="150sp", sequence_length=lengths, loading=Loading(seed=5)
    )
    assert [rows_of(step) for step in whole] == [step[3][0] for step in plain]


def test_a_resume_may_change_the_times_but_not_the_longest() -> None:
    _, state = all_steps(RUN, until=4)
    other = RUN._replace(lengths=[(0, 2), (60, 4)])
    steps, _ = all_steps(other, state=state)
    before, _ = all_steps(RUN, until=4)
    first = {token for step in before for row in step[3][0] for token in row}
    rest = [token for start, _, _, each in steps if start < 100 for row in each[0] for token in row]
    assert sorted([*first, *rest]) == list(range(200))  # one epoch
    with pytest.raises(CheckpointError, match="longest_row"):
        all_steps(RUN._replace(lengths=[(0, 2)]), state=state)
    with pytest.raises(CheckpointError, match="longest_row"):
        all_steps(RUN, state=state, sequence_length=None)


@pytest.mark.parametrize(
    ("lengths", "instead"),
    [("0sp:3", "write 4"), ("0sp:4 8sp:6", "write 8"), ("0sp:1", "write 2")],
)
def test_a_length_is_a_multiple_of_the_shorter_ones(lengths: str, instead: str) -> None:
    with pytest.raises(BatchSizeError) as caught:
        loader(RUN, sequence_length=lengths)
    assert caught.value.message.instead == instead


@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        ({"micro_batch_size": 3}, BatchSizeError, "4 samples"),
        ({"data": torch.zeros(3, 2)}, ConversionError, "4 samples"),
        ({"data": iter([torch.zeros(4, 2)])}, DataError, "iterable"),
    ],
    ids=["micro", "small", "iterable"],
)
def test_what_cannot_hold_a_row_is_refused(
    given: dict[str, Any], error: type[StrettoError], word: str
) -> None:
    with pytest.raises(error, match=word):
        loader(RUN, **given)


@pytest.mark.parametrize(
    "sample",
    [
        torch.zeros(3),
        {"input_ids": torch.zeros(2), "name": "a"},
        {"input_ids": torch.zeros(2), "position_ids": torch.arange(2)},
        {"input_ids": torch.zeros(2), "label": 1},
    ],
    ids=["longer", "text", "positions", "label"],
)
def test_what_cannot_be_joined_is_refused(sample: Any) -> None:
    data = [sample] * 100
    with pytest.raises(DataError, match="2 tokens"):
        next(loader(RUN._replace(lengths=[(0, 2)]), data=data))


def test_unknown_tokens_are_refused() -> None:
    with pytest.raises(BatchSizeError, match="tokens_per_sample"):
        StepLoader(range(8), 2, max_duration="1ep", sequence_length=4)
