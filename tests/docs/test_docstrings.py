"""Every example in a docstring is executed, and every public module is in the reference."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import stretto

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


@pytest.mark.parametrize("module", stretto._MODULES)
def test_every_public_module_is_in_the_reference(module: str) -> None:
    assert f"\n   stretto.{module}" in (ROOT / "docs" / "reference" / "api.md").read_text()
