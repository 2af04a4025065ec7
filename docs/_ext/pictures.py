"""Pictures of the gallery: the plan of an example, or the run if only the run knows its sizes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "gallery"
MEASURED = ("noise",)
"""Run files whose sizes are decided during the run: these are trained, which takes longer."""


def key(example: Path) -> str:
    """Return what a picture depends on: the example and the source of stretto."""
    digest = hashlib.sha256()
    for path in (example, *sorted((ROOT / "src" / "stretto").rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(*command: str, folder: Path) -> None:
    """Run a command; its output is part of the error if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def draw(example: Path, picture: Path) -> None:
    """Draw an example. A script draws into the file that it is given."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if example.suffix == ".py":
            run(str(example), str(picture), folder=folder)
            return
        if example.stem not in MEASURED:
            source = f"build_plan(read_run_file(Path({str(example)!r})))"
        else:
            source = f"Path({example.stem!r})"
            run("-m", "stretto", "train", str(example), "--folder", example.stem, folder=folder)
        code = (
            "from pathlib import Path; from stretto.config import build_plan, read_run_file; "
            f"from stretto.report import draw; draw({source}, Path({str(picture)!r}))"
        )
        run("-c", code, folder=folder)


def write(folder: Path) -> None:
    """Draw every example whose picture is missing or old."""
    folder.mkdir(parents=True, exist_ok=True)
    for example in sorted([*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("*.py")]):
        picture, kept = folder / f"{example.stem}.svg", folder / f"{example.stem}.key"
        current = key(example)
        if picture.exists() and kept.exists() and kept.read_text() == current:
            continue
        draw(example, picture)
        kept.write_text(current)
