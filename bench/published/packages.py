"""Packages of the versions that published runs used, in folders beside the environment's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".venvs"


def installed(
    name: str, requirements: Sequence[str], alone: Sequence[str] = (), folder: Path = FOLDER
) -> Path:
    """Return a folder for `PYTHONPATH`, which pip fills first if it is not complete.

    Args:
        name: The name of the folder.
        requirements: What is installed with all that it requires; nothing that requires torch.
        alone: What is installed without what it requires: torch stays that of the environment.
        folder: Where the folder is made.
    """
    made = folder / name
    done, content = made / "requirements.txt", "\n".join((*requirements, "", *alone))
    if not done.exists() or done.read_text("utf-8") != content:
        print(f"making {made} (once)", file=sys.stderr, flush=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--upgrade",
            "--target",
            str(made),
        ]
        for wanted in (requirements, ("--no-deps", *alone) if alone else ()):
            if wanted:
                subprocess.run([*pip, *wanted], check=True)
        done.write_text(content, "utf-8")  # last: a folder without it is not complete
    return made


@contextmanager
def first(folder: Path) -> Iterator[None]:
    """Let the processes that are started meanwhile find the packages of a folder first."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
