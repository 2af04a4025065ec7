"""Ray Train: a worker is killed and restarted, then the job continues with other workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="needs ray[train]: make test-adapters")

import torch
from tests.scale import reference

ROOT = Path(__file__).parents[2]
CLOSE = 1e-12


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_killed_workers_come_back_and_their_number_changes(tmp_path: Path, version: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "OMP_NUM_THREADS": "1",
        "RAY_TRAIN_V2_ENABLED": str(int(version == "v2")),
        "RAY_USAGE_STATS_ENABLED": "0",
        # One process less in each attempt. It would look for machines that are taken away.
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ray_job.py")), str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    began = [json.loads(line) for line in (tmp_path / "began.jsonl").read_text().splitlines()]
    print(began)
    assert [row[:2] for row in began] == [[2, False], [2, True], [1, True]]
    assert 0 == began[0][2] < began[1][2] <= began[2][2]
    difference = float((torch.load(tmp_path / "weights.pt") - reference()).abs().max())
    print("largest difference of the weights", difference)
    assert difference < CLOSE
