from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.checkpoint import describe, open_checkpoint, write_checkpoint
from stretto.checkpoint.manifest import manifest_text
from stretto.errors import CheckpointError

RECORDS = {"position": {"ep": 1.5, "ba": 30, "sp": 150, "sec": 90.0, "dur": 0.75}}


def write(path: Path, records: dict[str, Any]) -> None:
    weight = torch.ones(2, 3)
    model = {"weight": weight, "tied": weight, "count": torch.tensor(1)}
    state = {"0.exp_avg": torch.zeros(2, 3, dtype=torch.bfloat16)}
    write_checkpoint(path, {"model": model, "optimizer": state}, records)


def test_it_says_what_there_is_and_where_the_run_stands(tmp_path: Path) -> None:
    write(tmp_path / "a", RECORDS)
    found = describe(tmp_path / "a")
    assert found.is_whole
    assert found.position == RECORDS["position"]
    model, optimizer = found.groups
    assert (model.name, model.num_tensors, model.num_bytes) == ("model", 2, 32)
    assert model.dtypes == {"float32": 1, "int64": 1}
    assert optimizer.dtypes == {"bfloat16": 1}
    assert model.num_elements == 7
    assert json.loads(json.dumps(found.to_json()))["position"]["dur"] == 0.75
    text = str(found)
    assert text.startswith(f"{tmp_path / 'a'}: whole\n  written ")
    assert "1.5ep  30ba  150sp  90sec  0.75dur" in text
    assert "2 tensors, 32 bytes (1 " in text


def test_what_is_wrong_is_said_and_what_is_known(sharded: Path) -> None:
    content = bytearray((sharded / "state.json").read_bytes())
    content[-3] = ord(" ")
    (sharded / "state.json").write_bytes(content)
    (sharded / "optimizer-00000-of-00002.safetensors").unlink()
    found = describe(sharded)
    assert not found.is_whole
    assert found.damage == (
        "optimizer-00000-of-00002.safetensors is missing; state.json is not what was written"
    )
    assert found.files["state.json"] == len(content)
    assert str(found).startswith(f"{sharded}: damaged: optimizer-00000")
    (sharded / "manifest.json").write_text("{}")
    found = describe(sharded)
    assert found.damage is not None
    assert not found.to_json()["is_whole"]


@pytest.mark.parametrize(
    "document",
    [
        *({"records": {"position": one}} for one in ([1], None, {"ep": "a"}, {"ep": 10**400})),
        *({"records": {"position": one}} for one in ({"ep": None}, {"\x1b[31m": 1})),
        *({"records": one} for one in ([1], None)),
        *({"aliases": one} for one in ([1], {"model": ["weight"]}, {"model": {"a": "b"}})),
        {"created": "\x1b[31m"},
    ],
    ids=str,
)
def test_forged_records_are_damage(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, RECORDS)
    whole = json.loads((path / "state.json").read_bytes())
    content = json.dumps(whole | document).encode()
    (path / "state.json").write_bytes(content)
    files = json.loads((path / "manifest.json").read_bytes())["files"]
    files["state.json"] = (len(content), hashlib.sha256(content).hexdigest())
    (path / "manifest.json").write_text(manifest_text(files))
    found = describe(path)
    assert str(found).startswith(f"{path}: damaged: state.json is not what was written")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        open_checkpoint(path)


def test_where_there_is_none_there_is_nothing_to_describe(sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint"):
        describe(tmp_path / "none")
    shutil.rmtree(sharded)
    with pytest.raises(CheckpointError, match="checkpoint"):
        describe(sharded)
