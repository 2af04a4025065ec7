"""The notebooks run from top to bottom in an empty folder, and print what is kept in them.

Without Jupyter: a cell is Python, a file (`%%writefile NAME`), or a command (`!phantomgpu ...`).
Cells with the tag `varies` keep no output. `STRETTO_UPDATE_GOLDEN=1` writes the outputs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.phantomgpu.test_runs import reason

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "docs" / "notebooks"
DOORS = [
    pytest.param("own-loop"),
    pytest.param(
        "hugging-face", marks=pytest.mark.long
    ),  # docs/start/hugging-face.md shows the same
    pytest.param(
        "no-gpu",
        marks=[pytest.mark.long, pytest.mark.skipif(reason is not None, reason=str(reason))],
    ),
]


def command(line: str) -> str:
    """Return what a command prints; its programs are those of this Python."""
    own = {"phantomgpu": [sys.executable, "-m", "phantomgpu"], "python": [sys.executable]}
    words = [part for word in shlex.split(line) for part in own.get(word, [word])]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ran(source: str, names: dict[str, Any]) -> str:
    """Run a cell; return what it prints."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%writefile "):
        path = Path(first.partition(" ")[2])
        path.write_text(rest + "\n", encoding="utf-8")
        return f"Writing {path}\n"
    if first.startswith("!"):
        assert not rest, "one command in a cell"
        return command(first[1:])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, "<cell>", "exec", dont_inherit=True), names)
    return printed.getvalue()


def steady(printed: str) -> str:
    """Leave out what each new measurement of the published runs changes."""
    return re.sub(r"published runs reached .*", "", printed)


def outputs(printed: str) -> list[dict[str, Any]]:
    """Return what a cell printed as a notebook keeps it."""
    lines = printed.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("door", DOORS)
def test_a_notebook_prints_what_it_keeps(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if door == "hugging-face":
        pytest.importorskip("transformers")
    path = NOTEBOOKS / f"{door}.ipynb"
    book = json.loads(path.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        printed = ran("".join(cell["source"]), names)
        varies = "varies" in cell["metadata"].get("tags", [])
        if os.environ.get("STRETTO_UPDATE_GOLDEN"):
            cell["outputs"] = [] if varies else outputs(printed)
        elif not varies:
            kept = "".join(line for one in cell["outputs"] for line in one["text"])
            assert steady(printed) == steady(kept), "write it again: STRETTO_UPDATE_GOLDEN=1"
    if os.environ.get("STRETTO_UPDATE_GOLDEN"):
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def test_each_door_has_a_notebook() -> None:
    names = [str(door.values[0]) for door in DOORS]
    assert sorted(names) == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in names if f"(docs/notebooks/{name}.ipynb)" not in readme] == []


def test_cells_are_run_as_jupyter_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert ran("%%writefile one.py\nprint(1)", names) == "Writing one.py\n"
    assert ran("!python one.py", names) == "1\n"
    assert ran("two = 2", names) == ""
    assert ran("print(two)", names) == "2\n"
