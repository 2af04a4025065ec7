"""Nodes that do not see each other's disks resume from copies in a bucket."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scale import reference

ROOT = Path(__file__).parents[3]


def launch(out: Path, stop: int | str) -> subprocess.CompletedProcess[str]:
    how = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint=localhost:0"]
    script = str(Path(__file__).with_name("nodes_run.py"))
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *how, script, str(out), str(stop)],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_nodes_without_a_common_disk_resume_from_the_copies(tmp_path: Path) -> None:
    first = launch(tmp_path, 400)
    assert first.returncode == 0, first.stderr[-3000:]
    assert not (tmp_path / "node1" / "run" / "checkpoints").exists()
    empty = launch(tmp_path, "empty")
    assert empty.returncode == 0, empty.stderr[-3000:]
    for rank in range(2):
        why, sample = json.loads((tmp_path / f"resumed{rank}").read_text())
        assert "rank 1" in why
        assert sample > 400  # the first rank has copied its checkpoint for the other one
    shutil.rmtree(tmp_path / "node1" / "run" / "checkpoints")
    second = launch(tmp_path, 900)
    assert second.returncode == 0, second.stderr[-3000:]
    began = int((tmp_path / "began1").read_text())
    assert began > 400
    assert (tmp_path / "node1" / "run" / "checkpoints" / f"checkpoint-{began:012d}").is_dir()
    shutil.rmtree(tmp_path / "node0")  # both nodes are new
    shutil.rmtree(tmp_path / "node1")
    third = launch(tmp_path, 0)
    assert third.returncode == 0, third.stderr[-3000:]
    for rank in range(2):
        found = torch.load(tmp_path / f"weights{rank}.pt")
        assert float((found - reference()).abs().max()) < 1e-12


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_of_a_sharded_model_share_out_what_they_fetch(
    launch_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    script = Path(__file__).with_name("sharded_run.py")
    launch_ranks(script, tmp_path, "first")
    launch_ranks(script, tmp_path, "second")
    fetched: list[str] = []
    for rank in range(2):
        began, files = json.loads((tmp_path / f"fetched{rank}.json").read_text())
        assert began == 10
        fetched += {*files} - {"manifest.json", "state.json"}  # read to see what is newest
    assert sorted(fetched) == sorted(
        f"{group}-{rank:05d}-of-00002.safetensors"
        for group in ("model", "optimizer", "random")
        for rank in range(2)
    )
    launch_ranks(script, tmp_path, "whole")
    assert torch.equal(torch.load(tmp_path / "second0.pt"), torch.load(tmp_path / "whole0.pt"))
