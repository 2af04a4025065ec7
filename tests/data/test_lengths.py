from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stretto.data import DataSpec, StepLoader, count_lengths
from stretto.data import lengths as module
from stretto.data.lengths import OrderedLengths, checked_lengths
from stretto.errors import ConfigError, ConversionError, DataError
from stretto.ordering import SampleOrder
from stretto.timing import Horizon
from stretto.training import Loading

LENGTHS = [7, 1, 4, 9, 2, 2, 30, 5]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    block=st.integers(1, 9),
    shuffle=st.booleans(),
    position=st.integers(0, 70),
    size=st.integers(0, 80),
    tokens=st.integers(1, 900),
)
def test_every_answer_is_that_of_a_walk(
    *, lengths: list[int], block: int, shuffle: bool, position: int, size: int, tokens: int
) -> None:
    order = SampleOrder(len(lengths), 5, shuffle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        ordered = OrderedLengths(torch.tensor(lengths), order)
        walked = [lengths[order[at]] for at in range(position, position + size)]
        for _ in range(2):  # the second time from what is kept
            assert ordered.of(position, position + size) == walked
            assert ordered.tokens(position, position + size) == sum(walked)
        count = total = 0
        while total + lengths[order[position + count]] <= tokens:
            total += lengths[order[position + count]]
            count += 1
        assert ordered.count(position, tokens) == max(1, count)
        assert ordered.reached(position, tokens) == count + (total < tokens)
        assert ordered.reached(position, 0) == 0
    assert (ordered.total, ordered.longest) == (sum(lengths), max(lengths))


@pytest.mark.parametrize(
    "given",
    [
        LENGTHS,
        tuple(LENGTHS),
        np.array(LENGTHS, dtype=np.uint16),
        np.array(LENGTHS, dtype=np.uint8),
        torch.tensor(LENGTHS, dtype=torch.int32),
    ],
    ids=["list", "tuple", "uint16", "uint8", "int32"],
)
def test_lengths_may_be_any_array_of_whole_numbers(given: Any) -> None:
    spec = DataSpec(range(8), lengths=given)
    assert spec.counts["dataset_num_tokens"] == sum(LENGTHS)
    horizon = spec.horizon("2ep", loading=Loading(shuffle=False))
    assert horizon.lengths is not None
    assert horizon.lengths.of(6, 10) == [30, 5, 7, 1]
    assert horizon.dataset_num_tokens == sum(LENGTHS)


def test_a_memory_map_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    np.array(LENGTHS, dtype=np.int32).tofile(path)
    mapped = np.memmap(path, dtype=np.int32, mode="r")
    spec = DataSpec(range(8), lengths=mapped)
    assert spec.lengths.data_ptr() == mapped.ctypes.data


def test_lengths_follow_the_order_of_the_run() -> None:
    loading = Loading(seed=3)
    spec = DataSpec(range(8), lengths=LENGTHS)
    horizon, order = spec.horizon("1ep", loading=loading), spec.order(loading)
    assert horizon.lengths is not None
    assert horizon.lengths.of(0, 24) == [LENGTHS[order[at]] for at in range(24)]
    assert horizon.scaled(2).lengths is horizon.lengths


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ([1, 2], "shape"),
        ([[1] * 8], "shape"),
        ([1.0] * 8, "float32"),
        ([True] * 8, "bool"),
        ([1, 0, 1, 1, 1, 1, 1, 1], "sample 1 has 0"),
        ([1] * 7 + [-3], "sample 7 has -3"),
        (["a"] * 8, "no array"),
        ({1: 2}, "no array"),
    ],
)
def test_what_is_no_length_of_each_sample_is_refused(given: Any, word: str) -> None:
    with pytest.raises(DataError, match=word):
        DataSpec(range(8), lengths=given)


