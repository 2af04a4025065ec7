"""Packages that a family needs in other versions, in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".venvs"


@contextmanager
def provided(name: str, *requirements: str) -> Iterator[None]:
    """Put packages before all others in the processes that are started meanwhile.

    They are installed first if they are not there, each without what it asks for: torch stays.
    """
    folder, wanted = FOLDER / name, "\n".join(requirements)
    done = folder / "requirements.txt"  # written last
    if not done.exists() or done.read_text("utf-8") != wanted:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), *requirements], check=True)
        done.write_text(wanted, "utf-8")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
