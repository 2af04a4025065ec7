"""Runs programs of this folder with the CUDA build of torch, on a device that is not there.

`tools/phantom/make.py` makes the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from peer_environments import FOLDER

HERE = Path(__file__).parent
VERSION = "2.13.0"
"""The version of torch whose results are saved."""
KIND = "h100"
"""What is imitated: the number of multiprocessors decides what some kernels allocate."""


def folder_of(version: str = VERSION) -> Path:
    """Return the folder of a phantom, which must be there."""
    folder = FOLDER / f"phantom-{version}"
    if not (folder / "replay").exists():
        raise SystemExit(
            f"{folder} is not there; run python tools/phantom/make.py --torch {version}"
        )
    return folder


def run(program: str, *arguments: str, memory: int, version: str = VERSION) -> dict[str, Any]:
    """Return what a program prints in its last line, as JSON; or `error`.

    Args:
        program: a file of this folder.
        arguments: for the program.
        memory: of the device, in GiB; 0: there is no device, and it is a torch for CPUs.
        version: of torch.
    """
    folder = folder_of(version)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "OMP_NUM_THREADS": "1",
        "PHANTOM_DEVICES": "1" if memory else "0",
        "PHANTOM_KIND": KIND,
        "PHANTOM_MEMORY": str(memory << 30),
        "PYTHONPATH": str(HERE.parent / "src"),
    }
    command = [str(folder / "venv" / "bin" / "python"), str(HERE / program), *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=3600, check=False
    )
    if done.returncode:
        return {"error": (done.stderr.splitlines() or ["no message"])[-1]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row