@pytest.mark.parametrize(
    "other", [{"num_tokens": 61}, {"tokens_per_sample": 4}, {"tokens_vary": True}], ids=str
)
def test_another_count_of_tokens_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="lengths has the tokens of each sample"):
        DataSpec(range(8), lengths=LENGTHS, **other)
    assert DataSpec(range(8), lengths=LENGTHS, num_tokens=60).num_tokens == 60


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_lengths_of_an_iterable_are_refused() -> None:
    with pytest.raises(DataError, match="no samples by index"):
        DataSpec(Stream(), lengths=[1])


def test_a_horizon_knows_what_lengths_say() -> None:
    ordered = OrderedLengths(checked_lengths(LENGTHS, 8), SampleOrder(8))
    horizon = Horizon("1ep", lengths=ordered)
    assert (horizon.dataset_num_samples, horizon.dataset_num_tokens) == (8, 60)
    facts = ("dataset_num_samples", "dataset_num_tokens", "tokens_per_sample")
    for wrong in [dict[str, Any]([(name, 7)]) for name in facts]:
        with pytest.raises(ConversionError, match="lengths has"):
            Horizon("1ep", lengths=ordered, **wrong)


class Texts(list[dict[str, Any]]):
    """Samples that note how often they are read."""

    reads = 0
    stops_at: int | None = None

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        if self.reads == self.stops_at:
            raise KeyboardInterrupt
        return super().__getitem__(index)


def texts(*lengths: int) -> Texts:
    return Texts({"input_ids": [7] * one} for one in lengths)


def test_lengths_are_counted_once(tmp_path: Path) -> None:
    data, path = texts(3, 1, 4), tmp_path / "new" / "lengths"
    state = torch.get_rng_state()
    assert count_lengths(data, path).tolist() == [3, 1, 4]
    assert torch.equal(torch.get_rng_state(), state)
    assert (path.stat().st_size, [*path.parent.iterdir()]) == (12, [path])
    path.touch()
    again = count_lengths(data, path)
    assert DataSpec(data, lengths=again).counts["dataset_num_tokens"] == 8


def test_masks_and_functions_count_too(tmp_path: Path) -> None:
    padded = [{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}]
    assert count_lengths(padded, tmp_path / "a").tolist() == [2]
    tensors = [{"input_ids": torch.ones(3), "attention_mask": torch.tensor([1, 1, 0])}]
    assert count_lengths(tensors, tmp_path / "b").tolist() == [2]
    assert count_lengths(
        ["x y", "z"], tmp_path / "c", length=lambda text: len(text.split())
    ).tolist() == [2, 1]


def test_interrupted_counting_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 2)
    data = texts(*range(1, 8))
    data.stops_at = 6
    with pytest.raises(KeyboardInterrupt):
        count_lengths(data, tmp_path / "lengths")
    part = tmp_path / "lengths.part"
    assert part.stat().st_size == 16
    part.write_bytes(part.read_bytes() + b"x")  # half of a number
    data.stops_at, data.reads = None, 0
    assert count_lengths(data, tmp_path / "lengths").tolist() == [*range(1, 8)]
    assert data.reads == 4 + 3  # four to compare


class Met(Texts):
    """Texts of which one is read only when another process has read some, too."""

    def __init__(self, barrier: Barrier, *lengths: int) -> None:
        super().__init__(texts(*lengths))
        self._barrier, self._has_met = barrier, False

    def __getitem__(self, index: Any) -> Any:
        if not self._has_met:
            self._has_met = True
            self._barrier.wait()
        return super().__getitem__(index)


