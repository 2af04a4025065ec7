from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.checkpoint import open_checkpoint
from stretto.checkpoint.manifest import (
    DamagedError,
    Entry,
    Manifest,
    group_of,
    manifest_text,
    parse_json,
    read_manifest,
)
from stretto.errors import CheckpointError

DIGEST = "0" * 64
names = st.sampled_from(
    ["state.json", "model.safetensors", "a-00000-of-00002.safetensors", "B_2.safetensors"]
)
files = st.dictionaries(
    names,
    st.tuples(st.integers(0, 2**70), st.text("0123456789abcdef", min_size=64, max_size=64)),
)


def sealed(document: Any) -> str:
    """A manifest with a fitting seal, whatever it says."""
    text = json.dumps(document, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-2]},\n "digest": "{digest}"\n}}\n'


@given(files=files)
def test_what_is_written_is_read(
    files: dict[str, tuple[int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    files["state.json"] = (3, DIGEST)
    text = manifest_text(files, created="2026-01-01T00:00:00Z")
    (folder / "manifest.json").write_text(text)
    expected = {name: Entry(*entry) for name, entry in files.items()}
    assert read_manifest(folder) == Manifest(2, "2026-01-01T00:00:00Z", expected)


NAMES = [
    "../state.json",
    "/etc/passwd",
    "a/model.safetensors",
    "model.safetensors/",
    ".safetensors",
    "model.pkl",
    "model.pt",
    "model.safetensors\n",
    "mod\u00e9l.safetensors",
    "model-0-of-2.safetensors",
    "manifest.json",
    "",
    "..",
    "c:model.safetensors",
    "model\0.safetensors",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_no_checkpoint_has_is_refused(name: str, sharded: Path) -> None:
    assert group_of(name) is None
    document = json.loads((sharded / "manifest.json").read_text())
    del document["digest"]
    document["files"][name] = [0, hashlib.sha256(b"").hexdigest()]
    (sharded / "manifest.json").write_text(sealed(document))
    with pytest.raises(CheckpointError, match="checkpoint"):
        open_checkpoint(sharded)


ENTRIES: list[Any] = [
    [-1, DIGEST],
    [1.5, DIGEST],
    [float("nan"), DIGEST],
    [True, DIGEST],
    ["1", DIGEST],
    [1, DIGEST.upper() + "A"],
    [1, "A" * 64],
    [1, None],
    [1],
    [1, DIGEST, 1],
    {},
    None,
    "12",
]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_an_entry_of_the_wrong_type_is_refused(entry: Any, tmp_path: Path) -> None:
    document = {"format": 2, "created": "2026-01-01T00:00:00Z", "files": {"state.json": entry}}
    (tmp_path / "manifest.json").write_text(sealed(document))
    with pytest.raises(CheckpointError, match="state"):
        open_checkpoint(tmp_path)


def document(**changed: Any) -> dict[str, Any]:
    files = {"state.json": [2, DIGEST]}
    return {"format": 2, "created": "2026-01-01T00:00:00Z", "files": files} | changed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"format"',
        "{}",
        "\x00",
        "[" * 1_000_000,
        '{"format": 2, "format": 2}',
        '{"format": ' + "9" * 5000 + "}",
        json.dumps(document()),
        sealed(document()) + " ",
        sealed(document()).replace('"format"', '"\\u0066ormat"'),
        sealed(document(format=0)),
        sealed(document(format=True)),
        sealed(document(format=2.0)),
        sealed(document(format="2")),
        sealed(document(format=None)),
        sealed(document(files=[])),
        sealed(document(files={})),
        sealed(document(created=None)),
        sealed(document(created="now")),
        sealed(document(created="\x1b[2J26-01-01T00:00:00Z")),
        sealed(document(more=1)),
        json.dumps({"format": 1, "files": {"state.json": [2, DIGEST]}}),
        json.dumps({"format": 1, "files": {"state.json": [2, DIGEST]}, "created": "x"}, indent=1),
    ],
)
def test_what_is_no_manifest_of_ours_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="manifest") as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).removeprefix(f"cannot read {tmp_path}").isprintable()


def test_an_endless_manifest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room
    with pytest.raises(CheckpointError, match="manifest"):
        open_checkpoint(tmp_path)


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
anything = st.recursive(
    values | names,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | names, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(version=st.just(2) | anything, files=anything, created=anything)
def test_any_sealed_document_is_refused_or_fits(
    version: Any, files: Any, created: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    whole = document(format=version, files=files, created=created)
    (folder / "manifest.json").write_text(sealed(whole))
    with pytest.raises(CheckpointError):  # no file is there
        open_checkpoint(folder)


def test_a_newer_format_is_said_to_be_newer(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 3, "something": "else"}')
    with pytest.raises(CheckpointError, match="install"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', "[" * 100_000, "{'a': 1}", ""])
def test_texts_that_are_not_our_json_are_damage(text: str) -> None:
    with pytest.raises(DamagedError, match="JSON"):
        parse_json(text, "x")


def test_the_seal_is_of_what_stands_before_it() -> None:
    text = manifest_text({"state.json": (2, DIGEST)}, created="2026-01-01T00:00:00Z")
    assert text == sealed(document())
