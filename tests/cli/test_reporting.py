"""`stretto report` and `stretto advise` on folders that somebody has damaged, or that are odd."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.cli import main
from stretto.run_folder import EVENTS, LEDGER, LEDGER_COLUMNS, METRICS, PLAN

CLOCK = {"ep": 1, "ba": 8, "sp": 64, "tok": 0, "dur": 1, "sec": 1}
GOOD = CLOCK | {"loss": 1.25, "batch_size": 8, "step_seconds": 0.1}
HEADER = ",".join(LEDGER_COLUMNS)
Stretto = Callable[..., Any]


class Said(NamedTuple):
    code: int
    out: str
    err: str


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> Said:
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    return Said(int(ended.value.code or 0), *capsys.readouterr())


def run(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (folder / METRICS).write_text(text)
    (folder / LEDGER).write_text(f"{HEADER}\n")
    return folder


def damaged(folder: Path, kind: str) -> Path:
    run(folder, GOOD)
    file = folder / METRICS
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    elif kind == "hole":
        with file.open("wb") as opened:
            opened.truncate(1 << 40)
    elif kind == "deep":
        file.write_text("[" * 200_000 + "\n")
    elif kind == "empty":
        file.touch()
    return folder


KINDS = ("pipe", "device", "folder", "hole", "deep", "empty", "missing")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", ["", "--json", "--html"])
def test_one_damaged_folder_is_named_and_the_others_are_shown(
    kind: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = run(tmp_path / "good", GOOD)
    bad = damaged(tmp_path / "bad", kind)
    if option == "--html" and kind in ("missing", "empty"):
        return  # a page of a ledger is one
    more = [option, *([tmp_path / "page.html"] if option == "--html" else [])] if option else []
    found = said(capsys, "report", bad, good, *more)
    assert found.code == 1
    assert str(bad) in found.err
    if option == "--html":
        assert (tmp_path / "page.html").exists()
    else:
        assert "1.25" in found.out
    if option == "--json":
        assert [set(one) >= {"problem"} for one in json.loads(found.out)] == [True, False]
    assert said(capsys, "report", bad, bad).code == said(capsys, "report", bad).code == 2


@pytest.mark.parametrize(
    "odd",
    [
        {"batch_size": None},
        {"batch_size": "many"},
        {"batch_size": 0},
        {"batch_size": 1e308, "step_seconds": 1e308},
        {"step_seconds": 1e308},
        {"step_seconds": 0.1, "sample_seconds": math.inf},
        {"noise_scale": 1e308, "noise_scale_low": -1e308},
    ],
    ids=str,
)
def test_what_only_advice_needs_hides_no_report(
    odd: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {name: value for name, value in GOOD.items() if name != "batch_size"} | odd
    folder = run(tmp_path / "a", line)
    (folder / PLAN).write_text('{"stages": null}')
    found = said(capsys, "report", folder, "--quiet")
    assert found.code == 0
    assert said(capsys, "report", folder).out.count("1.25") == 1
    assert said(capsys, "advise", folder).code == 0


def test_an_evaluation_without_a_line_of_training_is_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "a", CLOCK | {"validation/loss": 1.5})
    assert "1.5" in said(capsys, "report", folder).out
    assert "not known" in said(capsys, "advise", folder).out


def test_the_batch_size_is_that_of_the_batch_before_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of the last line of training, which may be long ago."""
    rows = [CLOCK | {"ba": ba, "validation/loss": 1 / ba} for ba in (6, 8, 9)]
    folder = run(tmp_path / "a", GOOD | {"ba": 2}, *rows)
    lines = [f"{batch},0,{8 * batch},0,8,0,1,0.5,{8 if batch < 7 else 64}" for batch in range(8)]
    (folder / LEDGER).write_text("\n".join([HEADER, *lines, ""]))
    _, *table = said(capsys, "report", folder).out.strip().splitlines()[1:]
    sizes = [line[table[0].index("time") + 4 :].split()[0] for line in table[1:]]
    assert sizes == ["8", "64", "1.2500"]  # the last one is not in the ledger


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
NAMES = st.sampled_from(
    [*CLOCK, "loss", "batch_size", "step_seconds", "sample_seconds", "noise_scale", "a/loss", "x"]
)
FILES = {
    METRICS: st.builds(lambda odd: GOOD | odd, st.dictionaries(NAMES, VALUES, max_size=4)),
    EVENTS: st.builds(
        lambda odd: CLOCK | {"event": "start", "text": "", "utc": "2026-01-01", "attempt": 1} | odd,
        st.dictionaries(st.sampled_from(["facts", "changes", "ba", "event"]), VALUES, max_size=3),
    ),
    PLAN: st.dictionaries(
        st.sampled_from(["stages", "curve", "end", "resumed_at", "world_size"]), VALUES
    ),
}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.fixed_dictionaries({name: st.lists(one, max_size=4) for name, one in FILES.items()})
)
def test_any_content_ends_with_a_report_or_one_line(
    lines: dict[str, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with TemporaryDirectory() as name:
        folder, good = Path(name) / "odd", run(Path(name) / "good", GOOD)
        run(folder)
        for file, content in lines.items():
            (folder / file).write_text("".join(json.dumps(one) + "\n" for one in content))
        for verb, expected in (("report", {0, 1}), ("advise", {0, 2})):
            paths = [folder, good] if verb == "report" else [folder]
            found = said(capsys, verb, *paths)
            assert found.code in expected
            assert verb == "advise" or "1.25" in found.out
            assert "Traceback" not in found.err
