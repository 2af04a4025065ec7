"""The frame of the published runs: what is kept, what is shown, and what the docs say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import published
import published_memory
import pytest
from published import page, results, rows
from published.rows import GIB, Family, Row

ROOT = Path(__file__).parents[2]
HALF = {"reserved": 2.0 * GIB}


def family(measure: Callable[[Row], dict[str, float]], *given: Row) -> Family:
    return Family("some", "Some", "https://example.com", "Text.", given, measure)


def ours(row: Row) -> dict[str, float]:
    return {what: size * row.settings.get("times", 1) for what, size in row.published.items()}


ROWS = (
    Row("one", HALF),
    Row("two", HALF, {"times": 1.04}, known="a cause"),
    Row("three", HALF, {"times": 0.9}),
    Row("four", HALF, {"times": 1.5}, fitted=True),
)


def test_a_broken_row_is_recorded_and_the_others_are_measured(tmp_path: Path) -> None:
    def measure(row: Row) -> dict[str, float]:
        if row.name == "one":
            raise ValueError("no such kernel")
        return ours(row)

    broken = family(measure, *ROWS)
    results.measure(broken, ROWS, folder=tmp_path)
    found = results.current(broken, tmp_path)
    assert list(found) == [row.name for row in ROWS]
    assert found["one"]["problem"] == "ValueError: no such kernel"
    assert found["one"]["ours"] == {}
    assert found["two"]["ours"] == {"reserved": 2.0 * GIB * 1.04}
    assert [one.cause for one in page.figures(broken, found)][:1] == [
        "failed: ValueError: no such kernel"
    ]


def test_a_missing_figure_is_a_problem(tmp_path: Path) -> None:
    less = family(lambda row: {"allocated": 1.0}, ROWS[0])
    results.measure(less, less.rows, folder=tmp_path)
    assert "reserved" in results.current(less, tmp_path)["one"]["problem"]


KILLED = """
import os, signal, sys
from pathlib import Path
from published import results
from published.rows import Family, Row

def measure(row):
    with open("log", "a") as log:
        log.write(row.name)
    if row.name == "b" and not Path("again").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return dict(row.published)

rows = tuple(Row(name, {"reserved": 1.0}) for name in "abc")
results.measure(Family("some", "", "", "", rows, measure), rows, folder=Path("results"))
"""


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bench")}

    def run() -> int:
        command = [sys.executable, "-c", KILLED]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode

    assert run() == -signal.SIGKILL
    (tmp_path / "again").touch()
    assert run() == 0
    assert (tmp_path / "log").read_text() == "ab" + "bc"


def test_what_has_a_result_is_measured_only_with_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def measure(row: Row) -> dict[str, float]:
        asked.append(row.name)
        return ours(row)

    some = family(measure, *ROWS[:2])
    for again in (False, False, True):
        results.measure(some, some.rows, again=again, folder=tmp_path)
    assert asked == ["one", "two", "one", "two"]
    changed = family(measure, ROWS[0], ROWS[1]._replace(settings={"times": 1.0}))
    results.measure(changed, changed.rows, folder=tmp_path)
    assert asked[4:] == ["two"]  # its settings are others now


def test_the_table_and_its_summary(tmp_path: Path) -> None:
    some = family(ours, *ROWS, Row("five", HALF))
    results.measure(some, ROWS, folder=tmp_path)
    text = page.tables([(some, results.current(some, tmp_path))])
    for line in (
        "| reserved | 3 of 4 | 1 | 1 | 2 | 4.00 % | 10.00 % |",  # without the fitted row
        "| Some | reserved | 3 of 4 | 1 | 1 | 2 | 4.00 % | 10.00 % |",
        "| one | reserved | 2.000 | 2.000 | +0.00 % |  |",
        "| two | reserved | 2.000 | 2.080 | +4.00 % | a cause |",
        "| three | reserved | 2.000 | 1.800 | -10.00 % | not explained |",
        "| four | reserved | 2.000 | 3.000 | +50.00 % | fitted |",
        "| five | reserved | 2.000 | - | - | not run |",
    ):
        assert line in text.splitlines()
    assert "1 of 3 published figures agree" in page.extremes(
        [(some, results.current(some, tmp_path))]
    )
    assert page.filled(f"a\n{page.START}\nold\n{page.END}\nb", text) == f"a\n{text}\nb"


def test_the_picture_has_a_point_for_each_figure(tmp_path: Path) -> None:
    some = family(ours, *ROWS)
    results.measure(some, ROWS, folder=tmp_path)
    drawn = ElementTree.fromstring(page.picture([(some, results.current(some, tmp_path))]))
    circles = list(drawn.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == 1 + 2 * len(ROWS)  # and the legend


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nothing"], "no family 'nothing'"),
        (["--only", "no such row"], "no row has"),
        (["--page", "others"], "leave their names"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        published_memory.main(arguments)
    assert word in capsys.readouterr().err


def test_a_source_that_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(rows.SOURCE, raising=False)
    with pytest.raises(FileNotFoundError, match="--source"):
        published.source()
    monkeypatch.setenv(rows.SOURCE, str(tmp_path))
    assert published.source() == tmp_path
    monkeypatch.setenv(rows.SOURCE, str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="none"):
        published.source()


FAMILIES = [published.load(key) for key in published.FAMILIES]


@pytest.mark.parametrize("given", FAMILIES, ids=published.FAMILIES)
def test_a_family(given: Family) -> None:
    names = [row.name for row in given.rows]
    assert len(set(names)) == len(names)
    kinds = {"allocated", "reserved", "mean allocated", "mean reserved"}
    assert all(row.published and set(row.published) <= kinds for row in given.rows)
    assert set(results.read(given.key)) == set(results.current(given))  # none of old settings


def test_the_page_is_of_the_results() -> None:
    """After a change: `python bench/published_memory.py --page`."""
    given = [(one, results.current(one)) for one in FAMILIES]
    assert page.tables(given) in page.PAGE.read_text("utf-8")
    assert page.extremes(given) in page.README.read_text("utf-8")
    assert page.picture(given) == page.PICTURE.read_text("utf-8")
