"""`stretto critical-batch-size`: branches off a checkpoint, compared."""

from __future__ import annotations

import importlib
import json
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Stretto

from stretto.checkpoint import open_checkpoint
from stretto.experiments.branches import ORDER_SEEDS
from stretto.ordering import SampleOrder

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


def ledger(folder: Path) -> list[dict[str, float]]:
    """What each batch of a run was."""
    lines = [line.split(",") for line in (folder / "ledger.csv").read_text().splitlines()]
    return [dict(zip(lines[0], map(float, line), strict=True)) for line in lines[1:]]


def test_the_rate_goes_with_the_size_from_the_one_in_force(stretto: Stretto, trained: Path) -> None:
    # The last checkpoint but one, where the size is about to grow and the cosine is in its middle.
    checkpoints = sorted((trained / "checkpoints").iterdir())
    said = stretto(
        "critical-batch-size", "run.yaml", "--checkpoint", checkpoints[0], *SIZES, "--json"
    )
    assert said.code == 0, said.err
    found = json.loads(said.out)
    rows = ledger(trained)
    behind = next(n for n, row in enumerate(rows) if row["sample"] == found["at"]["sample"])
    before = rows[behind - 1]
    assert rows[behind]["size"] != found["at"]["batch_size"], "the size moves here"
    assert found["at"]["batch_size"] == 8, "what was decided; it was cut to 4 by the epoch's end"
    for branch in found["branches"]:
        wanted = before["lr"] * (branch["size"] / 8) ** 0.5
        assert branch["learning_rate"] == pytest.approx(wanted)
    assert found["samples"] == 32
    assert {branch["seed"] for branch in found["branches"]} == {0, 1}


def by_hand(checkpoint: Path, rate: float, size: int, seed: int, *, evaluates: bool) -> float:
    """The loss of a branch over 36 samples, by a loop of plain torch."""
    project, reader = importlib.import_module("cli_project"), open_checkpoint(checkpoint)
    model = project.Line()
    model.load_state_dict({name: reader.tensor("model", name) for name in reader.names("model")})
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    data = project.Points()
    order, losses = SampleOrder(len(data), ORDER_SEEDS + seed), []
    for start in range(0, 36, size):
        optimizer.zero_grad()
        loss = project.Line.loss(model, data[[order[p] for p in range(start, start + size)]])
        loss.backward()
        optimizer.step()
        losses += [loss.item()] * size
    if evaluates:
        return float(project.Line.loss(model, data[:]).item())
    return statistics.mean(losses[27:])


@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluation", "training loss"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_branch_is_a_plain_loop_from_the_checkpoint(
    stretto: Stretto, trained: Path, at: int, evaluates: bool
) -> None:
    checkpoint = sorted((trained / "checkpoints").iterdir())[at]
    settings = ["learning_rate_rule={linear: 8}", *([] if evaluates else ["evaluate=[]"])]
    said = stretto(
        *("critical-batch-size", "run.yaml", *settings, "--checkpoint", checkpoint),
        *("--sizes", "2,3,9", "--over", "36sp", "--seeds", "2", "--json"),
    )
    assert said.code == 0, said.err
    found = json.loads(said.out)
    in_force, rows = found["at"]["batch_size"], ledger(trained)
    rate = next(row for row in reversed(rows) if row["sample"] < found["at"]["sample"])["lr"]
    for branch in found["branches"]:
        size, seed = branch["size"], branch["seed"]
        own = rate * size / in_force
        assert branch["learning_rate"] == pytest.approx(own)
        wanted = by_hand(checkpoint, own, size, seed, evaluates=evaluates)
        assert branch["loss"] == pytest.approx(wanted, rel=1e-5)
    losses = {(one["size"], one["seed"]): one["loss"] for one in found["branches"]}
    assert losses[2, 0] != losses[2, 1], "seeds are orders"


