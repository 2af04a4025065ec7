"""Reading: whole tensors and parts of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.checkpoint import Shard, open_checkpoint, write_checkpoint
from stretto.checkpoint.sharding import Box, HostCopies
from stretto.checkpoint.writing import begin_checkpoint, finish_checkpoint, write_part
from stretto.errors import CheckpointError

Seal = Callable[[Path], None]
SECOND = "model-00001-of-00002.safetensors"


def write_cut(path: Path, whole: Tensor, dim: int, lengths: list[int]) -> None:
    begin_checkpoint(path)
    offset = 0
    for rank, length in enumerate(lengths):
        place = tuple(offset if one == dim else 0 for one in range(whole.dim()))
        shard = Shard(whole.narrow(dim, offset, length), tuple(whole.shape), place)
        staged = HostCopies().take({"model": {"weight": shard}})
        write_part(path, staged, rank=rank, world_size=len(lengths))
        offset += length
    finish_checkpoint(path, {}, world_size=len(lengths))


@given(data=st.data(), lengths=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_any_part_of_a_tensor_that_was_cut_is_that_part(
    data: st.DataObject, lengths: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    dim = data.draw(st.integers(0, 1), label="dim")
    shape = [2, 2]
    shape[dim] = sum(lengths)
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    path = tmp_path_factory.mktemp("cut") / "a"
    write_cut(path, whole, dim, lengths)
    reader = open_checkpoint(path)
    assert reader.entry("model", "weight").shape == tuple(shape)
    assert reader.entry("model", "weight").dtype == torch.int64
    assert torch.equal(reader.tensor("model", "weight"), whole)
    at = [data.draw(st.integers(0, size), label="offset") for size in shape]
    most = [size - start for size, start in zip(shape, at, strict=True)]
    length = [data.draw(st.integers(0, one), label="length") for one in most]
    box = Box(tuple(at), tuple(length))
    assert torch.equal(reader.part("model", "weight", box), whole[box.slices])


def test_what_was_read_has_memory_of_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", {"model": {"w": torch.ones(3), "s": torch.tensor(1)}}, {})
    reader = open_checkpoint(tmp_path / "a")
    for name in reader.names("model"):
        first = reader.tensor("model", name)
        first.zero_()
        assert bool(reader.tensor("model", name).all())


@pytest.mark.parametrize(
    ("group", "name", "part"),
    [
        ("model", "none", None),
        ("none", "weight", None),
        ("model", "weight", Box((3, 0), (2, 3))),
        ("model", "weight", Box((0, 0, 0), (1, 1, 1))),
        ("model", "weight", Box((-1, 0), (1, 3))),
        ("model", "weight", Box((2, 0), (-1, 3))),
        ("model", "count", Box((0,), (1,))),
    ],
)
def test_what_is_not_there_cannot_be_read(
    group: str, name: str, part: Box | None, sharded: Path
) -> None:
    reader = open_checkpoint(sharded)
    with pytest.raises(CheckpointError, match="read"):
        reader.tensor(group, name) if part is None else reader.part(group, name, part)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 99_000_000) + b"{}",
        struct.pack("<Q", 2) + b"[}",
        b"\x80\x02cos\nsystem\n.",
        struct.pack("<Q", 6) + b'{"a":1',
    ],
)
def test_files_that_hold_no_tensors_are_refused(content: bytes, sharded: Path, seal: Seal) -> None:
    (sharded / SECOND).write_bytes(content)
    seal(sharded)
    with pytest.raises(CheckpointError, match=SECOND) as caught:
        open_checkpoint(sharded)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text", ["[" * 1_000_000, "9" * 5_000_000, "{}", "[]", '{"records": {}}', "\x00", "nan"]
)
def test_texts_that_are_no_records_are_refused(text: str, sharded: Path, seal: Seal) -> None:
    (sharded / "state.json").write_text(text)
    seal(sharded)
    with pytest.raises(CheckpointError, match="state"):
        open_checkpoint(sharded)
