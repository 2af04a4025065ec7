"""The main path as a stranger takes it: train from a run file, then hold the run against its plan.

The comparison is made here, and not by the code that trains: between the batches of a plan, and the
ledger that `stretto train` leaves.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.cli.planning import read_arguments
from stretto.config import build_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = """
model: {target: "stretto.examples.tiny_gpt:TinyGPT", layers: 1, width: 16, heads: 1, context: 64}
data: {target: "stretto.examples.text:PythonDocs", sequence_length: 64, %s}
loss: {target: "stretto.examples.text:next_byte_loss"}
optimizer: {target: "torch.optim:AdamW", lr: 1.0e-3, weight_decay: 0.01}
"""
STATED = "num_samples: 5120, tokens_per_sample: 64"

RUNS = {
    "mixed units": """
max_duration: 5000sp
batch_size: {LinearRamp: {start: 16, end: 160, over: 120_000tok}}
schedules:
  lr: [{Cosine: {end: 0.1, warmup: 10ba}}, {StepDecay: {every: 1000sp, gamma: 0.9}}]
  weight_decay: {Linear: {start: 1.0, end: 0.0, over: 0.1ep}}
evaluate: {every: 160_000tok}
log: {every: 7ba, flush: 1s}
""",
    "carry": """
max_duration: 2.5ep
last_batch: carry
batch_size: "0ep:96 70%:211"
micro_batch_size: 64
rule: {sqrt: 96}
schedules:
  lr:
    Periods: [[20ba, {Linear: {start: 0.1}}], [rest, {WSD: {decay: 30%}}]]
log: {every: 10%}
""",
    "two ranks": """
max_duration: 60ba
batch_size: {StagedRamp: {sizes: [9, 15, 33], over: 30ba}}
micro_batch_size: 6
schedules: {lr: {Linear: {start: 1.0, end: 0.0}}}
checkpoint: {every: 20ba, keep: 1}
log: {every: 5ba}
""",
}


def command_line(*arguments: str, ranks: int = 1) -> str:
    """Run one command as a user does, and return what it prints."""
    command = [sys.executable, "-m", "stretto"]
    if ranks > 1:
        launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        command = [sys.executable, "-m", *launcher, "-m", "stretto"]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    # torch 2.13 with gloo sometimes aborts while the interpreter exits: the files tell.
    assert done.returncode == 0 or ranks > 1, done.stderr[-3000:]
    return done.stdout


def compare(run_file: list[str], folder: Path, *, ranks: int = 1) -> list[dict[str, Any]]:
    """Hold every line of the ledger against the plan that was made of the run file."""
    planned_as = [*run_file, f"world_size={ranks}"] if ranks > 1 else run_file
    planned: list[dict[str, Any]] = [
        {
            **batch.timestamp.to_state(),
            "size": batch.size,
            "micro_batches": batch.accumulation,
            **batch.values,
        }
        for batch in build_plan(read_arguments(planned_as)).batches()
    ]
    with (folder / "ledger.csv").open() as file:
        done = list(csv.DictReader(file))
    assert len(done) == len(planned) > 0
    for batch, row in zip(planned, done, strict=True):
        expected = batch | {"tokens": batch["size"] * 64}
        assert int(row.pop("decided_size")) >= int(row["size"])  # an end may cut a batch
        assert float(row.pop("sec")) >= 0
        for name, value in row.items():
            assert float(value) == float(expected[name]), (name, row, batch)
    assert "as planned" in command_line("plan", *planned_as, "--against", str(folder))
    return planned


def test_the_packaged_default_follows_its_plan_and_learns(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shorter = ["scale_schedule=0.1"]
    said = command_line("train", *shorter, "--folder", str(folder))
    planned = compare(shorter, folder)
    assert {8, 16, 32, 64} <= {batch["size"] for batch in planned}
    assert sum(batch["size"] for batch in planned) == 2048

    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in metrics if "validation/loss" in line]
    assert [line["dur"] for line in evaluations] == pytest.approx(
        [i / 10 for i in range(1, 11)], abs=0.04
    )
    last = evaluations[-1]
    assert last["validation/loss"] < last["validation/unigram_entropy"] - 0.1
    assert "unigram_entropy" in said
    assert f"{last['validation/loss']:.2f}" in said


@pytest.mark.parametrize("name", RUNS)
def test_other_runs_follow_their_plans(name: str, tmp_path: Path) -> None:
    ranks = 2 if name == "two ranks" else 1
    file, folder = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(MODEL % STATED + RUNS[name])
    command_line("train", str(file), "--folder", str(folder), ranks=ranks)
    planned = compare([str(file)], folder, ranks=ranks)
    assert len({batch["size"] for batch in planned}) > 2 - (name == "carry")


def test_digits_are_learnt(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    import stretto.examples

    file = Path(stretto.examples.__file__).with_name("digits.yaml")
    folder = tmp_path / "run"
    command_line("train", str(file), "max_duration=6ep", "--folder", str(folder))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["validation/accuracy"] for line in metrics if "validation/accuracy" in line]
    assert accuracies[-1] > 0.9
