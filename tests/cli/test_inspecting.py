from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Stretto = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("project")


def test_says_what_a_checkpoint_is(stretto: Stretto) -> None:
    stretto("train", "run.yaml", "--folder", "a")
    said = stretto("inspect", "a/checkpoints/checkpoint-000000000040")
    assert said.code == 0
    for word in (": whole\n", " 1ep ", " 40sp ", "model ", "random "):
        assert word in said.out, said.out
    records = json.loads(stretto("inspect", "a", "--json").out)
    assert [record["position"]["sp"] for record in records] == [40, 80]
    both = stretto("inspect", "a")
    assert both.out.count("checkpoint-0000000000") == 2


def test_says_what_is_wrong_with_one(stretto: Stretto) -> None:
    stretto("train", "run.yaml", "--folder", "a", "max_duration=1ep")
    weights = Path("a/checkpoints/checkpoint-000000000040/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    said = stretto("inspect", "a/checkpoints/checkpoint-000000000040")
    assert said.code == 1
    assert "model.safetensors" in said.out


def test_one_without_a_manifest_is_told(stretto: Stretto) -> None:
    stretto("train", "run.yaml", "--folder", "a")
    Path("a/checkpoints/checkpoint-000000000040/manifest.json").unlink()
    Path("a/checkpoints/checkpoint-000000000060").touch()
    said = stretto("inspect", "a")
    assert said.code == 1
    assert "checkpoint-000000000040: damaged: manifest.json is missing" in said.out
    assert "checkpoint-000000000060: damaged: manifest.json is missing" in said.out
    assert "checkpoint-000000000080: whole" in said.out


def test_what_is_no_checkpoint_is_told(stretto: Stretto) -> None:
    said = stretto("inspect", "nothing")
    assert said.code == 2
    assert "no finished checkpoint is there" in said.err
    stretto("train", "run.yaml", "--folder", "a", "max_duration=1ep", "checkpoint=null")
    Path("a/checkpoints").mkdir()
    none = stretto("inspect", "a")
    assert none.code == 2
    assert "the run has no checkpoint" in none.err


def test_the_folder_in_which_one_is_can_be_inspected(
    stretto: Stretto, monkeypatch: pytest.MonkeyPatch
) -> None:
    stretto("train", "run.yaml", "--folder", "a", "max_duration=1ep")
    monkeypatch.chdir("a/checkpoints/checkpoint-000000000040")
    assert ": whole\n" in stretto("inspect", ".").out


@pytest.mark.filterwarnings("ignore")  # torch warns that there is one process
def test_weights_go_to_other_formats_and_back(stretto: Stretto) -> None:
    from safetensors.torch import load_file

    stretto("train", "run.yaml", "--folder", "a")
    newest = Path("a/checkpoints/checkpoint-000000000080/model.safetensors")
    assert stretto("export", "a", "hf", "--to", "hf").code == 0
    found, saved = load_file("hf/model.safetensors"), load_file(newest)
    assert found.keys() == saved.keys()
    assert all(bool((found[name] == saved[name]).all()) for name in saved)
    assert stretto("export", newest.parent, "dcp", "--to", "dcp").code == 0
    assert stretto("export", "a", "dcp", "--to", "dcp").code == 2
    assert stretto("export", "a", "new", "--to", "onnx").code == 2
    refused = stretto("train", "run.yaml", "--folder", "b", "--resume", "dcp")
    assert refused.code == 2
    assert "unpickle" in refused.err
    zero = ("optimizer.lr=0", "checkpoint.every=1ep")
    done = stretto("train", "run.yaml", "--folder", "b", "--resume", "dcp", "--unpickle", *zero)
    assert done.code == 0, done.err
    again = load_file("b/checkpoints/checkpoint-000000000080/model.safetensors")
    assert all(bool((again[name] == saved[name]).all()) for name in saved)
