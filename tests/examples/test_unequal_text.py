"""The example of texts of unequal length: as a loop of its own, and as a run file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from examples import unequal_text
from typer.testing import CliRunner

from stretto.cli.app import app

ROOT = Path(__file__).parents[2]


def test_targets_are_the_bytes_of_the_answer() -> None:
    sample = unequal_text.encode("if: ", "Tests.")
    assert bytes(sample["input_ids"].tolist()) == b"if: Tests."
    is_target = sample["labels"] != unequal_text.IGNORED
    assert bytes(sample["labels"][is_target].tolist()) == b"Tests.\n"
    batch = unequal_text.collate([sample, unequal_text.encode("if: ", "T")])
    assert int((batch["labels"] != unequal_text.IGNORED).sum()) == 7 + 2
    assert batch["input_ids"].shape == (2, 10)


def test_the_lengths_are_those_of_the_samples() -> None:
    spec = unequal_text.make_data()
    assert spec.lengths.tolist() == [len(one["input_ids"]) for one in spec.dataset]
    assert 0 < int(spec.lengths.min()) < int(spec.lengths.max()) == unequal_text.LONGEST


def test_the_loop_learns_and_pads_little(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    unequal_text.main()
    said = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", said)]
    assert losses[-1] < losses[0] < 5.55  # the logarithm of 256
    assert float(said.split()[-1]) <= 1.12


def test_the_run_file_is_planned_as_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = CliRunner().invoke(app, ["plan", "examples/unequal_text.yaml"])
    assert found.exit_code == 0, found.output
    assert "batches" in found.output
    assert "16Ktok" in found.output
    assert "micro-batches of at most" in found.output
