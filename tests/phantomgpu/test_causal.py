"""`phantomgpu model`: a configuration of transformers instead of a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import phantomgpu
from phantomgpu import Answer, Report
from phantomgpu.cli import app
from stretto.memory import phantom

pytest.importorskip("transformers")
from phantomgpu.causal import CausalModel

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


def ask(folder: Path, *options: str, **changes: Any) -> Result:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return CliRunner().invoke(app, ["model", str(folder), "--gpu", "l4", *options])


def test_a_row_for_each_length_checkpointing_and_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(train: Any, *, args: Any, kwargs: Any, ranks: int, **_: Any) -> Answer:
        model, length, shared = args
        assert shared == ranks
        built = model.build(**kwargs)
        assert next(built.parameters()).is_meta
        peak = length - built.is_activation_checkpointing
        report = Report(status="fits", gpu="l4", memory=0, context=0, peak_reserved=peak)
        return Answer(64, {64: report})

    monkeypatch.setattr("phantomgpu.searching.search", search)
    options = ("--sequence-length", "32,64", "--ranks", "1,8")
    said = ask(tmp_path, *options, "--json")
    assert said.exception is None, said.exception
    found = json.loads(said.output)
    assert "computed in bf16" in found["model"]
    rows = [(row["tokens"], row["checkpointing"], row["ranks"]) for row in found["rows"]]
    assert rows == [(n, again, m) for n in (32, 64) for again in (False, True) for m in (1, 8)]
    assert [row["peak_bytes"] for row in found["rows"]] == [32, 32, 31, 31, 64, 64, 63, 63]
    assert "64     512" in ask(tmp_path, *options).output


@pytest.mark.parametrize(
    ("options", "changes", "word"),
    [
        (("--sequence-length", "256"), {}, "max_position_embeddings"),
        (("--sequence-length", "many"), {}, "numbers"),
        (("--sequence-length", "32"), {"architectures": 3}, "config.json"),
    ],
)
def test_mistakes(
    tmp_path: Path, options: tuple[str, ...], changes: dict[str, Any], word: str
) -> None:
    assert word in str(ask(tmp_path, *options, **changes).exception)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_the_optimizer_has_the_weights_that_are_trained(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    causal = CausalModel(tmp_path, name)
    model = causal.build(checkpointing=False).to_empty(device="cpu")
    model.lm_head.requires_grad_(requires_grad=False)
    (group,) = causal.optimizer_of(model).param_groups
    assert len(group["params"]) == len(list(model.parameters())) - 1


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    changed = {**LLAMA, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(phantomgpu.PhantomError, match="BertForMaskedLM"):
        CausalModel(tmp_path).build(checkpointing=False)


def test_weights_are_of_the_type_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = CausalModel(tmp_path, weights=name).build(checkpointing=False)
        assert {one.dtype for one in model.parameters()} == {dtype}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_the_phantom_trains_the_model(ranks: str, tmp_path: Path) -> None:
    missing = phantom.setup_problem()
    if missing is not None:
        pytest.skip(missing)
    asked = ("--sequence-length", "32", "--checkpointing", "--ranks", ranks)
    said = ask(tmp_path, *asked, "--largest", "8", "--json")
    (row,) = json.loads(said.output)["rows"]
    assert row["micro_batch"] == 8
    wrong = ask(tmp_path, *asked, model_type="abacus")
    assert "abacus" in str(wrong.exception)
