"""The benchmark of a GPU runs from its beginning to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "gpu.py"


@pytest.mark.slow
@pytest.mark.phantom
def test_the_short_form_answers_every_question() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--quick"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    # On the phantom it may end badly after its last line, as torch's destructors run.
    lines = done.stdout.splitlines()
    assert lines, done.stderr[-2000:]
    begins = [line.split(":")[0].split("  ")[0] for line in lines]
    for expected in ("MLP, AdamW", "GPT, SDPA, bf16", "try", "auto", "probe", "predict", "noise"):
        assert expected in begins, done.stdout
