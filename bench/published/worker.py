"""A process with a phantom that replays rows, each in a fork of its own.

A fork before CUDA starts is a fresh process that need not import torch and transformers again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from published.packages import installed


class Worker:
    """Starts a script that calls `serve`, when it is first asked."""

    def __init__(
        self,
        script: Path,
        packages: str,
        *,
        requirements: tuple[str, ...],
        alone: tuple[str, ...],
        gpu: str,
    ) -> None:
        self.script, self.packages, self.gpu = script, packages, gpu
        self.requirements, self.alone = requirements, alone
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """Start the process; pip fills the folder of its packages first."""
        path = [str(installed(self.packages, self.requirements, self.alone))]
        path.append(str(Path(__file__).parents[1]))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "phantomgpu", "run", "--whole", "--gpu", self.gpu, "--"]
        return subprocess.Popen(
            [*command, sys.executable, str(self.script)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what the script found for a row.

        Raises:
            RuntimeError: The row failed.
        """
        if self.process is None or self.process.poll() is not None:
            self.process = self.start()
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(settings), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line or '{"problem": "the process ended"}')
        if "problem" in found:
            raise RuntimeError(found["problem"])
        return found


def serve(replay: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer each line of standard input, settings, with a line; each in a process of its own."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    for line in sys.stdin:
        here, there = os.pipe()
        if (child := os.fork()) == 0:
            os.close(here)
            with os.fdopen(there, "w") as pipe:
                json.dump(_answer(replay, json.loads(line)), pipe)
            os._exit(0)
        os.close(there)
        with os.fdopen(here) as pipe:
            found = pipe.read()
        os.waitpid(child, 0)
        print(found or '{"problem": "the process was killed"}', file=answers, flush=True)


def _answer(
    replay: Callable[[dict[str, Any]], dict[str, Any]], settings: dict[str, Any]
) -> dict[str, Any]:
    try:
        found = replay(settings)
    except Exception as error:  # noqa: BLE001 - it is the answer
        traceback.print_exc()
        found = {"problem": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": round(time.process_time(), 1)}
