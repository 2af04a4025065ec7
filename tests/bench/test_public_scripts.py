"""What the docs say of the public scripts is what their runs gave."""

from __future__ import annotations

import json
from pathlib import Path

import public_scripts

PAGE = Path(__file__).parents[2] / "docs" / "phantomgpu.md"


def test_the_page_counts_the_kept_results() -> None:
    rows = json.loads(public_scripts.RESULTS.read_text())
    assert public_scripts.summary(rows) in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_each_kept_row_is_of_a_script() -> None:
    rows = json.loads(public_scripts.RESULTS.read_text())
    assert rows.keys() <= {one.name for one in public_scripts.SCRIPTS}


def test_only_a_report_in_time_counts() -> None:
    rows = [("fits", 59.9), ("does not fit", 10.0), ("fits", 60.0), ("failed", 5.0)]
    made = {
        str(at): {"status": status, "cpu_seconds": spent} for at, (status, spent) in enumerate(rows)
    }
    told = "Of 4 public training scripts, unmodified but for data, 3 report, 2 of them in under 60"
    assert public_scripts.summary(made) == f"{told} CPU seconds"
