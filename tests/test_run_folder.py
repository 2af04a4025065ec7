from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from stretto._location import replacing
from stretto.batching import NoiseScale
from stretto.errors import ConfigError
from stretto.run_folder import (
    CLOCK,
    EVENTS,
    LEDGER,
    LEDGER_COLUMNS,
    METRICS,
    PLAN,
    complete_text,
    parsed_event,
    parsed_ledger,
    parsed_metrics,
    read_json,
    replace_file,
    write_named,
)
from stretto.schedules import Linear, Periods
from stretto.training import Callback, Checkpointing, Evaluation, Trainer

DATA = TensorDataset(
    torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(64, 1)
)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trainer_of(folder: Path, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    if "optimizer" not in settings:
        settings["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    base: dict[str, Any] = {"loss": loss, "max_duration": "2ep", "batch_size": 8, "log": "2ba"}
    return Trainer(model, DATA, folder=folder, **base | settings)


def events(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]
    assert all({*CLOCK, "utc", "attempt", "text"} <= event.keys() for event in found)
    return found


def kinds(folder: Path) -> list[tuple[str, int]]:
    return [(event["event"], event["attempt"]) for event in events(folder)]


class Do(Callback):
    def __init__(self, work: Any) -> None:
        self.work = work

    def on_batch_end(self, run: Any, step: Any) -> None:
        self.work(run)


def test_a_run_tells_its_story(tmp_path: Path) -> None:
    trainer_of(tmp_path, evaluate=Evaluation(DATA, "1ep"), checkpoint="1ep").fit()
    assert Counter(kinds(tmp_path)) == {
        ("start", 1): 1,
        ("evaluation", 1): 2,
        ("checkpoint", 1): 2,
        ("stop", 1): 1,
    }
    start, *_, stop = events(tmp_path)
    assert start["facts"]["model"] == "Linear, 5 parameters"
    assert (stop["text"], stop["sp"], stop["dur"]) == ("the end", 128, 1.0)


RUN = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_run_folder import Do, Evaluation, DATA, trainer_of

def kill(run):
    if run.timer.batch == 11:
        trainer._loop.saver.wait()
        os.kill(os.getpid(), signal.SIGKILL)

trainer = trainer_of(
    Path(sys.argv[1]), evaluate=Evaluation(DATA, "1ep"), checkpoint="4ba",
    log={"every": "1ba", "flush": "1ba"}, callbacks=[Do(kill)],
)
trainer.fit()
"""


def test_a_killed_run_and_its_resume_are_both_told(tmp_path: Path) -> None:
    path = str(Path(__file__).parent)
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(tmp_path), path]
    done = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"event": "half a li')
    before = (tmp_path / EVENTS).read_text()
    again = trainer_of(tmp_path, evaluate=Evaluation(DATA, "1ep"), checkpoint="4ba", batch_size=16)
    again.resume()
    again.fit()
    after = (tmp_path / EVENTS).read_text()
    assert after.startswith(before + "\n")
    found = [one for one in map(parsed_event, after.splitlines()) if one is not None]
    assert next(one["event"] for one in found if one["attempt"] == 1) == "start"
    assert not any(one["event"] == "stop" for one in found if one["attempt"] == 1)
    (resume,) = (one for one in found if one["event"] == "resume")
    assert (resume["attempt"], resume["ba"]) == (2, 8)
    assert resume["resumed_from"].endswith("checkpoint-000000000064")
    assert any("batch_size" in line for line in resume["changes"])
    assert resume["done_again"] == {"batches": 2, "samples": 16}  # the last line is not flushed
    assert found[-1]["event"] == "stop"
    assert [one["utc"] for one in found] == sorted(one["utc"] for one in found)


def test_what_goes_wrong_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split after out-of-memory, a step that is skipped, a checkpoint that fails."""
    ran_out: list[int] = []

    def greedy(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(batch[0]) > 4 and not ran_out:
            ran_out.append(1)
            raise torch.OutOfMemoryError("out of memory")
        found = loss(model, batch)
        return found * float("nan") if trainer.run.timer.batch == 5 else found

    def fill(run: Any) -> None:
        if run.timer.batch == 3:
            trainer._loop.saver.wait()
            (tmp_path / "checkpoints").rename(tmp_path / "moved")
            (tmp_path / "checkpoints").write_text("in the way")

    trainer = trainer_of(
        tmp_path,
        loss=greedy,
        max_duration="1ep",
        checkpoint=Checkpointing("2ba"),
        stepping={"non_finite": "skip"},
        callbacks=[Do(fill)],
    )
    with pytest.warns(RuntimeWarning):
        trainer.fit()
    found = {event["event"]: event for event in events(tmp_path)}
    assert (found["out_of_memory"]["before"], found["out_of_memory"]["now"]) == (8, 4)
    assert (found["skipped_step"]["ba"], found["checkpoint_failed"]["ba"]) == (5, 8)
    assert {"start", "checkpoint", "stop"} <= found.keys()
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert {line["micro_batch_size"] for line in lines} == {4}


def test_an_error_is_the_reason_of_a_stop(tmp_path: Path) -> None:
    def fail(run: Any) -> None:
        raise ZeroDivisionError("of mine")

    with pytest.raises(ZeroDivisionError):
        trainer_of(tmp_path, callbacks=[Do(fail)]).fit()
    assert events(tmp_path)[-1]["text"] == "stop: ZeroDivisionError: of mine"


def test_decided_sizes_are_events_and_a_column(tmp_path: Path) -> None:
    policy = NoiseScale(2, 12, c=0.5, minimum=2, window=6, confidence=0.2)
    trainer_of(tmp_path, batch_size=policy, max_duration="4ep").fit()
    found = [event for event in events(tmp_path) if event["event"] == "decided_size"]
    header, *rows = (tmp_path / LEDGER).read_text().splitlines()
    columns = parsed_ledger(header.split(","), "\n".join(rows) + "\n")
    sizes = columns["decided_size"].tolist()
    changes = [i for i in range(len(sizes)) if not i or sizes[i] != sizes[i - 1]]
    assert len(changes) > 1
    assert [(event["ba"], event["size"]) for event in found] == [
        (columns["batch"][i], sizes[i]) for i in changes
    ]
    assert columns["sec"].tolist() == sorted(columns["sec"].tolist())


def test_named_periods_are_events_of_the_first_batch_in_each(tmp_path: Path) -> None:
    periods = Periods({"warmup": ("5ba", Linear(0, 1)), "main": ("rest", 1.0)})
    trainer_of(tmp_path, schedules={"lr": periods}, max_duration="9ba").fit()
    found = [event for event in events(tmp_path) if event["event"] == "period"]
    said = [(one["ba"], one["periods"]) for one in found]
    assert said == [(0, {"lr": "warmup"}), (5, {"lr": "main"})]
    assert found[1]["text"] == "period: lr 'main'"


def test_lines_have_memory_micro_batches_and_the_norm_without_clipping(tmp_path: Path) -> None:
    norms = []

    class Look(Callback):
        def on_gradient(self, run: Any, step: Any) -> None:
            grads = [one.grad for one in run.model.parameters()]
            norms.append(float(nn.utils.get_total_norm(grads)))

    trainer = trainer_of(tmp_path, micro_batch_size=3, callbacks=[Look()])
    trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms[::2])
    assert all(line["memory_peak_bytes"] > 1 << 20 for line in lines)
    assert {line["micro_batch_size"] for line in lines} == {3}


def test_a_value_that_an_earlier_attempt_did_not_schedule_is_left_out_with_a_warning(
    tmp_path: Path,
) -> None:
    trainer_of(tmp_path, max_duration="1ep", checkpoint="1ep").fit()
    more = trainer_of(tmp_path, checkpoint="1ep", schedules={"weight_decay": 1.0})
    more.resume()
    with pytest.warns(RuntimeWarning, match="weight_decay"):
        more.fit()
    lines = (tmp_path / LEDGER).read_text().splitlines()
    assert {line.count(",") for line in lines} == {len(LEDGER_COLUMNS)}


def test_the_plan_is_kept(tmp_path: Path) -> None:
    trainer_of(tmp_path, batch_size="0ep:8 1ep:16").fit()
    plan = read_json(tmp_path / PLAN)
    assert [stage["size"] for stage in plan["stages"]] == [8, 16]
    assert plan["curve"]["values"]["lr"] == [0.1] * 12


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"event": "x"}', '{"ep":1,"ba":1,"sp":1,"tok":0,"dur":1,"sec":null}'],
)
def test_lines_that_are_not_whole_are_none(text: str) -> None:
    assert parsed_metrics(text) is None
    assert parsed_event(text) is None


