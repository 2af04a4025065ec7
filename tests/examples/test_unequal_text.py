"""The example of texts of unequal length: as a loop of its own, and as a run file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from examples import unequal_text

from stretto.cli import main

ROOT = Path(__file__).parents[2]


def ran(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code


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


def test_the_run_file_is_planned_as_the_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    ran("plan", "examples/unequal_text.yaml")
    planned = capsys.readouterr().out
    assert f" batches, {len(unequal_text.make_data().dataset):,} samples on 1 rank" in planned
    assert "16Ktok" in planned
    assert "micro-batches of at most 1" in planned


def test_a_run_is_as_its_folder_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    short = ["max_duration=3ba", "micro_batch_size=auto", "device=cpu"]
    ran("train", "examples/unequal_text.yaml", *short, "--folder", str(tmp_path / "a"))
    assert "micro_batch_size auto: " in capsys.readouterr().out
    ran("plan", "--against", str(tmp_path / "a"))
    assert "all 3 batches as planned" in capsys.readouterr().out
    ran("report", str(tmp_path / "a"))
    assert "batch tokens" in capsys.readouterr().out
