"""Runs Python in a process that was forked from one that has imported torch already."""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
import time
from pathlib import Path

DRAIN_SECONDS = 0.05


def main(arguments: list[str], environment: dict[str, str], folder: str, output: str) -> None:
    """Run `python` with these arguments in a folder, with its output in files."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    faulthandler.enable()  # so SIGABRT shows where it waits
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, folder)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    kept = runpy.run_path(arguments[0], run_name="__main__")
    # DDP's reducer ends gloo's threads while it holds the GIL; one of them may still wait for it to
    # drop the context of the last backward pass (torch 2.13). Here they get it.
    time.sleep(DRAIN_SECONDS)
    kept.clear()


if __name__ == "__main__":
    main(**globals()["JOB"])
