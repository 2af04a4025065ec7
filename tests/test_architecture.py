"""The floors hold, and nothing happens on import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ("errors", "timing", "schedules", "batching", "ordering", "planning")

LINT = "from importlinter.cli import lint_imports_command as lint; lint()"

QUIET_IMPORT = """
import logging, os, signal, sys, warnings

def observe():
    return (
        dict(os.environ), list(logging.root.handlers), logging.root.level,
        set(logging.root.manager.loggerDict), list(warnings.filters), sys.excepthook,
        signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), list(sys.path),
    )

known, before = set(sys.modules), observe()
import {modules}
assert observe() == before, "the import changed the process"
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - known}}))
"""


Done = subprocess.CompletedProcess[str]


def run_python(code: str, *arguments: str, path: Path, cwd: Path) -> Done:
    """Run Python code in a process of its own, with `path` before everything installed."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
    )


def lint_imports(source: Path) -> Done:
    """Check the import contracts of pyproject.toml on the package in `source`."""
    config = str(ROOT / "pyproject.toml")
    return run_python(LINT, "--config", config, "--no-cache", "--no-logo", path=source, cwd=source)


def imported_by(modules: str) -> set[str]:
    """Return the top-level packages, beyond the standard library, that an import brings in."""
    done = run_python(QUIET_IMPORT.format(modules=modules), path=ROOT / "src", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split()) - sys.stdlib_module_names


def test_every_import_contract_is_kept() -> None:
    done = lint_imports(ROOT / "src")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        (
            "errors",
            "from stretto.timing import Time",
            "Each floor imports only from those below it",
        ),
        (
            "timing/unit",
            "def f() -> None:\n    import torch",
            "The core imports no torch and no numpy",
        ),
    ],
    ids=["an upward import", "torch in the core"],
)
def test_a_planted_import_breaks_its_contract(
    module: str, line: str, broken: str, tmp_path: Path
) -> None:
    for package in ("phantomgpu", "stretto"):
        shutil.copytree(ROOT / "src" / package, tmp_path / package)
    with (tmp_path / "stretto" / f"{module}.py").open("a") as file:
        file.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{broken} BROKEN" in " ".join(done.stdout.split())


def test_importing_stretto_imports_nothing_else_and_changes_nothing() -> None:
    assert imported_by("stretto") == {"stretto"}


def test_importing_the_core_imports_nothing_outside_the_standard_library() -> None:
    built = [floor for floor in CORE if list((ROOT / "src" / "stretto").glob(f"{floor}*"))]
    assert imported_by(", ".join(f"stretto.{floor}" for floor in built)) == {"stretto"}
