"""`find-batch-size --model`: a configuration of transformers instead of a run file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.memory import Answer, phantom
from stretto.memory.answer import Cost
from stretto.memory.limits import MemoryLimit
from stretto.memory.step import WholeStep

Stretto = Callable[..., Any]

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


@pytest.fixture
def ask(tmp_path: Path, stretto: Stretto, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Ask without the phantom: the step is built, and the answer is the largest size."""
    pytest.importorskip("transformers")

    def answer(step: Any, batch: Any, *, maximum: int, **_: Any) -> Answer:
        whole = WholeStep.of(step)
        assert whole.device.type == "meta"
        peak = batch.numel() - whole.model.is_activation_checkpointing
        return Answer(
            maximum, "phantom", None, MemoryLimit(1, ""), 0, Cost(), peaks={maximum: peak}
        )

    monkeypatch.setattr("stretto.cli.finding.find_batch_size", answer)

    def ask(*options: str, **changes: Any) -> Any:
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**LLAMA, **changes}))
        fixed = ("--gpu", "l4", "--maximum", "64")
        return stretto("find-batch-size", "--model", str(file), *fixed, *options)

    return ask


def test_a_row_for_each_length_and_for_checkpointing(ask: Callable[..., Any]) -> None:
    said = ask("--sequence-length", "32,64", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert "computed in bf16" in found["model"]
    rows = [(row["tokens"], row["checkpointing"], row["size"]) for row in found["rows"]]
    assert rows == [(32, "off", 64), (32, "on", 64), (64, "off", 64), (64, "on", 64)]
    peaks = [row["peak_bytes"] for row in found["rows"]]
    assert peaks[1] < peaks[0] < peaks[2]


@pytest.mark.parametrize(
    ("options", "changes", "word"),
    [
        ((), {}, "--sequence-length"),
        (("--sequence-length", "256"), {}, "max_position_embeddings"),
        (("--sequence-length", "many"), {}, "numbers"),
        (("--sequence-length", "32"), {"model_type": "abacus"}, "abacus"),
        (("--sequence-length", "32"), {"architectures": ["BertForMaskedLM"]}, "architectures"),
        (("--sequence-length", "32", "--optimizer", "adam"), {}, "adamw"),
        (("--sequence-length", "32", "--weights", "int4"), {}, "fp32"),
        (("--micro-batch-size", "4"), {}, "--micro-batch-size"),
    ],
)
def test_mistakes(
    ask: Callable[..., Any], options: tuple[str, ...], changes: dict[str, Any], word: str
) -> None:
    said = ask(*options, **changes)
    assert (said.code, said.out) == (2, "")
    assert word in said.err


@pytest.mark.slow
def test_the_phantom_builds_the_model(stretto: Stretto, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    missing = phantom.missing()
    if missing is not None:
        pytest.skip(missing)
    file = tmp_path / "config.json"
    asked = ("--model", str(file), "--sequence-length", "32", "--checkpointing", "--gpu", "l4")
    file.write_text(json.dumps(LLAMA))
    said = stretto("find-batch-size", *asked, "--maximum", "8", "--json")
    assert said.code == 0, said.err
    (row,) = json.loads(said.out)["rows"]
    assert (row["size"], row["certainty"]) == (8, "phantom")
    file.write_text(json.dumps({**LLAMA, "model_type": "abacus"}))
    said = stretto("find-batch-size", *asked)
    assert (said.code, said.out) == (2, "")
    assert "use the model of" in said.err


def test_a_file_that_is_not_there(stretto: Stretto, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    asked = ("--model", str(tmp_path / "none.json"), "--sequence-length", "32", "--gpu", "l4")
    said = stretto("find-batch-size", *asked)
    assert said.code == 2
    assert "none.json" in said.err


def test_options_of_a_model_without_one(stretto: Stretto) -> None:
    said = stretto("find-batch-size", "--lora", "8")
    assert said.code == 2
    assert "--model" in said.err
