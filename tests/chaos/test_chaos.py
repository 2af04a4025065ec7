"""The short form of the chaos suite; `make chaos` runs the long one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHORT = ("--seeds", "1", "--kills", "3", "--epochs", "2", "--jobs", "1")


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_if_nothing_had_happened(
    run_python: Callable[..., Any],
) -> None:
    done = run_python(str(Path(__file__).with_name("suite.py")), *SHORT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    kills = re.search(r"^([0-9]+) kills ", done.stdout, re.MULTILINE)
    assert kills is not None
    assert int(kills[1]) >= 3
    assert "0 bits of difference, 0 samples lost, 0 samples seen twice" in done.stdout