def test_data_that_come_once_begin_anew_in_each_branch(stretto: Stretto, project: Path) -> None:
    source = """
from cli_project import Points

class Again:
    def __iter__(self):
        return iter(Points())

def once():
    return iter(Points())
"""
    (project / "cli_streams.py").write_text(source)
    found = []
    for target in ("Again", "once"):
        data = f"data={{target: cli_streams:{target}, num_samples: 40}}"
        run = ("run.yaml", data, "max_duration=20sp", "checkpoint={every: 10sp}", "evaluate=[]")
        assert stretto("train", *run, "--folder", f"runs/{target}").code == 0
        said = stretto(
            *("critical-batch-size", *run, "--checkpoint", f"runs/{target}"),
            *("--sizes", "2,4", "--over", "16sp", "--seeds", "2", "--json"),
        )
        assert said.code == 0, said.err
        found.append([branch["loss"] for branch in json.loads(said.out)["branches"]])
    assert found[0] == found[1]
    sys.modules.pop("cli_streams")


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
        (("--tolerance", "nan", *SIZES), "write for example --tolerance 0.01"),
        (("--tolerance", "-1", *SIZES), "write for example --tolerance 0.01"),
        (("--seeds", "0"), "--seeds"),
        (("--over", "20sp"), "write --over 64sp or more, or smaller --sizes"),
        (("loading={shuffle: false}",), "branches would be the same; write --seeds 1, or loading="),
        (("--over", "32tok"), "write it in 'sp'"),
        (("--checkpoint", "nowhere"), "nowhere"),
    ],
)
def test_what_is_refused(
    stretto: Stretto, trained: Path, options: tuple[str, ...], message: str
) -> None:
    said = stretto("critical-batch-size", "run.yaml", "--checkpoint", trained, *options)
    assert said.code == 2
    assert message in said.err
    assert "Traceback" not in said.err


def test_without_a_run_file_it_is_the_runs_own(stretto: Stretto, trained: Path) -> None:
    older, _ = sorted((trained / "checkpoints").iterdir())
    for checkpoint in (trained, older, Path("runs/a/checkpoints") / older.name):
        said = stretto("critical-batch-size", "--checkpoint", checkpoint, *SIZES, "--json")
        assert said.code == 0, said.err
        assert f"{Path('runs', 'a', 'run.yaml')} says" in said.err
    whole = json.loads(said.out)
    assert whole["seeds"] == {"asked": 2, "whole": 2}
    assert [row["size"] for row in whole["rows"]] == [2, 4, 8]
    assert whole["rows"][0]["verdict"] == "below"


def test_a_rate_that_has_decayed_is_told(stretto: Stretto, trained: Path) -> None:
    older, newest = sorted((trained / "checkpoints").iterdir())
    for checkpoint, is_told in ((older, False), (newest, True)):
        said = stretto("critical-batch-size", "--checkpoint", checkpoint, *SIZES)
        assert ("of the optimizer's, and where it is small" in said.err) == is_told


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

    def on_batch_start(self, run, step):
        self.count += 1
        SEEN.append((str(run.horizon.max_duration), step.timestamp.sample, self.count))

    def transform_batch(self, run, batch):
        return batch[0] / 2, batch[1]

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Report(Callback):
    def on_log(self, run, record):
        SEEN.append("reported")


class Measure(Callback):
    def on_fit_start(self, run):
        SEEN.append("measured")

    def on_noise(self, run, step, signals):
        SEEN.append("measured")


class SetRates(Callback):
    sets_learning_rate = True

    def on_batch_start(self, run, step):
        SEEN.append("set")


class Stop(Callback):
    def on_batch_end(self, run, step):
        run.stop("early enough")


class TerminateSecondSeed(Callback):
    def on_batch_end(self, run, step):
        SEEN.append("a step")
        if len(SEEN) == 16 + 8 + 4 + 2:
            os.kill(os.getpid(), signal.SIGTERM)


class Batches(Callback):
    def on_batch_end(self, run, step):
        pass

    def on_log(self, run, record):
        SEEN.append(record["loss"])


class Scale(Callback):
    def on_batch_end(self, run, step):
        scaler = run._evaluate.__self__.scaler
        SEEN.append(scaler.get_scale())
        scaler.update(32.0)


