"""torchtitan's rows: what is unpacked, what is changed, and what stands in for other ranks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from published import packages, titan, titan_program
from published.rows import SOURCE


def test_only_the_parts_of_a_commit_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone, out = tmp_path / "clone", tmp_path / "out"
    (clone / "train_configs").mkdir(parents=True)
    out.mkdir()
    (clone / "train_configs" / "llama3_8b.toml").write_text("enable_profiling = true\nlr = 1\n")
    (clone / "data.bin").write_text("left out")
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setenv(SOURCE, str(clone))
    monkeypatch.setitem(titan.COMMITS, "2024", "HEAD")
    monkeypatch.setitem(titan.PARTS, "2024", ("train_configs",))
    titan.unpack("2024", out)
    assert not (out / "data.bin").exists()
    text = titan.configuration("2024", "8b", out).read_text()
    assert text == "enable_profiling = false\nlr = 1\n"


def test_packages_come_first_only_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "there")
    with packages.first(tmp_path):
        assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "there"]
    assert os.environ["PYTHONPATH"] == "there"


def test_labels_are_the_ids_one_to_the_left() -> None:
    inputs, labels = next(iter(titan_program.Tokens(2, 8, named=False)))
    assert inputs.shape == labels.shape == (2, 8)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])


@pytest.mark.parametrize(
    ("index", "inputs", "outputs"),
    [
        (0, (2, 8192), (2, 1024, 64)),
        (1, (2, 1024, 64), (2, 1024, 64)),
        (3, (2, 1024, 64), (2, 8192, titan_program.VOCABULARY)),
    ],
)
def test_stages_are_told_their_shapes(
    index: int, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    given, made = {}, SimpleNamespace()

    def stage(*_: object, **options: Any) -> SimpleNamespace:
        given.update(options)
        return made

    pipeline = SimpleNamespace(PipelineStage=stage)
    training = SimpleNamespace(batch_size=8, seq_len=8192, tensor_parallel_degree=8)
    experimental = SimpleNamespace(
        pipeline_parallel_degree=4, pipeline_parallel_microbatches=None, context_parallel_degree=1
    )
    config = SimpleNamespace(training=training, experimental=experimental)
    titan_program.tell_shapes(pipeline, config)
    module = SimpleNamespace(layers={"0": SimpleNamespace(dim=64)})
    pipeline.PipelineStage(module, index, 4, "meta")
    assert tuple(given["input_args"][0].shape) == inputs
    assert tuple(given["output_args"][0].shape) == outputs
    assert made._warmup_forward_vote().item  # no stage is asked whether it knows them
