from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.checkpoint import open_checkpoint
from stretto.checkpoint.manifest import Entry, group_of, manifest_text, read_manifest
from stretto.errors import CheckpointError

DIGEST = "0" * 64
names = st.sampled_from(
    ["state.json", "model.safetensors", "a-00000-of-00002.safetensors", "B_2.safetensors"]
)
files = st.dictionaries(
    names,
    st.tuples(st.integers(0, 2**70), st.text("0123456789abcdef", min_size=64, max_size=64)),
)


@given(files=files)
def test_what_is_written_is_read(
    files: dict[str, tuple[int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    files["state.json"] = (3, DIGEST)
    (folder / "manifest.json").write_text(manifest_text(files))
    assert read_manifest(folder) == {name: Entry(*entry) for name, entry in files.items()}


@pytest.mark.parametrize(
    "name",
    ["../state.json", "/etc/passwd", "a/model.safetensors", "model.pkl", "manifest.json", ""],
)
def test_a_file_that_no_checkpoint_has_is_refused(name: str, sharded: Path) -> None:
    assert group_of(name) is None
    files = read_manifest(sharded) | {name: Entry(0, DIGEST)}
    (sharded / "manifest.json").write_text(manifest_text(files))
    with pytest.raises(CheckpointError, match="manifest"):
        open_checkpoint(sharded)


def document(**changed: Any) -> dict[str, Any]:
    return {"format": 3, "files": {"state.json": [2, DIGEST]}} | changed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        "\x00",
        "[" * 1_000_000,
        '{"format": ' + "9" * 5000 + "}",
        json.dumps(document()),
        json.dumps(document(), indent=1) + "\n ",
        json.dumps(document(), indent=1).replace('"format"', '"\\u0066ormat"') + "\n",
        json.dumps(document(format=0), indent=1) + "\n",
        json.dumps(document(format=None), indent=1) + "\n",
        json.dumps(document(files=[]), indent=1) + "\n",
        json.dumps(document(files={}), indent=1) + "\n",
        json.dumps(document(files={"state.json": 3}), indent=1) + "\n",
        json.dumps(document(more=1), indent=1) + "\n",
    ],
)
def test_what_is_no_manifest_of_ours_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="manifest") as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).removeprefix(f"cannot read {tmp_path}").isprintable()


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)


@pytest.mark.parametrize(("version", "instead"), [(2, "the older"), (4, "a newer")])
def test_another_format_is_refused_by_name(version: int, instead: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(f'{{"format": {version}, "something": "else"}}')
    with pytest.raises(CheckpointError, match=f"format {version}.*install {instead} stretto"):
        open_checkpoint(tmp_path)
