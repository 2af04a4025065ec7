"""The first hour of a newcomer: plan, change a line, train, kill, resume, look at it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of this repository, with what is committed."""
    git = shutil.which("git")
    if shutil.which("npm") is None:
        pytest.skip("needs npm, for the chart library of the run page")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("the tests are not in a git repository")
    subprocess.run([git, "clone", "-q", "--depth", "1", ROOT.as_uri(), tmp_path / "c"], check=True)
    return tmp_path / "c"


def test_the_first_hour(clone: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(clone / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }

    def stretto(*arguments: str) -> str:
        command = [sys.executable, "-m", "stretto", *arguments]
        done = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    # An installation does this, too: the chart library of the page comes from npm.
    subprocess.run([sys.executable, "tools/vendor_uplot.py"], cwd=clone, check=True)
    assert "20,480 samples on 1 rank" in stretto("plan")

    text = (clone / "src/stretto/examples/default.yaml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("batch_size:"))
    changed = text.replace(line, "batch_size: {DoublingRamp: {start: 16, end: 128, over: 50%}}")
    (clone / "run.yaml").write_text(changed)
    shorter = ("run.yaml", "scale_schedule=0.25", "checkpoint.every=10ba")
    planned = stretto("plan", *shorter)
    assert "DoublingRamp(16, 128, '0.5dur')" in planned
    batches = int(planned.split(":")[1].split()[0])

    folder = clone / "runs" / "mine"
    train = [sys.executable, "-m", "stretto", "train", *shorter, "--folder", "runs/mine"]
    process = subprocess.Popen(train, cwd=clone, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    # Not checkpoint-*: a folder that is being written ends in .tmp, and has its manifest, too.
    while not list(folder.glob("checkpoints/checkpoint-" + "[0-9]" * 12)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()

    resumed = stretto("train", *shorter, "--folder", "runs/mine", "--resume", "auto")
    assert "resumed from runs/mine/checkpoints/checkpoint-" in resumed
    assert f"{batches:,} batches" in resumed
    assert "validation: loss" in resumed
    assert len((folder / "ledger.csv").read_text().splitlines()) == batches + 1
    assert "as planned" in stretto("plan", "--against", "runs/mine")
    assert "validation/loss" in stretto("report", "runs/mine")
    stretto("report", "runs/mine", "--html", "page.html")
    page = (clone / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "resume" in page
