"""What the README says of phantomgpu is what it prints."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.phantomgpu.test_runs import reason

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(reason is not None, reason=str(reason))
def test_llama_on_eight_gpus() -> None:
    pytest.importorskip("transformers")
    readme = (ROOT / "README.md").read_text("utf-8")
    block = re.search(r"^\$ phantomgpu (.*)\n((?:.*\n)*?)```", readme, re.MULTILINE)
    assert block is not None
    arguments = [sys.executable if one == "python" else one for one in shlex.split(block[1])]
    done = subprocess.run(
        [sys.executable, "-m", "phantomgpu", *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    checker = doctest.OutputChecker()
    printed = done.stdout.strip() + "\n"
    assert checker.check_output(block[2], printed, doctest.ELLIPSIS), printed
