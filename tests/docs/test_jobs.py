"""The nine jobs of a new user, done with what the pages say, from page to page.

`test_documents.py` runs each page by itself; here blocks of several pages meet, as they do in a
reader's hands. Code and commands come from the pages: one that goes wrong makes its job red.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs.pages import ROOT, blocks, commands, links, section, text_of
from tests.docs.test_extending import BASE, PROJECT
from tests.errors.test_written import MAPPING
from tests.phantomgpu.test_runs import reason
from typer.testing import CliRunner

from stretto.cli.app import app
from stretto.config import build_trainer, read_run_file
from stretto.report import read_ledger, read_metrics

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")


def typed(command: str, python: Python) -> str:
    """What a command of ours prints."""
    program, *arguments = shlex.split(command, comments=True)
    done = python("-m", program, *arguments, NO_COLOR="1", COLUMNS="200")
    assert done.returncode == 0, done.stderr[-2000:]
    return str(done.stdout)


def test_an_own_loop_with_ddp_and_a_ramp_in_tokens(launch_ranks: Python) -> None:
    (loop, *_) = blocks(text_of("docs/how-to/unequal-length.md"), "python")
    (ddp, *_) = blocks(section("docs/how-to/own-loop.md", "DDP and `no_sync`"), "python")
    lines = ddp.splitlines()
    start = next(line for line in lines if "init_process_group" in line)
    wrap = next(line for line in lines if "DistributedDataParallel" in line)
    model = re.search(r"^model = .*\n", loop, re.MULTILINE)
    assert model is not None
    wrapped = re.sub(r"torch\.nn\.Linear\(.*?\)", "model", wrap)
    script = loop.replace(model[0], f"{model[0]}{wrapped}\n")
    Path("job.py").write_text(f"import torch.distributed as dist\n{start}\n{script}{lines[-1]}\n")
    printed = launch_ranks(Path("job.py"), ranks=2).stdout.splitlines()
    assert len(printed) == 2
    alone = blocks(text_of("docs/how-to/unequal-length.md"), "text")[0]
    assert {line.partition(" in ")[0] for line in printed} == {alone.partition(" in ")[0]}


def test_the_plan_of_deepseek_v3(run_python: Python) -> None:
    command = commands(section("docs/guides/plans.md", "Plan without data"))[0]
    planned = typed(command, run_python)
    # arXiv 2412.19437, section 4.2: 3,072 to 15,360 over 469B of 14.8T tokens; 2.2e-4 and 7.3e-6.
    stages = re.findall(
        r"^ +\d+ +([\d,]+) +[\d,]+ +[\d,]+ +[\d,]+ +([\d,]+)", planned, re.MULTILINE
    )
    sizes = [int(size.replace(",", "")) for size, _ in stages]
    assert (sizes[0], sizes[-1]) == (3072, 15360)
    first_full = stages[sizes.index(15360)][1]
    assert 469e9 <= int(first_full.replace(",", "")) < 469.1e9
    for said in ("run of 14.8Ttok", "0.00022", "7.3e-06", "warm-up ends at batch 2,000"):
        assert said in planned


@pytest.mark.parametrize("trainer", ["hugging-face", "lightning"])
def test_a_trainer_that_one_has(trainer: str) -> None:
    # tests/integrations/test_examples.py runs the script before and after the same lines.
    page = f"docs/coming-from/{trainer}.md"
    (script, *_) = [one for one in links(text_of(page)) if one.endswith(".py")]
    name = Path(script).name
    shutil.rmtree("examples", ignore_errors=True)
    Path("examples").unlink(missing_ok=True)
    Path("mine").mkdir()
    shutil.copy(ROOT / "docs/coming-from" / script, Path("mine") / name)
    (shown,) = blocks(text_of(page), "diff")
    header = f"--- a/mine/{name}\n+++ b/mine/{name}\n"
    subprocess.run(["git", "apply", "-"], input=header + shown, text=True, check=True)
    after = (Path("mine") / name).read_text("utf-8")
    compile(after, name, "exec")
    assert "attach(trainer" in after


@pytest.mark.slow
def test_a_cnn_from_a_run_file_that_is_killed_and_resumed(run_python: Python) -> None:
    pytest.importorskip("sklearn")
    look = text_of("docs/start/look.md")
    (run_file, *_) = blocks(look, "yaml")
    checkpoint = next(
        line
        for line in blocks(text_of("docs/start/command-line.md"), "yaml")[0].splitlines()
        if line.startswith("checkpoint")
    )
    Path("digits.yaml").write_text(f"{run_file}{checkpoint}\n")
    train = next(one for one in commands(look) if one.startswith("stretto train"))
    typed(train, run_python)
    shutil.move("runs/digits", "runs/whole")
    program = [sys.executable, "-m", *shlex.split(train)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(program, env=environment) as killed:
        deadline = time.monotonic() + 200
        while not list(Path("runs/digits").glob("checkpoints/checkpoint-" + "[0-9]" * 12)):
            assert killed.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert "`--resume auto`" in text_of("docs/how-to/preemptible.md")
    typed(f"{train} --resume auto", run_python)
    whole, resumed = (list(read_ledger(Path("runs") / one)) for one in ("whole", "digits"))
    assert [row.counts for row in whole] == [row.counts for row in resumed]
    against = next(
        one for one in commands(text_of("docs/start/command-line.md")) if "--against" in one
    )
    assert "as planned" in typed(against.replace("runs/mine", "runs/digits"), run_python)
    measured = [read_metrics(Path("runs") / one).measured for one in ("whole", "digits")]
    assert measured[0] == measured[1]


@pytest.mark.long
@pytest.mark.skipif(reason is not None, reason=str(reason))
@pytest.mark.timeout(900)
def test_the_largest_batch_of_gpt2_on_an_rtx_4090(run_python: Python) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config().save_pretrained(".")
    shown = commands(text_of("docs/phantomgpu/questions.md"))
    command = next(one for one in shown if one.startswith("phantomgpu model") and "--ranks" in one)
    command = re.sub(r"--gpu \S+ --ranks \S+", "--gpu rtx4090", command.replace("4096", "1024"))
    printed = typed(command, run_python)
    batch = re.search(r"\b(\d+)\b.*GiB|largest\D*(\d+)", printed)
    assert batch is not None, printed


def merged(page: str, *titles: str) -> dict[str, Any]:
    """The lines of a run file that sections of a page show, together."""
    found: dict[str, Any] = {}
    for title in titles:
        for block in blocks(section(page, title), "yaml"):
            found |= yaml.safe_load(block)
    return found


def test_an_own_policy_metric_logger_and_the_best_checkpoint(
    run_python: Python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, parts = "docs/how-to/extend-sizes.md", "docs/how-to/extend-parts.md"
    code = blocks(text_of(sizes), "python") + blocks(text_of(parts), "python")
    Path("mine.py").write_text("\n".join(code))
    Path("base.py").write_text(PROJECT)
    early = yaml.safe_load(blocks(text_of("docs/how-to/early-stopping.md"), "yaml")[0])
    own = merged(sizes, "A batch size policy") | merged(parts, "A metric", "A logger")
    own["evaluate"] = {**early["evaluate"], **own["evaluate"]}
    monitored = {"checkpoint": {**early["checkpoint"], "every": "1ep"}}
    Path("run.yaml").write_text(yaml.safe_dump({**BASE, **own, **monitored, "max_duration": "4ep"}))
    typed("stretto train run.yaml --folder run --quiet", run_python)
    assert {row.counts["size"] for row in read_ledger(Path("run"))} >= {4, 8}
    assert "validation/error" in read_metrics(Path("run")).measured
    assert Path("run/losses.csv").read_text()
    monkeypatch.syspath_prepend(tmp_path)
    trainer = build_trainer(read_run_file("run.yaml"), folder=Path("run"))
    trainer.resume()
    for name in ("mine", "base"):
        del sys.modules[name]
    assert trainer.best is not None
    assert trainer.best.metric == "validation/loss"
    assert trainer.best.path.exists()


def test_text_of_unequal_length_from_a_run_file(run_python: Python) -> None:
    page = "docs/how-to/unequal-length.md"
    (lines,) = blocks(section(page, "In a run file"), "yaml")
    assert "examples/unequal_text.py" in text_of(page)
    given = yaml.safe_load((ROOT / "examples/unequal_text.yaml").read_text("utf-8"))
    shown = yaml.safe_load(lines)
    assert {key: given[key] for key in shown} == {**shown, "batch_size": given["batch_size"]}
    needed = {key: given[key] for key in ("model", "loss", "optimizer")}
    Path("run.yaml").write_text(yaml.safe_dump({**shown, **needed, "max_duration": "0.02ep"}))
    typed("stretto train run.yaml --folder run --quiet", run_python)
    rows = list(read_ledger(Path("run")))
    assert rows
    assert all(row.counts["tokens"] <= 4096 for row in rows)


MISTAKES = [
    "max_duration=3epoch",
    "max_duratoin=1ep",
    "max_duration=100",
    "batch_size=0ep:16 1epoch:64",
    "batch_size={DoublinRamp: {start: 8, end: 64, over: 40%}}",
    "schedules.lr={Cosin: {}}",
    "schedules.lr={Cosine: {warmup: 0.05}}",
    "schedules.lr={Cosine: {warm_up: 5%}}",
    "last_batch=kep",
    "stepping.rank_timeout=5ep",
    "checkpoint.every=1000",
    "evaluate.every=0.1",
]
WRONG, QUOTED = re.compile(r"[\w.%]+"), re.compile(r"'([^']+)'")


def plan_of(setting: str) -> tuple[int, str]:
    """What `stretto plan` answers to a setting: its exit code, and what it says."""
    done = CliRunner().invoke(app, ["plan", setting])
    error = done.exception
    return done.exit_code, done.output + (str(error) if error else "")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_whose_error_says_what_to_write(mistake: str) -> None:
    code, said = plan_of(mistake)
    assert code != 0
    advice = said.partition("; ")[2]
    key, _, _ = mistake.partition("=")
    words = sorted(WRONG.findall(mistake), key=len, reverse=True)
    whole = [f"{key}={one[0]}" for one in MAPPING.finditer(advice)]
    parts = [mistake.replace(word, one) for one in QUOTED.findall(advice) for word in words]
    assert any(plan_of(one)[0] == 0 for one in whole + parts), said
