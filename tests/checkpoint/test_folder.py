from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stretto.checkpoint import (
    checkpoint_path,
    checkpoints,
    keep_newest,
    read_checkpoint,
    write_checkpoint,
)
from stretto.errors import CheckpointError

TENSORS = {
    "model": {
        "weight": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
    },
    "optimizer": {},
}
RECORDS = {"clock": {"sample": 2**60 + 1}, "loss": 0.1, "none": None, "nested": [1, [2]]}


def test_what_is_written_is_read_to_the_last_bit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", TENSORS, RECORDS)
    tensors, records = read_checkpoint(tmp_path / "a")
    assert records == RECORDS
    assert tensors["optimizer"] == {}
    for name, tensor in TENSORS["model"].items():
        assert tensors["model"][name].dtype == tensor.dtype
        assert torch.equal(tensors["model"][name], tensor)


def test_tied_tensors_are_stored_once_and_come_back_under_both_names(tmp_path: Path) -> None:
    shared = torch.randn(100, 10)
    write_checkpoint(tmp_path / "a", {"model": {"head": shared, "embedding": shared}}, {})
    assert (tmp_path / "a" / "model.safetensors").stat().st_size < 2 * shared.nbytes
    tensors = read_checkpoint(tmp_path / "a").tensors["model"]
    assert torch.equal(tensors["head"], shared)
    assert torch.equal(tensors["embedding"], shared)


def test_views_and_transposed_tensors_keep_their_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    named = {"base": base, "transposed": base.t(), "row": base[1], "every_other": base[:, ::2]}
    write_checkpoint(tmp_path / "a", {"model": named}, {})
    tensors = read_checkpoint(tmp_path / "a").tensors["model"]
    for name, tensor in named.items():
        assert torch.equal(tensors[name], tensor)


def test_nothing_unfinished_is_listed(tmp_path: Path) -> None:
    write_checkpoint(checkpoint_path(tmp_path, 20), TENSORS, RECORDS)
    write_checkpoint(checkpoint_path(tmp_path, 100), TENSORS, RECORDS)
    (tmp_path / "checkpoint-000000000200.tmp").mkdir()
    (tmp_path / "checkpoint-000000000300").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == [
        "checkpoint-000000000020",
        "checkpoint-000000000100",
    ]
    assert checkpoints(tmp_path / "nowhere") == []


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for sample in range(5):
        write_checkpoint(checkpoint_path(tmp_path, sample), {}, {})
    keep_newest(tmp_path, 2)
    assert [int(path.name[-12:]) for path in checkpoints(tmp_path)] == [3, 4]


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove", "link"])
def test_every_damage_is_recognised(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / "a"
    write_checkpoint(path, TENSORS, RECORDS)
    file = path / name
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "grow":
        file.write_bytes(bytes(content) + b" ")
    elif damage == "remove":
        file.unlink()
    else:
        other = tmp_path / "other"
        file.rename(other)
        file.symlink_to(other)
    with pytest.raises(CheckpointError, match=r"cannot read .*; resume from another checkpoint"):
        read_checkpoint(path)


@pytest.mark.parametrize("manifest", ["", "[]", "{}", "null", '{"format": 1, "files": []}', "{"])
def test_a_manifest_that_is_not_ours_is_refused(tmp_path: Path, manifest: str) -> None:
    path = tmp_path / "a"
    write_checkpoint(path, TENSORS, RECORDS)
    (path / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="manifest"):
        read_checkpoint(path)


def test_a_newer_format_is_said_to_be_newer(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_checkpoint(path, TENSORS, RECORDS)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="install a newer stretto"):
        read_checkpoint(path)


def test_a_manifest_cannot_point_outside(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_checkpoint(path, TENSORS, RECORDS)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../outside"] = [0, ""]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="outside', which is not a file of a checkpoint"):
        read_checkpoint(path)


def test_what_was_there_before_survives_a_write_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_checkpoint(path, TENSORS, RECORDS)
    with pytest.raises((CheckpointError, TypeError)):
        write_checkpoint(path, TENSORS, {"not JSON": object()})
    assert read_checkpoint(path).records == RECORDS


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="make room or choose another folder"):
        write_checkpoint(tmp_path / "file" / "a", TENSORS, RECORDS)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
