"""Every example in a docstring is executed, and every floor has its page in the reference."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Files without an example are left out, so that the rest of the list means something.
WITH_EXAMPLES = [
    path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")
]
FLOORS = [
    path.stem
    for path in sorted((SOURCE / "stretto").iterdir())
    if not path.name.startswith(("_", ".")) and (path.suffix == ".py" or list(path.glob("*.py")))
]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=module_name)
def test_the_examples_of_a_module(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(module_name(path))
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(test, out=said.append)
    assert runner.tries > 0, "the module's examples are out of reach: not in a docstring?"
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize("floor", FLOORS)
def test_every_floor_has_its_page_in_the_reference(floor: str) -> None:
    page = ROOT / "docs" / "api" / f"{floor}.md"
    assert f"automodule:: stretto.{floor}\n" in page.read_text()
    assert f"\n{floor}\n" in (page.parent / "index.md").read_text()
