"""Every error that a user may meet: it says what, why, and what to write instead."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.errors.test_written import wrong

from stretto.errors import StrettoError

Thunk = Callable[[], object]

FOLDER = Path(__file__).parent / "errors"
FORM = re.compile(r"cannot .+: .+; .+", re.DOTALL)


def read_cases() -> list[tuple[str, Thunk]]:
    """Return the cases of all floors."""
    cases: list[tuple[str, Thunk]] = []
    for path in sorted(FOLDER.glob("cases_*.py")):
        spec = importlib.util.spec_from_file_location(f"errors_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cases += module.CASES
    return cases


def raised(thunk: Thunk, folder: Path, monkeypatch: pytest.MonkeyPatch) -> StrettoError:
    """Run one case in its own folder and return its error."""
    folder.mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        with pytest.raises(StrettoError) as caught:
            thunk()
    return caught.value


CASES = read_cases()


def test_each_case_has_an_id_of_its_own() -> None:
    doubled = [case for case, count in Counter(case for case, _ in CASES).items() if count > 1]
    assert not doubled
    assert not [case for case, _ in CASES if not re.fullmatch(r"[a-z0-9-]+", case)]


@pytest.mark.parametrize(("case", "thunk"), CASES, ids=[case for case, _ in CASES])
def test_an_error_says_what_why_and_what_to_write_instead(
    case: str, thunk: Thunk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = raised(thunk, tmp_path / case, monkeypatch)
    for message in error.messages:
        for said in (message.what, message.why, message.instead):
            assert said
            assert str(tmp_path) not in said
        assert FORM.fullmatch(str(message))
        assert wrong(message.instead) == []