def test_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert complete_text(path) == ""
    path.write_text("a\nb\nhal")
    assert complete_text(path) == "a\nb\n"


def test_rows_that_are_not_whole_are_left_out() -> None:
    block = "1,2,nan\n1,2\nx,y,z\n3,4,5\n"
    assert parsed_ledger(["a", "b", "c"], block)["b"].tolist() == [2, 4]


def test_of_many_that_write_one_file_one_is_whole(tmp_path: Path) -> None:
    texts = [f"{number}\n" * 20_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: replace_file(tmp_path / "a", text), texts * 4))
    assert (tmp_path / "a").read_text() in texts
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_what_another_process_has_touched_is_not_put_in_place(tmp_path: Path) -> None:
    path, precious = tmp_path / "a", tmp_path / "precious"
    precious.write_text("mine")
    path.symlink_to(precious)

    def fail_after(what: str) -> None:
        with replacing(path) as file:
            file.write(b"new")
            (own,) = tmp_path.glob("a.*.tmp")
            if what == "written to":
                own.write_bytes(b"longer than that")
            elif what == "replaced":
                own.unlink()
                own.write_bytes(b"new")
            else:
                raise ValueError(what)

    for what in ("written to", "replaced", "an error"):
        with pytest.raises((OSError, ValueError), match=r"Another process|an error"):
            fail_after(what)
        assert path.read_text() == "mine"
        assert {one.name for one in tmp_path.iterdir()} == {"a", "precious"}
    replace_file(path, "new")
    assert (path.read_text(), precious.read_text()) == ("new", "mine")
    with pytest.raises(ConfigError, match="holds something else"):
        write_named(path, "newer", "mine")


def test_what_a_kill_has_left_of_a_deletion_is_cleaned_up(tmp_path: Path) -> None:
    """Only what is named like a checkpoint of the run; the user's stays."""
    settings = {"checkpoint": Checkpointing("8ba", keep=2)}
    trainer_of(tmp_path, **settings).fit()
    folder = tmp_path / "checkpoints"
    left = folder / "checkpoint-000000000064.tmp"
    for path in (left, folder / "checkpoint-mine.tmp", folder / "notes.tmp"):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    trainer_of(tmp_path, **settings, max_duration="3ep").fit(resume="auto")
    assert not left.exists()
    assert {"checkpoint-mine.tmp", "notes.tmp"} < {one.name for one in folder.iterdir()}
