"""The public names: importable, documented, lazy, and known to type checkers."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import typing
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
    lines += [f"from stretto import {module} as {module}" for module in stretto._MODULES]
    for module, names in face.items():
        lines += [f"from {module} import {name} as {name}" for name in names]
    exported = sorted(name for names in face.values() for name in names)
    lines += ["", "_FACE: dict[str, tuple[str, ...]]", "_HOME: dict[str, str]"]
    lines += ["_MODULES: tuple[str, ...]"]
    lines += ["__version__: str", "__all__ = ["]
    lines += [f'    "{name}",' for name in exported]
    return "\n".join([*lines, "]", ""])


@pytest.mark.parametrize("name", stretto.__all__)
def test_every_name_is_importable_from_its_own_module(name: str) -> None:
    value = getattr(stretto, name)
    assert getattr(importlib.import_module(stretto._HOME[name]), name) is value


EVERYTHING = sorted(
    f"{module}.{name}"
    for module in ("batching", "data", "noise", "optim", "schedules", "timing", "training")
    for name in importlib.import_module(f"stretto.{module}").__all__
)


@pytest.mark.parametrize("path", [*stretto.__all__, *EVERYTHING])
def test_every_name_is_documented(path: str) -> None:
    value = functools.reduce(getattr, path.split("."), stretto)
    if callable(value) and typing.get_origin(value) is None:
        assert value.__doc__, f"{path} has no docstring of its own"
        assert path in EVERYTHING or ">>>" in value.__doc__, f"{path} shows no example"


def test_submodules_need_no_import_of_their_own() -> None:
    code = "import stretto; print(stretto.schedules.WSD is stretto.WSD, stretto.batching.Fixed(8))"
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert printed.stdout == "True Fixed(8)\n"


def test_names_are_sorted_within_each_module() -> None:
    for module, names in stretto._FACE.items():
        assert list(names) == sorted(names), module


def test_modules_are_sorted_and_no_name_has_two_homes() -> None:
    assert list(stretto._FACE) == sorted(stretto._FACE)
    assert len(stretto._HOME) == sum(len(names) for names in stretto._FACE.values())


def test_all_and_dir_list_the_face() -> None:
    assert stretto.__all__ == sorted(stretto._HOME)
    assert set(dir(stretto)) == {*stretto.__all__, *stretto._MODULES, "__version__"}


def test_no_name_hides_a_module() -> None:
    modules = {path.stem for path in ROOT.iterdir()}
    assert modules.isdisjoint(stretto.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="attribute"):
        _ = stretto.Tempo  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names() -> None:
    expected = stub_of(stretto._FACE)
    if os.environ.get("STRETTO_UPDATE_GOLDEN") == "1":
        STUB.write_text(expected)
    assert STUB.read_text() == expected, "run with STRETTO_UPDATE_GOLDEN=1 to rewrite the stub"
