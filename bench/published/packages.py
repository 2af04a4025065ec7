"""Packages of the versions that published runs used, in folders beside the environment's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
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
        subprocess.run([*pip, *requirements], check=True)
        subprocess.run([*pip, "--no-deps", *alone], check=True)
        done.write_text(content, "utf-8")  # last: a folder without it is not complete
    return made
