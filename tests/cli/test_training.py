"""`stretto train` and what it leaves: used as a stranger would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.batching import AsManyAsFit, NoiseScale
from stretto.config.run import read_run_file
from stretto.errors import CheckpointError, cannot

Stretto = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("project")


def test_trains_plans_and_reports(stretto: Stretto) -> None:
    said = stretto("train", "run.yaml")
    assert (said.code, said.err) == (0, "")
    assert "run.yaml: Line with 3 parameters, in runs/run" in said.out
    assert "run of 2ep: 11 batches of 4 to 16 samples" in said.out
    assert "trained 2ep: 11 batches, 80 samples in " in said.out
    assert "validation: loss " in said.out
    assert ", entropy 3.2500" in said.out
    folder = Path("runs/run")
    assert {path.name for path in folder.iterdir()} == {
        "run.yaml", "plan.json", "metrics.jsonl", "ledger.csv", "events.jsonl", "checkpoints",
        "run.lock",
    }  # fmt: skip
    assert json.loads((folder / "plan.json").read_text())["num_batches"] == 11
    assert read_run_file(folder / "run.yaml").data.num_samples == 40

    compared = stretto("plan", "--against", folder)
    assert compared.code == 0
    assert compared.out.startswith("all 11 batches as planned (size, epoch, sample, micro_batches")
    assert "lr" in compared.out

    kept = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(kept | {"world_size": 2}))
    many = stretto("plan", "--against", folder, "micro_batch_size=2")
    assert "batch 0: micro_batches 1, planned" not in many.out, "two ranks take 2 of 4 samples each"
    (folder / "plan.json").write_text("[]")

    other = stretto("plan", "--against", folder, "batch_size=8")
    assert other.code == 1
    assert other.out.startswith("the run left its plan:\n  batch 0: size 4, planned 8\n")

    reported = stretto("report", folder)
    assert (reported.code, reported.err) == (0, "")
    assert "validation/entropy: 3.2500 throughout" in reported.out
    reported = stretto("report", folder, "--html", "run.html")
    assert (reported.code, reported.err) == (0, "wrote run.html\n")
    assert Path("run.html").read_text().startswith("<!doctype html>")


def test_prints_plain_lines_where_there_is_no_terminal(stretto: Stretto) -> None:
    lines = stretto("train", "run.yaml", "max_duration=1ep").out.splitlines()
    logged = [line for line in lines if "sp/s" in line]
    assert len(logged) == 1, "a line every few seconds, and the run took none"
    for word in ("loss ", "batch 4", "lr ", "ep left"):
        assert word in logged[0]
    assert any(line.startswith("100%  1ep  validation loss ") for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_a_run_that_decides_its_sizes_says_between_which(stretto: Stretto) -> None:
    adaptive = "batch_size={NoiseScale: {start: 4, maximum: 8}}"
    said = stretto("train", "run.yaml", adaptive, "max_duration=1ep", "--folder", "a").out
    assert "\nrun of 1ep: batches of 4 to 8 samples, decided during the run\n" in said


RAMPUP = "{rampup: {final: %d, over: 50%%, world_size: 1, micro_batch_size: 4}}"


def test_a_rampup_that_has_no_stages_left_is_noted(stretto: Stretto) -> None:
    rampup = ("run.yaml", "micro_batch_size=4", "max_duration=1ep", "--folder", "a")
    said = stretto("train", *rampup, f"batch_size={RAMPUP % 4}")
    assert "\nnote: the batch size ramp has no stages left: it starts at its end" in said.out
    planned = stretto("plan", "run.yaml", "micro_batch_size=4", f"batch_size={RAMPUP % 16}")
    assert "DoublingRamp(4, 16, '0.5dur')" in planned.out


def test_a_run_on_data_of_unknown_length_is_planned_as_a_bound(stretto: Stretto) -> None:
    stream = ("run.yaml", "data.target=cli_project:Stream", "evaluate=null", "batch_size=4")
    run = (*stream, "max_duration=18sp", "schedules.lr={Cosine: {warmup: 10%}}")
    said = stretto("plan", *run)
    assert "run of 18sp: at least 5 batches on 1 rank" in said.out
    assert "this plan is a bound" in said.out
    assert json.loads(stretto("plan", *run, "--json").out)["is_exact"] is False
    mixed = stretto("plan", *run, "schedules.lr={Cosine: {warmup: 2ba}}")
    assert "cannot convert between batches and samples" in mixed.err
    said = stretto("train", *run, "--folder", "a")
    assert "\nrun of 18sp: at least 5 batches of 4 samples" in said.out
    assert "\nnote: the number of samples in the data set is not known: each epoch" in said.out
    refused = stretto("plan", *run, "--against", "a")
    assert (refused.code, refused.out) == (2, "")
    assert "set data.num_samples, or write last_batch: carry" in refused.err
    assert "trained 18sp: 6 batches, 18 samples in " in said.out
    assert "as planned?" not in said.out
    assert json.loads(Path("a", "plan.json").read_text())["is_exact"] is False
    assert "use --against for this run" in stretto("plan", "--against", "a").err


def test_a_run_may_begin_whose_largest_batch_could_not_be(stretto: Stretto) -> None:
    adaptive = "batch_size={NoiseScale: {start: 4, maximum: 512}}"
    run = ("run.yaml", adaptive, "last_batch=drop", "max_duration=1ep", "--folder", "a")
    said = stretto("train", *run)
    assert said.code == 0, said.err
    assert "batches of 4 to 512 samples, decided during the run" in said.out


def test_each_run_has_a_folder_of_its_own(stretto: Stretto) -> None:
    for _ in range(2):
        assert stretto("train", "run.yaml", "max_duration=10sp").code == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["run", "run-2"]
    assert stretto("train", "run.yaml", "--folder", "mine", "max_duration=10sp").code == 0
    refused = stretto("train", "run.yaml", "--folder", "mine")
    assert refused.code == 2
    assert "cannot begin a run in mine: there is one already" in refused.err


def test_goes_on_from_a_checkpoint(stretto: Stretto) -> None:
    stretto("train", "run.yaml", "max_duration=1ep", "--folder", "a")
    said = stretto("train", "a/run.yaml", "--resume", "latest", "max_duration=2ep")
    assert said.code == 0
    assert "resumed from a/checkpoints/checkpoint-000000000040, at 1ep" in said.out
    assert "trained 2ep:" in said.out
    nothing = stretto("train", "run.yaml", "--folder", "b", "--resume", "latest")
    assert nothing.code == 2
    assert "cannot resume from the latest checkpoint in b: it has none" in nothing.err
    assert not Path("b").exists()
    nowhere = stretto("train", "run.yaml", "--resume", "latest")
    assert nowhere.code == 2
    assert "needs a named one" in nowhere.err


def test_without_a_run_file_a_resume_takes_that_of_the_folder(stretto: Stretto) -> None:
    stretto("train", "run.yaml", "max_duration=1ep", "--folder", "a")
    for resume, more in (("latest", ["--folder", "a"]), ("auto", ["folder=a"])):
        said = stretto("train", "max_duration=2ep", *more, "--resume", resume)
        assert said.code == 0, said.err
        assert "run.yaml: Line with 3 parameters, in a" in said.out
        assert "target: cli_project:Line" in Path("a/run.yaml").read_text()


@pytest.mark.parametrize("resume", ["latest", "auto", "b"])
def test_no_run_goes_on_with_the_packaged_run_file(resume: str, stretto: Stretto) -> None:
    for folder in ("a", "b"):
        stretto("train", "run.yaml", "max_duration=1ep", "--folder", folder)
    Path("a/run.yaml").unlink()
    before = sorted(path.name for path in Path("a").rglob("*"))
    said = stretto("train", "--folder", "a", "--resume", resume)
    assert said.code == 2
    assert "the run there has no run.yaml" in said.err
    assert f"stretto train RUN.YAML --folder a --resume {resume}" in said.err
    assert sorted(path.name for path in Path("a").rglob("*")) == before
    other = stretto("train", "run.yaml", "max_duration=2ep", "--folder", "a", "--resume", "latest")
    assert other.code == 0, "one that is named is the user's choice"


def test_a_run_begins_with_the_run_file_of_its_folder(stretto: Stretto) -> None:
    Path("mine").mkdir()
    Path("mine/run.yaml").write_text(Path("run.yaml").read_text())
    said = stretto("train", "max_duration=1ba", "--folder", "mine")
    assert said.code == 0, said.err
    assert "run.yaml: Line with 3 parameters, in mine" in said.out


@pytest.mark.parametrize(
    "arguments",
    [
        "train run.yaml --folder s3://bucket/run",
        "train run.yaml folder=s3://bucket/run",
        "train folder=s3://bucket/run",
        "plan --against s3://bucket/run",
        "report s3://bucket/run",
        "inspect s3://bucket/run",
    ],
)
def test_a_url_is_no_folder(arguments: str, stretto: Stretto) -> None:
    before = sorted(Path().iterdir())
    said = stretto(*arguments.split())
    assert said.code == 2
    assert "'s3://bucket/run': it is a URL" in said.err
    assert sorted(Path().iterdir()) == before


def test_a_run_that_is_refused_leaves_what_describes_the_other_one(stretto: Stretto) -> None:
    for folder in ("a", "b"):
        assert stretto("train", "run.yaml", "max_duration=1ep", "--folder", folder).code == 0
    kept = [Path("b", name).read_text() for name in ("run.yaml", "plan.json")]
    checkpoint = "a/checkpoints/checkpoint-000000000040"
    said = stretto("train", "run.yaml", "batch_size=8", "--folder", "b", "--resume", checkpoint)
    assert said.code == 2
    assert "cannot begin a run in b" in said.err
    assert [Path("b", name).read_text() for name in ("run.yaml", "plan.json")] == kept


def test_a_disk_that_cannot_be_written_to_leaves_the_run_file_as_it_was(
    stretto: Stretto, monkeypatch: pytest.MonkeyPatch
) -> None:
    stretto("train", "run.yaml", "max_duration=1ep", "--folder", "a")
    kept = Path("a/run.yaml").read_text()
    monkeypatch.setattr("stretto._location.own_name", lambda path: path.with_suffix(".tmp"))
    Path("a/run.tmp").mkdir()
    said = stretto("train", "a/run.yaml", "--resume", "latest", "max_duration=2ep")
    assert said.code == 2
    assert "cannot keep a run in a: run.tmp: file exists" in said.err
    assert Path("a/run.yaml").read_text() == kept


def test_auto_begins_or_goes_on_and_says_what_has_changed(stretto: Stretto) -> None:
    run = ("train", "run.yaml", "--folder", "a", "--resume", "auto")
    first = stretto(*run, "max_duration=1ep")
    assert first.code == 0
    assert "resumed" not in first.out
    second = stretto(*run, "max_duration=2ep", "batch_size=8", "micro_batch_size=2")
    assert second.code == 0
    assert "resumed from a/checkpoints/checkpoint-000000000040, at 1ep" in second.out
    assert "changed since: max_duration: 1ep -> 2ep\n" in second.out
    assert "changed since: micro_batch_size: None -> 2\n" in second.out
    assert "trained 2ep:" in second.out


def test_a_run_whose_last_checkpoint_is_missing_does_not_end_well(
    stretto: Stretto, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise CheckpointError(cannot("write it", why="no space left", instead="make room"))

    monkeypatch.setattr("stretto.training.checkpointing.saver.write_part", full)
    with pytest.warns(RuntimeWarning, match="training"):
        said = stretto("train", "run.yaml", "max_duration=1ep")
    assert said.code == 1
    assert "NOT SAVED: the last checkpoint could not be written: cannot write it" in said.out


def test_several_ranks_need_a_named_folder(
    stretto: Stretto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = stretto("train", "run.yaml")
    assert said.code == 2
    assert "name one with --folder" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run.yaml model.target=cli_project:Lin", "did you mean 'Line'?"),
        ("run.yaml optimizer.lrr=1", "lrr"),
        ("run.yaml model=null", "cannot train: there is no 'model'"),
        ("run.yaml data.num_samples=7", "(data in run.yaml, line 3)"),
        ("run.yaml world_size=2", "torchrun --nproc-per-node 2"),
        ("run.yaml schedules.lr.cosine.warmup=5ep", "schedules.lr"),
        ("run.yaml --folder run.yaml", "cannot keep a run in run.yaml"),
    ],
)
def test_refuses_before_the_first_step(arguments: str, message: str, stretto: Stretto) -> None:
    said = stretto("train", *arguments.split())
    assert said.code == 2
    assert message in said.err
    assert "Traceback" not in said.err
    assert not Path("runs").exists()


def test_an_interrupt_saves_and_says_how_to_go_on(project: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-c",
            "from stretto.cli import main; main()",
            "train",
            "run.yaml",
            "max_duration=10h",
            "batch_size=4",
            "schedules=null",
            "log.every=1ba",
        ],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "loss" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "(received SIGINT)" in out
    assert "to resume:  stretto train runs/run/run.yaml --resume latest" in out
    assert len(list((project / "runs" / "run" / "checkpoints").iterdir())) >= 1


def test_what_fails_after_an_error_is_told_with_it(stretto: Stretto) -> None:
    Path("cli_faulty.py").write_text(
        "from stretto.errors import TrainingError\n"
        "from stretto.training import Callback\n"
        "class Faulty(Callback):\n"
        "    def on_batch_end(self, trainer, step):\n"
        "        raise TrainingError('cannot go on')\n"
        "    def on_fit_end(self, trainer):\n"
        "        raise ValueError('nor end')\n"
    )
    said = stretto("train", "run.yaml", "callbacks=[{target: cli_faulty:Faulty}]")
    assert said.code == 2
    assert said.err == (
        "Error [training]: cannot go on\nand Faulty.on_fit_end failed: ValueError: nor end\n"
    )


def test_an_error_names_keys_where_python_names_arguments(stretto: Stretto) -> None:
    Path("cli_spoiled.py").write_text(
        "from stretto.errors import TrainingError\n"
        "from stretto.training import Callback\n"
        "from stretto.training.stepper import not_finite\n"
        "class Spoiled(Callback):\n"
        "    def on_batch_end(self, run, step):\n"
        "        raise not_finite(step.timestamp)\n"
    )
    said = stretto("train", "run.yaml", "callbacks=[{target: cli_spoiled:Spoiled}]")
    assert said.code == 2
    assert "clip with clip_norm=1.0, or" in said.err
    assert "non_finite='skip'" in said.err


GROW = "def grow(epoch, size):\n    return 4\n"


@pytest.mark.parametrize("in_periods", [False, True])
def test_sizes_that_were_found_are_printed_and_kept(stretto: Stretto, in_periods: bool) -> None:
    Path("cli_growth.py").write_text(GROW)
    sizes = "{function: {target: 'cli_growth:grow'}, start: 4, max_batch_size: auto}"
    sizes = f"{{IncreaseFunction: {sizes}}}"
    if in_periods:
        sizes = f"{{PeriodSizes: [[1ep, {sizes}], [rest, 8]]}}"
    run = ("run.yaml", f"batch_size={sizes}", "micro_batch_size=auto", "--folder", "a")
    said = stretto("train", *run)
    assert said.code == 0, said.err
    assert (
        "\nmemory, one pass on each rank: 40 samples, all there are; more would fit (tried: "
        in said.out
    )
    micro = 8 if in_periods else 12
    assert f"\nmicro_batch_size auto: {micro} samples, all there are; more would fit" in said.out
    kept = read_run_file(Path("a", "run.yaml"))
    assert kept.micro_batch_size == micro
    grows: Any = kept.batch_size
    grows = grows.periods[0][1] if in_periods else grows
    assert grows.max_batch_size == 40
    assert stretto("plan", "--against", "a").out.startswith("all ")
    more = stretto("train", "a/run.yaml", "--resume", "latest", "max_duration=3ep")
    assert more.code == 0, more.err
    assert "changed since: max_duration: 2ep -> 3ep\n" in more.out
    assert "micro_batch_size" not in more.out


def test_memory_bounds_the_sizes_of_a_run_file(stretto: Stretto) -> None:
    sizes = "{NoiseScale: {start: 4, maximum: auto}}"
    said = stretto("train", "run.yaml", f"batch_size={sizes}", "--folder", "a")
    assert said.code == 0, said.err
    assert "\nmemory, one pass on each rank: 40 samples, " in said.out
    kept = read_run_file(Path("a", "run.yaml"))
    assert kept.batch_size == NoiseScale(4, 40)
    for old in ("memory", "8x memory"):
        said = stretto("train", "run.yaml", f"batch_size={sizes.replace('auto', old)}")
        assert said.code == 2
        assert "or 'auto'" in said.err


@pytest.mark.parametrize("asked", ["batch_size=auto", "use_maximum_batch_size=true"])
def test_as_many_samples_as_fit_in_a_run_file(stretto: Stretto, asked: str) -> None:
    lines = Path("run.yaml").read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("batch_size"))
    Path("any.yaml").write_text(text)
    said = stretto("train", "any.yaml", asked, "--folder", "a")
    assert said.code == 0, said.err
    assert "\nmemory, one pass on each rank: 40 samples, " in said.out
    kept = Path("a", "run.yaml")
    assert read_run_file(kept).batch_size == AsManyAsFit(40)
    assert stretto("plan", str(kept)).code == 0
    more = stretto("train", str(kept), "--resume", "latest", "max_duration=3ep")
    assert more.code == 0, more.err
    changed = [line for line in more.out.splitlines() if line.startswith("changed since: ")]
    assert changed == ["changed since: max_duration: 2ep -> 3ep"]
    refused = stretto("plan", "any.yaml", "batch_size=auto")
    assert refused.code == 2
    assert "write a number of samples" in refused.err


def test_a_run_that_has_ended_says_why_and_how_to_train_on(stretto: Stretto) -> None:
    Path("cli_ending.py").write_text(
        "from stretto.training import Callback\n"
        "class Ending(Callback):\n"
        "    def on_epoch_end(self, run):\n"
        "        run.stop('good enough')\n"
    )
    ending = "callbacks=[{target: cli_ending:Ending}]"
    said = stretto("train", "run.yaml", ending, "--folder", "a")
    assert (said.code, said.err) == (0, "")
    again = ("train", "a/run.yaml", "--resume", "latest")
    assert f"to resume:  stretto {' '.join(again)} --even-if-stopped" in said.out
    with pytest.warns(RuntimeWarning, match="good enough"):
        assert "stopped at 1ep (good enough)" in stretto(*again).out
    more = stretto(*again, "--even-if-stopped", "callbacks=null")
    assert (more.code, more.err) == (0, "")
    assert "trained 2ep" in more.out
    assert "nothing is left to train" in stretto(*again).out


def test_an_interrupt_at_the_exit_prints_no_traceback() -> None:
    code = (
        "import atexit, os, signal\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "from stretto.cli import main\n"
        "main(['convert', '0.1dur', '--to', 'ep', '--max-duration', '90ep'])\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "9ep\n", "")
