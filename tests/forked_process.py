"""Runs a script in a process that was forked from one that has imported torch already."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main(script: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Run the script as `python script arguments` does, with its output in files."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(**globals()["JOB"])