class TerminateAtTheEnd(Callback):
    # When the last step of the first branch is over.

    def on_batch_end(self, run, step):
        pass

    def on_evaluation_end(self, run, name, metrics):
        SEEN.append("evaluated")
        os.kill(os.getpid(), signal.SIGTERM)


class TerminateBefore(Callback):
    # When the second branch is made, and has not begun.

    def __init__(self):
        SEEN.append("made")
        if len(SEEN) == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class Terminate(Callback):
    def on_batch_end(self, run, step):
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
    names = ("Report", "Measure", "SetRates", "Halve")
    callbacks = f"callbacks=[{', '.join(f'{{target: cli_callbacks:{name}}}' for name in names)}]"
    assert stretto("train", "run.yaml", callbacks, "--folder", "runs/a").code == 0
    assert {"reported", "measured", "set"} < set(called_back)
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


@pytest.mark.parametrize(
    ("callback", "seen"), [("TerminateAtTheEnd", ["evaluated"]), ("TerminateBefore", ["made"] * 2)]
)
def test_a_signal_outside_the_steps_ends_all_branches_too(
    stretto: Stretto, trained: Path, called_back: list[object], callback: str, seen: list[object]
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    callbacks = f"callbacks=[{{target: cli_callbacks:{callback}}}]"
    said = stretto("critical-batch-size", "run.yaml", callbacks, "--checkpoint", trained, *SIZES)
    assert (said.code, said.out) == (143, "")
    assert called_back == seen
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_signal_leaves_the_answer_of_the_orders_that_are_complete(
    stretto: Stretto, trained: Path, called_back: list[object]
) -> None:
    callbacks = "callbacks=[{target: cli_callbacks:TerminateSecondSeed}]"
    command = ("critical-batch-size", "run.yaml", callbacks, "--checkpoint", trained, *SIZES)
    said = stretto(*command, "--plot", "so_far.png")
    assert said.code == 143
    assert "so far, critical batch size: " in said.out
    assert "stopped: 1 of 2 orders are whole" in said.err
    called_back.clear()
    plain = json.loads(stretto(*command, "--json").out)
    assert plain["seeds"] == {"asked": 2, "whole": 1}
    assert Path("so_far.png").is_file()
    assert len(called_back) < 2 * (16 + 8 + 4)


def test_batches_are_of_the_size_in_force(stretto: Stretto, trained: Path) -> None:
    said = stretto(
        *("critical-batch-size", "run.yaml", "--checkpoint", trained, "--over", "5ba"),
        *("--sizes", "2,4", "--seeds", "1", "--json"),
    )
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["samples"] == 5 * found["at"]["batch_size"] == 80


def test_the_largest_size_keeps_its_least_number_of_steps(stretto: Stretto, trained: Path) -> None:
    said = stretto(
        *("critical-batch-size", "run.yaml", "--checkpoint", trained, "--over", "40sp"),
        *("--sizes", "6,10", "--seeds", "1", "--json"),
    )
    assert said.code == 0, said.err
    assert json.loads(said.out)["samples"] == 40


def test_a_run_in_batches_has_a_length_in_samples(stretto: Stretto, project: Path) -> None:
    run = ("run.yaml", "max_duration=10ba", "batch_size=4")
    assert stretto("train", *run, "--folder", "runs/b").code == 0
    said = stretto(
        *("critical-batch-size", *run, "--checkpoint", "runs/b", "--sizes", "2,4"),
        *("--over", "80%", "--seeds", "1", "--json"),
    )
    assert said.code == 0, said.err
    assert json.loads(said.out)["samples"] == 32


def test_the_loss_is_of_the_same_samples_whatever_the_size(
    stretto: Stretto, trained: Path, called_back: list[object]
) -> None:
    """Where nothing is evaluated: that of the last quarter, whichever batch it begins inside."""
    callbacks = "callbacks=[{target: cli_callbacks:Batches}]"
    command = ("critical-batch-size", "run.yaml", "evaluate=[]", callbacks, "--checkpoint", trained)
    said = stretto(*command, "--sizes", "2,3,5", "--over", "38sp", "--seeds", "1", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["samples"] == 30, "whole batches of every size"
    seen = iter(called_back)
    for branch in found["branches"]:
        size = branch["size"]
        batches = [next(seen) for _ in range(30 // size)]
        parts = [min(size, max(0.0, end - 22.5)) for end in range(size, 31, size)]
        wanted = sum(part * loss for part, loss in zip(parts, batches, strict=True)) / 7.5
        assert branch["loss"] == pytest.approx(wanted)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(stretto: Stretto, trained: Path) -> None:
    older, newest = sorted((trained / "checkpoints").iterdir())
    (newest / "manifest.json").write_text("{")
    with pytest.warns(RuntimeWarning, match="is damaged"):
        said = stretto("critical-batch-size", "run.yaml", "--checkpoint", trained, *SIZES, "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["at"]["sample"] == int(older.name.rpartition("-")[2])


def test_the_scale_of_the_loss_goes_on(
    stretto: Stretto, project: Path, called_back: list[object]
) -> None:
    run = ("run.yaml", "stepping={precision: fp16}", "callbacks=[{target: cli_callbacks:Scale}]")
    assert stretto("train", *run, "--folder", "runs/a").code == 0
    assert called_back[0] not in (16.0, 32.0), "where a scaler begins, halved perhaps"
    called_back.clear()
    said = stretto("critical-batch-size", *run, "--checkpoint", "runs/a", *SIZES)
    assert said.code == 0, said.err
    assert called_back[0] == 32.0, "what it was at the checkpoint"


def test_a_baseline_that_diverges_ends_it_at_once(stretto: Stretto, trained: Path) -> None:
    text = Path("cli_project.py").read_text()
    Path("cli_nan.py").write_text(text.replace("batch[1])", "batch[1]) * float('nan')"))
    said = stretto(
        *("critical-batch-size", "run.yaml", "model.target=cli_nan:Line"),
        *("--checkpoint", trained, *SIZES),
    )
    assert said.code == 2
    assert "cannot compare losses with the baseline run (batch size 2)" in said.err
    assert said.err.count("seed 0") == 1


TOKENS = """
import torch
from torch import nn
from torch.utils.data import Dataset


class Texts(Dataset):
    def __init__(self, split="train"):
        self.split = split

    def __len__(self):
        return 512

    def __getitem__(self, index):
        length = 2 if index % 2 else 30
        labels = torch.full((30,), -100)
        labels[:length] = index % 2
        return {"input_ids": torch.full((30,), index % 2), "labels": labels}


class Guess(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.0, 2.0]))

    @staticmethod
    def loss(model, batch):
        labels = batch["labels"][:, 1:].flatten()
        return nn.functional.cross_entropy(model.logits.expand(len(labels), 2), labels)
"""


def test_tokens_count_as_tokens(stretto: Stretto, project: Path) -> None:
    """Weights hardly move, so the loss is that of all tokens whatever the batch size is."""
    (project / "cli_texts.py").write_text(TOKENS)
    (project / "tokens.yaml").write_text(
        "max_duration: 1ep\n"
        "model: {target: cli_texts:Guess}\n"
        "data: {target: cli_texts:Texts}\n"
        "optimizer: {target: torch.optim:SGD, lr: 1.0e-9}\n"
        "stepping: {loss_weight: tokens}\n"
        "batch_size: 16\n"
        "log: {loggers: []}\n"
        "checkpoint: {every: 50%}\n"
    )
    assert stretto("train", "tokens.yaml", "--folder", "runs/t").code == 0
    said = stretto(
        *("critical-batch-size", "tokens.yaml", "--checkpoint", "runs/t"),
        *("--sizes", "1,4,16,64", "--over", "512sp", "--seeds", "1", "--json"),
    )
    sys.modules.pop("cli_texts", None)
    assert said.code == 0, said.err
    losses = [one["loss"] for one in json.loads(said.out)["branches"]]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
