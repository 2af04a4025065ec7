"""An answer as a table and as a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stretto.errors import ConfigError, FitError
from stretto.memory import Answer
from stretto.memory.answer import Cost
from stretto.memory.limits import MemoryLimit
from stretto.report.memory import answers_table, draw_memory, memory_table

FOUND = Answer(
    size=100,
    certainty="phantom",
    too_large=101,
    limit=MemoryLimit(2050, "as stated"),
    reserve=50,
    cost=Cost(),
    peaks={1: 1010, 100: 2000, 101: 2010},
)


def test_the_table_has_the_headroom_of_each_size() -> None:
    lines = memory_table(FOUND).splitlines()
    assert lines[2].split() == ["100", "1.95", "KiB", "0", "B", "the", "largest", "that", "fits"]
    assert "-10 B" in lines[3]


def test_where_all_there_are_fit_that_is_said() -> None:
    found = replace(FOUND, too_large=None, peaks={100: 2000})
    assert "100 samples (phantom), all there are; more would fit" in str(found)
    assert memory_table(found).endswith("  all there are; more would fit")


def test_the_table_of_ranks_has_the_whole_batch() -> None:
    rows = [({"ranks": 8}, replace(FOUND, notes=("a note",))), ({"ranks": 4}, None)]
    head, eight, four, note = answers_table(rows).splitlines()
    assert head.split()[:3] == ["ranks", "micro-batch", "batch"]
    assert eight.split() == ["8", "100", "800", "1.95", "KiB", "phantom"]
    assert four.split() == ["4", "none", "fits"]
    assert note == "a note"


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.png", "b.png"):
        draw_memory(FOUND, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    draw_memory(replace(FOUND, peaks={1: 1000}, size=1), tmp_path / "one.svg")
    assert (tmp_path / "one.svg").stat().st_size > 1_000


def test_trials_have_no_picture_and_no_table(tmp_path: Path) -> None:
    trial = replace(FOUND, certainty="tried", peaks={})
    with pytest.raises(FitError) as caught:
        draw_memory(trial, tmp_path / "a.png")
    assert "trials" in caught.value.message.why
    with pytest.raises(ConfigError, match="picture"):
        draw_memory(FOUND, tmp_path / "a.doc")
    assert memory_table(trial) == ""
