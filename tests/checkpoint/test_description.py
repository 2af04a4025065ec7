from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.checkpoint import describe, write_checkpoint
from stretto.errors import CheckpointError
from stretto.timing import Timestamp

CLOCK = Timestamp(
    epoch=1,
    batch=30,
    sample=150,
    token=1200,
    sample_in_epoch=50,
    run_nanoseconds=90 * 10**9,
)
RECORDS = {
    "loader": {"clock": CLOCK.to_state(), "order": {"num_samples": 100}},
    "setup": {"max_duration": "2ep"},
}


def write(path: Path, records: dict[str, Any]) -> None:
    weight = torch.ones(2, 3)
    model = {"weight": weight, "tied": weight, "count": torch.tensor(1)}
    state = {"0.exp_avg": torch.zeros(2, 3, dtype=torch.bfloat16)}
    write_checkpoint(path, {"model": model, "optimizer": state}, records)


def test_it_says_what_there_is_and_where_the_run_stands(tmp_path: Path) -> None:
    write(tmp_path / "a", RECORDS)
    found = describe(tmp_path / "a")
    assert found.is_whole
    assert found.format == 2
    assert found.position == {"ep": 1.5, "ba": 30, "sp": 150, "tok": 1200, "sec": 90, "dur": 0.75}
    model, optimizer = found.groups
    assert (model.name, model.num_tensors, model.num_bytes) == ("model", 2, 32)
    assert model.dtypes == {"float32": 1, "int64": 1}
    assert optimizer.dtypes == {"bfloat16": 1}
    assert found.num_parameters == 6
    assert json.loads(json.dumps(found.to_json()))["position"]["dur"] == 0.75
    text = str(found)
    assert text.startswith(f"{tmp_path / 'a'}: whole\n  format ")
    assert "1.5ep  30ba  150sp  1200tok  90sec  0.75dur" in text
    assert "2 tensors, 32 bytes (1 float32, 1 int64)" in text


def test_no_more_than_the_whole_run_has_passed(tmp_path: Path) -> None:
    """Also where the last batch goes beyond the end; counts are what they are."""
    write(tmp_path / "a", RECORDS | {"setup": {"max_duration": "1190tok"}})
    position = describe(tmp_path / "a").position
    assert (position["tok"], position["dur"]) == (1200, 1.0)


@pytest.mark.parametrize(
    "records",
    [
        {},
        {"loader": 3},
        {"loader": {"clock": {"sample": -1}}},
        {"loader": {"clock": CLOCK.to_state() | {"epoch": "one"}}},
        {"loader": {"clock": CLOCK.to_state() | {"sample": 2**2000}}, "setup": []},
        {"loader": {"clock": CLOCK.to_state(), "order": {"num_samples": -3}}, "setup": {}},
        {**RECORDS, "setup": {"max_duration": "never"}},
        {**RECORDS, "setup": {"max_duration": "30s"}},
    ],
)
def test_records_of_another_kind_are_no_obstacle(records: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "a", records)
    found = describe(tmp_path / "a")
    assert found.is_whole
    assert str(found)


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
    assert found.created == "1970-01-01T00:00:00Z"
    assert str(found).startswith(f"{sharded}: damaged: optimizer-00000")
    (sharded / "manifest.json").write_text("{}")
    found = describe(sharded)
    assert found.damage == "its manifest is not one of ours"
    assert found.files == {"manifest.json": 2}
    assert not found.to_json()["is_whole"]


def test_one_tensor_that_is_damaged_hides_nothing_else(sharded: Path) -> None:
    file = sharded / "model-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = describe(sharded)
    assert found.damage == f"{file.name} is not what was written"
    assert found.num_parameters == 12


def test_where_there_is_none_there_is_nothing_to_describe(sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint"):
        describe(tmp_path / "none")
    shutil.rmtree(sharded)
    with pytest.raises(CheckpointError, match="checkpoint"):
        describe(sharded)
