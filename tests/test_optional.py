"""Optional packages: imported where used, and named with their extra when missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stretto._optional import import_optional
from stretto.errors import MissingPackageError


def test_returns_the_module_itself() -> None:
    assert import_optional("json.decoder", "plot").__name__ == "json.decoder"


def test_names_the_package_and_the_extra() -> None:
    message = "it is not installed; in a clone of stretto, run pip install '.[wandb]'"
    with pytest.raises(MissingPackageError, match=re.escape(message)) as caught:
        import_optional("absent.part", "wandb")
    assert caught.value.name == "absent"
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("text", ["import another_absent", "raise ImportError('broken')"])
def test_an_installed_but_broken_package_keeps_its_own_error(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"another_absent|broken") as caught:
        import_optional("broken_package", "plot")
    assert not isinstance(caught.value, MissingPackageError)
