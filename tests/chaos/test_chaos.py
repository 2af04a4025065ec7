"""The short form of the chaos suite; `make chaos` runs the long one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SHORT = ("--seeds", "1", "--kills", "3", "--epochs", "2", "--jobs", "1")


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_run_that_is_killed_ends_as_if_nothing_had_happened() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("suite.py")), *SHORT],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    kills = re.search(r"^([0-9]+) kills ", done.stdout, re.MULTILINE)
    assert kills is not None
    assert int(kills[1]) >= 3
    assert "0 bits of difference, 0 samples lost, 0 samples seen twice" in done.stdout