@pytest.mark.parametrize("others", [(2, 7, 1, 8), (3, 1, 4, 1)], ids=["other data", "the same"])
@pytest.mark.parametrize("has_locks", [True, False], ids=["locks", "no locks"])
def test_of_many_that_count_at_once_each_gets_its_own(
    others: tuple[int, ...], has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays but one whole file; who finds that of other data is told."""
    if not has_locks:
        monkeypatch.setattr(module, "has_locked", lambda _: None)
    monkeypatch.setattr(module, "_CHUNK", 1)
    path, barrier, first = tmp_path / "lengths", Barrier(4, timeout=30), (3, 1, 4, 1)

    def count(number: int) -> list[int] | str:
        own = others if number % 2 else first
        try:
            return [*own, *count_lengths(Met(barrier, *own), path).tolist()]
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(count, range(4)))
    right = [[*one, *one] for one in (first, others)]
    assert all(one in right or "other data" in one for one in found)
    assert any(one in right for one in found)
    left = {one.name for one in tmp_path.iterdir()}
    assert left <= {"lengths", "lengths.part"}
    own = first if right[0] in found else others
    assert count_lengths(texts(*own), path).tolist() == [*own]
    assert "lengths.part" not in left or not has_locks


@pytest.mark.parametrize("kind", ["pipe", "folder", "link of the part", "device"])
def test_a_path_that_leads_elsewhere_is_refused(kind: str, tmp_path: Path) -> None:
    path, precious = tmp_path / "lengths", tmp_path / "precious"
    precious.write_bytes(b"abc")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        (tmp_path / "lengths.part").symlink_to(precious)
    with pytest.raises(DataError, match="keep lengths in"):
        count_lengths(texts(3, 1), path)
    assert precious.read_bytes() == b"abc"


@pytest.mark.parametrize("other", [(3, 1), (3, 1, 5), (3, 1, 4, 1)], ids=str)
def test_lengths_of_other_data_are_refused(tmp_path: Path, other: tuple[int, ...]) -> None:
    count_lengths(texts(3, 1, 4), tmp_path / "lengths")
    with pytest.raises(DataError, match="other data"):
        count_lengths(texts(*other), tmp_path / "lengths")


@pytest.mark.parametrize("length", [0, 1.5, True])
def test_what_is_no_length_is_not_kept(tmp_path: Path, length: Any) -> None:
    with pytest.raises(DataError, match="as the length of a sample"):
        count_lengths([1], tmp_path / "lengths", length=lambda _: length)
    assert not (tmp_path / "lengths").exists()


def test_progress_is_shown_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count_lengths(texts(1), tmp_path / "a")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    count_lengths(texts(1), tmp_path / "b")
    assert capsys.readouterr().err == "\rlengths: 100%\n"


@pytest.mark.parametrize("mask", [True, False])
def test_a_batch_above_its_budget_is_refused_before_training(mask: bool) -> None:
    """The lengths of another data set of the same size must not let memory run out."""

    def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return {"input_ids": ids} | ({"attention_mask": (ids > 0).long()} if mask else {})

    data = [torch.ones(400, dtype=torch.int64) for _ in range(8)]
    loader = StepLoader(
        DataSpec(data, lengths=[40] * 8),
        "160tok",
        max_duration="1ep",
        micro_batch_size="80tok",
        loading=Loading(collate_fn=collate),
    )
    with pytest.raises(DataError, match=r"budget of 80tok.* 2 samples has 800 tokens"):
        next(loader)


@pytest.mark.parametrize("sample", [{"text": "abc"}, 3])
def test_a_sample_that_does_not_tell_its_tokens_is_refused(sample: object, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pass length="):
        count_lengths([sample], tmp_path / "lengths")


@pytest.mark.parametrize(
    "sample",
    [([1, 2, 3], 0), {"input_ids": torch.ones(1, 3)}, torch.tensor(3), {"input_ids": ([1], [2])}],
    ids=["a pair", "a row", "a number", "a tuple"],
)
def test_samples_that_do_not_tell_their_tokens_are_refused(sample: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pass length="):
        count_lengths([sample], tmp_path / "lengths")


def test_packed_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="packed"):
        Loading(packed="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [iter([[1]]), DataLoader(TensorDataset(torch.ones(1))), {0: [1]}, (one for one in [[1]])],
    ids=["iterator", "loader", "mapping", "generator"],
)
def test_data_without_samples_by_index_are_refused(data: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="map-style data set"):
        count_lengths(data, tmp_path / "lengths")


def test_what_is_no_length_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"use 2\.5 as the length"):
        count_lengths([1], tmp_path / "lengths", length=lambda _: 2.5)  # type: ignore[return-value,arg-type]
