"""`stretto critical-batch-size`: branches off a checkpoint, compared."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Stretto

SIZES = ("--sizes", "2,4,8", "--over", "32sp", "--seeds", "2")


@pytest.fixture
def trained(stretto: Stretto, project: Path) -> Path:
    """The folder of a run that is over."""
    said = stretto("train", "run.yaml", "--folder", "runs/a")
    assert said.code == 0, said.err
    return project / "runs" / "a"


def test_it_measures_prints_and_draws(stretto: Stretto, trained: Path) -> None:
    said = stretto(
        *("critical-batch-size", "run.yaml", "--checkpoint", trained, *SIZES),
        *("--rule", "linear", "--plot", "critical.png"),
    )
    assert said.code == 0, said.err
    rows = [line.split() for line in said.out.splitlines()]
    assert [row[:2] for row in rows[1:4]] == [["2", "16"], ["4", "8"], ["8", "4"]]
    assert "critical batch size: " in said.out
    assert said.err.count("seed 1") == 3
    assert Path("critical.png").read_bytes().startswith(b"\x89PNG")


def test_the_rate_goes_with_the_size_from_the_one_in_force(stretto: Stretto, trained: Path) -> None:
    # The last checkpoint but one, where the batch is 8 and the rate in the middle of its cosine.
    checkpoints = sorted((trained / "checkpoints").iterdir())
    said = stretto(
        "critical-batch-size", "run.yaml", "--checkpoint", checkpoints[0], *SIZES, "--json"
    )
    assert said.code == 0, said.err
    found = json.loads(said.out)
    lines = (trained / "ledger.csv").read_text().splitlines()
    names, values = lines[0].split(","), [line.split(",") for line in lines[1:]]
    at = {int(row[names.index("sample")]): row for row in values}
    before = max(sample for sample in at if sample < found["at"]["sample"])
    rate = float(at[before][names.index("lr")])
    size = found["at"]["batch_size"]
    for branch in found["branches"]:
        assert branch["learning_rate"] == pytest.approx(rate * (branch["size"] / size) ** 0.5)
    assert found["samples"] == 32
    assert {branch["seed"] for branch in found["branches"]} == {0, 1}


def test_it_is_the_same_each_time_and_leaves_the_run_alone(stretto: Stretto, trained: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    command = ("critical-batch-size", "run.yaml", "--checkpoint", trained, *SIZES, "--json")
    assert stretto(*command).out == stretto(*command).out
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rule", "cubic"), "there is no such rule; write sqrt, linear, none"),
        (("--sizes", "8,x"), "cannot read '8,x' as batch sizes"),
        (("--sizes", "8,4"), "not two or more in ascending order"),
        (("--sizes", "8"), "not two or more in ascending order"),
        (("--sizes", "8,512"), "that is less than 4 steps"),
        (("--plot", "critical.gif"), "its name does not say what kind of picture"),
        (("--plot", "run.yaml/critical.png"), "name a file in a folder of yours"),
        (("--tolerance", "nan"), "write for example --tolerance 0.01"),
        (("--tolerance", "-1"), "write for example --tolerance 0.01"),
        (("--over", "32tok"), "write them in samples: --over 10000sp"),
        (("--checkpoint", "nowhere"), "nowhere"),
    ],
)
def test_what_is_refused(
    stretto: Stretto, trained: Path, options: tuple[str, str], message: str
) -> None:
    said = stretto("critical-batch-size", "run.yaml", "--checkpoint", trained, *options)
    assert said.code == 2
    assert message in said.err
    assert "Traceback" not in said.err


def test_a_checkpoint_of_another_model_is_refused(stretto: Stretto, trained: Path) -> None:
    text = Path("cli_project.py").read_text()
    Path("cli_other.py").write_text(text.replace("(2, 1)", "(2, 1, bias=False)"))
    said = stretto(
        *("critical-batch-size", "run.yaml", "model.target=cli_other:Line", *SIZES),
        *("--checkpoint", trained),
    )
    assert said.code == 2
    assert "cannot branch off" in said.err
    assert "another model's" in said.err


def test_several_ranks_are_refused(
    stretto: Stretto, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = stretto("critical-batch-size", "run.yaml", "--checkpoint", trained)
    assert said.code == 2
    assert "start it without torchrun" in said.err


CALLBACKS = """
import os
import signal

from stretto.training import Callback

SEEN = []


class Halve(Callback):
    def __init__(self):
        self.count = 0

    def on_batch_start(self, trainer, step):
        self.count += 1
        SEEN.append((str(trainer.horizon.max_duration), step.timestamp.sample, self.count))

    def transform_batch(self, trainer, batch):
        return batch[0] / 2, batch[1]

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Report(Callback):
    in_branches = False

    def on_batch_start(self, trainer, step):
        SEEN.append("reported")


