"""An answer as a table."""

from __future__ import annotations

from dataclasses import replace

from stretto.memory import Answer
from stretto.memory.answer import Cost
from stretto.memory.limits import MemoryLimit
from stretto.report.tables import memory_table

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


def test_trials_have_no_table() -> None:
    assert memory_table(replace(FOUND, certainty="tried", peaks={})) == ""
