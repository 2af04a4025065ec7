"""The flat public face: every name is there, documented, lazy, and known to type checkers."""

from __future__ import annotations

import importlib.util
import inspect
import os
from pathlib import Path

import pytest

import stretto

ROOT = Path(stretto.__file__).parent
STUB = ROOT / "__init__.pyi"


def stub_of(face: dict[str, tuple[str, ...]]) -> str:
    """Return the text of `__init__.pyi` for a table of the public face."""
    lines = [
        "# Written by tests/test_public_face.py from the table in __init__.py; do not edit.",
    ]
    for module, names in face.items():
        lines += [f"from {module} import {name} as {name}" for name in names]
    exported = sorted(name for names in face.values() for name in names)
    lines += ["", "_FACE: dict[str, tuple[str, ...]]", "_HOME: dict[str, str]"]
    lines += ["__version__: str", "__all__ = ["]
    lines += [f'    "{name}",' for name in exported]
    return "\n".join([*lines, "]", ""])


@pytest.mark.parametrize("name", stretto.__all__)
def test_every_name_is_importable_from_its_own_module(name: str) -> None:
    value = getattr(stretto, name)
    assert getattr(importlib.import_module(stretto._HOME[name]), name) is value


@pytest.mark.parametrize("name", stretto.__all__)
def test_every_name_is_documented(name: str) -> None:
    value = getattr(stretto, name)
    assert value.__doc__, f"{name} has no docstring of its own"
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    assert is_error or ">>>" in value.__doc__, f"the docstring of {name} shows no example"


def test_names_are_sorted_within_each_module() -> None:
    for module, names in stretto._FACE.items():
        assert list(names) == sorted(names), module


def test_modules_are_sorted_and_no_name_has_two_homes() -> None:
    assert list(stretto._FACE) == sorted(stretto._FACE)
    assert len(stretto._HOME) == sum(len(names) for names in stretto._FACE.values())


def test_all_and_dir_list_the_face() -> None:
    assert stretto.__all__ == sorted(stretto._HOME)
    assert set(dir(stretto)) == {*stretto.__all__, "__version__"}


def test_no_name_hides_a_module() -> None:
    modules = {path.stem for path in ROOT.iterdir()}
    assert modules.isdisjoint(stretto.__all__)


def test_every_error_is_exported() -> None:
    errors = importlib.import_module("stretto.errors")
    leaves = {n for n, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, Exception)}
    assert leaves == set(stretto._FACE["stretto.errors"])


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stretto' has no attribute 'Tempo'"):
        _ = stretto.Tempo  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names() -> None:
    expected = stub_of(stretto._FACE)
    if os.environ.get("STRETTO_UPDATE_GOLDEN") == "1":
        STUB.write_text(expected)
    assert STUB.read_text() == expected, "run with STRETTO_UPDATE_GOLDEN=1 to rewrite the stub"
