"""Every error message that a user may meet, against the golden file (see golden/README.md)."""

from __future__ import annotations

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.errors import StrettoError

Thunk = Callable[[], object]

FOLDER = Path(__file__).parent / "golden"
GOLDEN = FOLDER / "errors.txt"
FORM = re.compile(r"cannot .+: .+; .+", re.DOTALL)
IS_UPDATE = os.environ.get("STRETTO_UPDATE_GOLDEN") == "1"


def read_cases() -> list[tuple[str, Thunk]]:
    """Return the cases of all floors."""
    cases: list[tuple[str, Thunk]] = []
    for path in sorted(FOLDER.glob("cases_*.py")):
        spec = importlib.util.spec_from_file_location(f"golden_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cases += module.CASES
    return cases


def read_golden() -> dict[str, str]:
    """Return what the golden file says: id -> 'type | message'."""
    if not GOLDEN.exists():
        return {}
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    return {case: said for case, _, said in (line.partition(" | ") for line in lines)}


def observe(thunk: Thunk, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run one case in its own folder and return 'type | message', on one line."""
    folder.mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        with pytest.raises(StrettoError) as caught:
            thunk()
    message = str(caught.value)
    assert FORM.fullmatch(message), f"not of the form 'cannot ...: ...; ...': {message}"
    return f"{type(caught.value).__name__} | {message}".replace("\\", "\\\\").replace("\n", "\\n")


CASES = read_cases()


def test_each_case_has_an_id_of_its_own() -> None:
    doubled = [case for case, count in Counter(case for case, _ in CASES).items() if count > 1]
    assert not doubled
    assert not [case for case, _ in CASES if not re.fullmatch(r"[a-z0-9-]+", case)]


def test_the_golden_file_holds_exactly_the_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if IS_UPDATE:
        said = {case: observe(thunk, tmp_path / case, monkeypatch) for case, thunk in CASES}
        text = "".join(f"{case} | {said[case]}\n" for case in sorted(said))
        GOLDEN.write_text(text, encoding="utf-8")
    assert sorted(read_golden()) == sorted(case for case, _ in CASES)


@pytest.mark.skipif(IS_UPDATE, reason="the golden file is being rewritten")
@pytest.mark.parametrize(("case", "thunk"), CASES, ids=[case for case, _ in CASES])
def test_the_message_is_the_golden_one(
    case: str, thunk: Thunk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert observe(thunk, tmp_path / case, monkeypatch) == read_golden().get(case)