class Stop(Callback):
    def on_batch_end(self, trainer, step):
        trainer.stop("early enough")


class TerminateSecondSeed(Callback):
    def on_batch_end(self, trainer, step):
        SEEN.append("a step")
        if len(SEEN) == 16 + 8 + 4 + 2:
            os.kill(os.getpid(), signal.SIGTERM)


class Terminate(Callback):
    def on_batch_end(self, trainer, step):
        if not SEEN:
            SEEN.append("terminated")
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def called_back(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What the callbacks of a run file have seen."""
    (project / "cli_callbacks.py").write_text(CALLBACKS)
    monkeypatch.syspath_prepend(project)
    seen: list[object] = importlib.import_module("cli_callbacks").SEEN
    yield seen
    sys.modules.pop("cli_callbacks")


def test_branches_have_the_callbacks_that_change_the_training(
    stretto: Stretto, project: Path, called_back: list[object]
) -> None:
    callbacks = "callbacks=[{target: cli_callbacks:Report}, {target: cli_callbacks:Halve}]"
    assert stretto("train", "run.yaml", callbacks, "--folder", "runs/a").code == 0
    assert "reported" in called_back
    called_back.clear()
    command = ("critical-batch-size", "run.yaml", "--checkpoint", "runs/a", *SIZES, "--json")
    with_them = stretto(*command, callbacks)
    assert with_them.code == 0, with_them.err
    # Each branch begins where the run was: its length, its position, and 11 batches counted.
    steps = [32 // size for size in (2, 4, 8)] * 2
    assert called_back == [("2ep", 80, 12 + step) for count in steps for step in range(count)]
    without = stretto(*command)
    losses = [
        [one["loss"] for one in json.loads(said.out)["branches"]] for said in (with_them, without)
    ]
    assert all(one != other for one, other in zip(*losses, strict=True))


def test_a_branch_that_a_callback_stops_is_refused(
    stretto: Stretto, trained: Path, called_back: list[object]
) -> None:
    said = stretto(
        *("critical-batch-size", "run.yaml", "callbacks=[{target: cli_callbacks:Stop}]"),
        *("--checkpoint", trained, *SIZES),
    )
    assert said.code == 2
    assert "a callback has stopped one: early enough" in said.err
    assert not called_back


def test_a_signal_ends_all_branches_as_it_ends_a_run(
    stretto: Stretto, trained: Path, called_back: list[object]
) -> None:
    said = stretto(
        *("critical-batch-size", "run.yaml", "callbacks=[{target: cli_callbacks:Terminate}]"),
        *("--checkpoint", trained, *SIZES),
    )
    assert (said.code, said.out) == (143, "")
    assert called_back == ["terminated"]


def test_a_signal_leaves_the_answer_of_the_orders_that_are_complete(
    stretto: Stretto, trained: Path, called_back: list[object]
) -> None:
    callbacks = "callbacks=[{target: cli_callbacks:TerminateSecondSeed}]"
    said = stretto(*("critical-batch-size", "run.yaml", callbacks, "--checkpoint", trained, *SIZES))
    assert said.code == 143
    assert "so far, critical batch size: " in said.out
    assert len(called_back) < 2 * (16 + 8 + 4)


def test_a_run_in_batches_has_a_length_in_samples(stretto: Stretto, project: Path) -> None:
    run = ("run.yaml", "max_duration=10ba", "batch_size=4")
    assert stretto("train", *run, "--folder", "runs/b").code == 0
    said = stretto(
        *("critical-batch-size", *run, "--checkpoint", "runs/b", "--sizes", "2,4"),
        *("--over", "80%", "--seeds", "1", "--json"),
    )
    assert said.code == 0, said.err
    assert json.loads(said.out)["samples"] == 32


def test_the_loss_is_of_the_same_samples_whatever_the_size(stretto: Stretto, trained: Path) -> None:
    """Where nothing is evaluated; the last quarter begins with a batch of each size."""
    command = ("critical-batch-size", "run.yaml", "evaluate=[]", "--checkpoint", trained)
    said = stretto(*command, "--sizes", "2,3,4", "--over", "60sp", "--seeds", "1", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["samples"] == 48


def test_a_yardstick_that_diverges_ends_it_at_once(stretto: Stretto, trained: Path) -> None:
    text = Path("cli_project.py").read_text()
    Path("cli_nan.py").write_text(text.replace("batch[1])", "batch[1]) * float('nan')"))
    said = stretto(
        *("critical-batch-size", "run.yaml", "model.target=cli_nan:Line"),
        *("--checkpoint", trained, *SIZES),
    )
    assert said.code == 2
    assert "cannot hold losses against that of batches of 2" in said.err
    assert said.err.count("seed 0") == 1
