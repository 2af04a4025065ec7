"""The job script for SLURM, with fakes of `srun` and `scontrol`, over a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.scale import planned_ids, reference, traced_ids

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm.sh"
RUN = ROOT / "tests" / "distributed" / "elastic_run.py"
SRUN = """#!/bin/bash
shift
"$@" & child=$!
trap 'kill -TERM $child' TERM
wait $child; code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; echo other; else echo "$@" >> "$REQUEUED"; fi
"""


JOB = str(os.getpid())  # the port of the rendezvous follows from it


def environment(folder: Path) -> dict[str, str]:
    (folder / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "REQUEUED": str(folder / "requeued"),
    }


def lines(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.glob("trace-*"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_a_run_over_a_time_limit_ends_like_one_process(tmp_path: Path) -> None:
    around = environment(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = ["bash", str(SCRIPT), *torchrun, str(RUN), str(tmp_path), "0.02", "100ep"]
    codes = []
    for limit in (True, False):
        before = lines(tmp_path)
        with (tmp_path / "log").open("a") as log:
            job = subprocess.Popen(command, env=around, stdout=log, stderr=log)
        while limit and lines(tmp_path) < before + 30 and job.poll() is None:
            time.sleep(0.2)
        if limit:
            job.send_signal(signal.SIGUSR1)
        codes.append(job.wait(timeout=200))
    log_text = (tmp_path / "log").read_text()
    assert codes == [0, 0], log_text[-3000:]
    assert (tmp_path / "requeued").read_text().splitlines() == [f"requeue {JOB}"]
    began = [
        tuple(map(int, line.split())) for line in (tmp_path / "began").read_text().splitlines()
    ]
    assert [world for world, _ in began] == [2, 2]
    assert 0 == began[0][1] < began[1][1]
    assert traced_ids(tmp_path) == planned_ids()
    assert float((torch.load(tmp_path / "weights.pt") - reference()).abs().max()) < 1e-12


def test_a_command_that_fails_by_itself_is_not_requeued(tmp_path: Path) -> None:
    around = environment(tmp_path)
    done = subprocess.run(["bash", str(SCRIPT), "bash", "-c", "exit 3"], env=around, check=False)
    assert done.returncode == 3
    assert not (tmp_path / "requeued").exists()
    none = subprocess.run(["bash", str(SCRIPT)], env=around, check=False, capture_output=True)
    assert none.returncode == 2
