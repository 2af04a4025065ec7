"""Reading: whole tensors and parts of them, and checkpoints that mean harm.

The manifests of the latter fit: whoever made them knows how.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.checkpoint import (
    HostCopies,
    Shard,
    begin_checkpoint,
    finish_checkpoint,
    open_checkpoint,
    read_checkpoint,
    write_checkpoint,
    write_part,
)
from stretto.checkpoint.manifest import manifest_text
from stretto.errors import CheckpointError

Seal = Callable[[Path], None]
FIRST, SECOND = "model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"


def write_cut(path: Path, whole: Tensor, dim: int, lengths: list[int]) -> None:
    begin_checkpoint(path)
    offset = 0
    for rank, length in enumerate(lengths):
        shard = Shard(whole.narrow(dim, offset, length), tuple(whole.shape), dim, offset)
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
    assert reader.shape("model", "weight") == tuple(shape)
    assert reader.entries("model")[0].dtype == torch.int64
    assert torch.equal(reader.tensor("model", "weight"), whole)
    along = data.draw(st.integers(0, 1), label="along")
    offset = data.draw(st.integers(0, shape[along]), label="offset")
    length = data.draw(st.integers(0, shape[along] - offset), label="length")
    part = reader.part("model", "weight", along, offset, length)
    assert torch.equal(part, whole.narrow(along, offset, length))


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
        ("model", "weight", (0, 3, 2)),
        ("model", "weight", (2, 0, 1)),
        ("model", "weight", (0, -1, 1)),
        ("model", "weight", (0, 2, -1)),
        ("model", "count", (0, 0, 1)),
    ],
)
def test_what_is_not_there_cannot_be_read(
    group: str, name: str, part: tuple[int, int, int] | None, sharded: Path
) -> None:
    reader = open_checkpoint(sharded)
    with pytest.raises(CheckpointError, match="read"):
        reader.tensor(group, name) if part is None else reader.part(group, name, *part)


def refused(path: Path) -> str:
    """How a checkpoint that means harm is refused, both ways, in little memory."""
    told = []
    for verify in (True, False):
        tracemalloc.start()
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path, verify=verify)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
        tracemalloc.stop()
        told.append(str(caught.value))
        assert told[-1].isprintable()
        assert len(told[-1]) < 1000
    return told[0]


@pytest.mark.parametrize("name", [FIRST, "state.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_only_plain_files_are_opened(name: str, kind: str, sharded: Path) -> None:
    file = sharded / name
    other = sharded.parent / "other"
    file.rename(other)
    if kind == "link":
        file.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        try:
            os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero never ends
        except PermissionError:
            pytest.skip("only the superuser makes devices")
    assert f"{name} is not a plain file" in refused(sharded)


HEADERS: dict[str, Any] = {
    "unknown type": {"weight": {"dtype": "PICKLE", "shape": [2, 3], "data_offsets": [0, 24]}},
    "another type": {"weight": {"dtype": "F64", "shape": [2, 3], "data_offsets": [0, 48]}},
    "out of range": {"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 48]}},
    "backwards": {"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 0]}},
    "negative": {"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [-24, 0]}},
    "too large": {"weight": {"dtype": "F32", "shape": [2**40, 3], "data_offsets": [0, 24]}},
    "overflows": {"weight": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 24]}},
    "empty but huge": {"weight": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}},
    "other shape": {"weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}},
    "one dimension": {"weight": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}},
    "overlap": {
        "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "other": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    },
    "twice": {
        "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "count": {"dtype": "F32", "shape": [0], "data_offsets": [24, 24]},
    },
    "of other things": {"weight": 3},
    "a list": [1, 2],
    "deep": json.loads("[" * 500 + "]" * 500),
    "no tensor": {},
    "with an escape": {"\x1b[2J\n": {"dtype": "F32", "shape": [9], "data_offsets": [0, 24]}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_tensor_files_that_lie_are_refused(
    name: str, sharded: Path, seal: Seal, tensor_file: Any
) -> None:
    data = b"" if name in ("no tensor", "empty but huge") else bytes(48 if "type" in name else 24)
    (sharded / SECOND).write_bytes(tensor_file(HEADERS[name], data))
    seal(sharded)
    refused(sharded)


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
    assert f"{SECOND} is not a file of tensors" in refused(sharded)


PIECES = [[FIRST, 0], [SECOND, 2]]
STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda state: [state],
    "no records": lambda state: state.pop("records") and state,
    "records of a list": lambda state: state | {"records": [1]},
    "no aliases": lambda state: state.pop("aliases") and state,
    "no shards": lambda state: state.pop("shards") and state,
    "shards of a number": lambda state: state | {"shards": 3},
    "no group": lambda state: state | {"aliases": {}},
    "a group without a file": lambda state: state | {"aliases": state["aliases"] | {"more": {}}},
    "a group outside": lambda state: state | {"aliases": state["aliases"] | {"../model": {}}},
}
ALIASES: dict[str, Any] = {
    "of a list": [],
    "to nothing": {"tied": "none"},
    "to itself": {"tied": "tied"},
    "in a cycle": {"tied": "other", "other": "tied"},
    "of an alias": {"tied": "weight", "other": "tied"},
    "over a tensor": {"weight": "count"},
    "to a number": {"tied": 3},
    "to a list": {"tied": ["weight"]},
}
SHARDS: dict[str, Any] = {
    "a number": 3,
    "no pieces": {"shape": [4, 3], "dim": 0, "pieces": []},
    "no shape": {"dim": 0, "pieces": PIECES},
    "a hole": {"shape": [5, 3], "dim": 0, "pieces": [[FIRST, 0], [SECOND, 3]]},
    "an overlap": {"shape": [3, 3], "dim": 0, "pieces": [[FIRST, 0], [SECOND, 1]]},
    "a missing part": {"shape": [4, 3], "dim": 0, "pieces": PIECES[:1]},
    "a part twice": {"shape": [4, 3], "dim": 0, "pieces": [[FIRST, 0], [FIRST, 2]]},
    "out of order": {"shape": [4, 3], "dim": 0, "pieces": PIECES[::-1]},
    "another dimension": {"shape": [4, 3], "dim": 1, "pieces": PIECES},
    "no such dimension": {"shape": [4, 3], "dim": 2, "pieces": PIECES},
    "a negative dimension": {"shape": [4, 3], "dim": -2, "pieces": PIECES},
    "a true dimension": {"shape": [4, 3], "dim": False, "pieces": PIECES},
    "another shape": {"shape": [4, 2], "dim": 0, "pieces": PIECES},
    "more dimensions": {"shape": [4, 3, 1], "dim": 0, "pieces": PIECES},
    "an absurd shape": {"shape": [2**60, 3], "dim": 0, "pieces": PIECES},
    "an endless shape": {"shape": [10**400, 3], "dim": 0, "pieces": PIECES},
    "a shape of fractions": {"shape": [4.0, 3], "dim": 0, "pieces": PIECES},
    "a shape of nan": {"shape": [float("nan"), 3], "dim": 0, "pieces": PIECES},
    "a file outside": {"shape": [4, 3], "dim": 0, "pieces": [[FIRST, 0], ["../../x", 2]]},
    "a file of none": {"shape": [4, 3], "dim": 0, "pieces": [[FIRST, 0], [None, 2]]},
    "an offset of text": {"shape": [4, 3], "dim": 0, "pieces": [[FIRST, 0], [SECOND, "2"]]},
    "an infinite offset": {"shape": [4, 3], "dim": 0, "pieces": [[FIRST, 0], [SECOND, 1e999]]},
    "a part of three": {"shape": [4, 3], "dim": 0, "pieces": [[FIRST, 0, 0], [SECOND, 2]]},
}


def rewrite(path: Path, seal: Seal, change: Callable[[dict[str, Any]], Any]) -> None:
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(change(state)))
    seal(path)


@pytest.mark.parametrize("name", STATES)
def test_states_that_lie_are_refused(name: str, sharded: Path, seal: Seal) -> None:
    rewrite(sharded, seal, STATES[name])
    refused(sharded)


@pytest.mark.parametrize("name", ALIASES)
def test_names_that_lie_are_refused(name: str, sharded: Path, seal: Seal) -> None:
    rewrite(sharded, seal, lambda state: state | {"aliases": {"model": ALIASES[name]}})
    refused(sharded)


@pytest.mark.parametrize("name", SHARDS)
def test_cuts_that_lie_are_refused(name: str, sharded: Path, seal: Seal) -> None:
    def change(state: dict[str, Any]) -> Any:
        state["shards"]["model"]["weight"] = SHARDS[name]
        return state

    rewrite(sharded, seal, change)
    refused(sharded)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1_000_000,
        '{"a":' * 1_000_000,
        '{"records": {}, "records": {}}',
        "9" * 5_000_000,
        '{"records": ' + "9" * 5000 + "}",
        "\ufeff{}",
        '"\\ud800"',
        "\x00",
        "nan",
    ],
    ids=["deep", "deep in keys", "twice", "long", "long within", "mark", "half", "nul", "nan"],
)
def test_texts_that_are_no_records_are_refused(text: str, sharded: Path, seal: Seal) -> None:
    (sharded / "state.json").write_text(text)
    seal(sharded)
    refused(sharded)


def test_a_state_that_is_much_too_long_is_not_parsed(sharded: Path, seal: Seal) -> None:
    with (sharded / "state.json").open("wb") as file:
        file.truncate((128 << 20) + 1)  # a hole: it takes no room
    manifest = json.loads((sharded / "manifest.json").read_text())
    files = {name: tuple(entry) for name, entry in manifest["files"].items()}
    files["state.json"] = ((128 << 20) + 1, "0" * 64)
    (sharded / "manifest.json").write_text(manifest_text(files, created=manifest["created"]))
    with pytest.raises(CheckpointError, match="longer"):
        open_checkpoint(sharded, verify=False)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("weight"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["model", "weight", "tied", "shape", "dim", "pieces", "records", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(aliases=json_values, shards=json_values, records=json_values)
def test_any_state_is_read_or_refused(
    aliases: Any, shards: Any, records: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "a"
    write_checkpoint(path, {"model": {"weight": torch.ones(2)}}, {})
    state = {"aliases": aliases, "shards": shards, "records": records}
    (path / "state.json").write_text(json.dumps(state))
    files = {}
    for name in ("model.safetensors", "state.json"):
        content = (path / name).read_bytes()
        files[name] = (len(content), hashlib.sha256(content).hexdigest())
    (path / "manifest.json").write_text(manifest_text(files, created="2026-01-01T00:00:00Z"))
    try:
        found = read_checkpoint(path)
    except CheckpointError as error:
        told = str(error)
    else:
        told = ""
        assert repr(found.records) == repr(records)  # nan is not equal to itself
        assert torch.equal(found.tensors["model"]["weight"], torch.ones(2))
    assert told.isprintable()
