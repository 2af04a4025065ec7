"""Rows that are replayed in forks of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from published import peft_image

BENCH = Path(__file__).parents[2] / "bench"
SERVED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from published.worker import serve

seen = []

def replay(settings):
    print("not an answer")
    if settings.get("kill"):
        os.kill(os.getpid(), 9)
    seen.append(1 / settings["divisor"])
    return {"seen": len(seen)}

serve(replay)
"""


def test_each_row_is_answered_by_a_process_of_its_own() -> None:
    rows = [{"divisor": 1}, {"divisor": 0}, {"kill": True}, {"divisor": 2}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    command = [sys.executable, "-c", SERVED, str(BENCH)]
    done = subprocess.run(command, input=lines, text=True, capture_output=True, check=True)
    first, broken, killed, last = map(json.loads, done.stdout.splitlines())
    assert first["seen"] == last["seen"] == 1  # nothing of the other rows
    assert broken["problem"] == "ZeroDivisionError: division by zero"
    assert killed["problem"] == "the process was killed"


def test_a_mean_over_100_steps_of_which_the_last_repeats() -> None:
    assert peft_image.mean([200, 100, 100]) == 101.0


def test_an_adapter_of_the_image_comparison() -> None:
    by_name = {row.name: row.settings["adapter"] for row in peft_image.FAMILY.rows}
    assert len(by_name) == 31
    assert by_name["full-finetuning/flux2-klein-default"] is None
    assert by_name["ln_tuning/flux2-klein-default"]["target_modules"] == ["norm_q", "norm_k"]
    assert by_name["lora/flux2-klein-rank64"]["r"] == 64


def test_each_row_of_the_image_comparison_has_its_versions() -> None:
    rows = peft_image.FAMILY.rows
    assert {peft_image.versions(row) for row in rows} == set(peft_image.WORKERS)
