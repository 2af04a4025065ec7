"""The walks of CONTRIBUTING.md, followed word for word on a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALKS = (
    (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("# Add a part")[2].split("\n## ")[1:]
)
BLOCK = re.compile(
    r"(?P<where>At the end of|new file)\s`(?P<path>\S+?)`[^`]*?:\n\n"
    r"```\w+\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
EXPORT = re.compile(r"Add `(?P<name>\w+)` to the imports and to `__all__` of\s`(?P<path>\S+?)`")
HELD = ("tests/docs/test_docstrings.py", "tests/phantomgpu/test_gpus.py")
"""What holds all parts, beside the test of each walk."""


def export(path: Path, name: str, module: str) -> None:
    """Import a name into a package, and list it."""
    text = path.read_text("utf-8").replace("__all__ = [", f'__all__ = [\n    "{name}",')
    path.write_text(text.replace("\n__all__", f"from {module} import {name}\n\n__all__"), "utf-8")


def follow(walk: str, tree: Path) -> list[str]:
    """Do what a walk says; return its tests."""
    blocks = list(BLOCK.finditer(walk))
    for block in blocks:
        path = tree / block["path"]
        assert path.exists() == (block["where"] == "At the end of"), path
        before = path.read_text("utf-8") + "\n\n" * (path.suffix == ".py") if path.exists() else ""
        path.write_text(before + block["text"], "utf-8")
    for said in EXPORT.finditer(walk):
        source = blocks[0]["path"].removeprefix("src/").removesuffix(".py").replace("/", ".")
        export(tree / said["path"], said["name"], source)
    return [block["path"] for block in blocks if block["path"].startswith("tests/")]


@pytest.mark.slow
def test_the_walks(tmp_path: Path) -> None:
    for part in ("src", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "found", "grown")
        shutil.copytree(ROOT / part, tmp_path / part, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "docs", "examples", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    files = [file for walk in WALKS for file in follow(walk, tmp_path)]
    assert len(files) == len(WALKS) == 4
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(
        [*command, *files, *HELD],
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
