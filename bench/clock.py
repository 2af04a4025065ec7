"""What the clock and a schedule cost in each batch, against Composer's.

Run `python bench/clock.py`: both are timed in one process of Composer's environment, which is made
first. The last result lies in `bench/results/clock.json` and `.txt`; `--quick` measures stretto
alone, in its own environment, and saves nothing. The aim: `Timer.advance` and a bound schedule at
most 2 us each, reading a `Time` at most 4 us.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import processor
from peer_environments import python_of

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LIMITS = {"read a time": 4.0, "count a batch": 2.0, "cosine": 2.0, "cosine with warm-up": 2.0}


def run(*, with_composer: bool, rounds: int) -> dict[str, Any]:
    """Return what `clock_calls.py` measured."""
    python = str(python_of("composer")) if with_composer else sys.executable
    command = [python, str(HERE / "clock_calls.py"), "--rounds", str(rounds)]
    if with_composer:
        command.append("--composer")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=HERE
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def summarise(times: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Return the median of each call on each side, and how many times ours the other's is."""
    rows: dict[str, dict[str, float]] = {}
    for what, ours in times["stretto"].items():
        row = {"stretto": round(statistics.median(ours), 3), "fastest": round(min(ours), 3)}
        if what in LIMITS:
            row["aim"] = LIMITS[what]
        if "composer" in times:
            theirs = times["composer"][what]
            ratios = [other / own for other, own in zip(theirs, ours, strict=True)]
            row["composer"] = round(statistics.median(theirs), 3)
            row["ratio"] = round(statistics.median(ratios), 1)
        rows[what] = row
    return rows


def table(rows: dict[str, dict[str, float]], load: float) -> str:
    """Return the results as text."""
    lines = [f"{'us a call, one thread':24}{'stretto':>10}{'aim':>8}{'composer':>11}{'ratio':>8}"]
    for what, row in rows.items():
        cells = (("stretto", 10), ("aim", 8), ("composer", 11), ("ratio", 8))
        lines.append(f"{what:24}" + "".join(f"{row.get(key, ''):>{wide}}" for key, wide in cells))
    return "\n".join([*lines, f"load average {load}"])


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description="cost of the clock and of schedules")
    parser.add_argument("--quick", action="store_true", help="stretto alone, nothing saved")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    result = run(with_composer=not arguments.quick, rounds=arguments.rounds)
    rows = summarise(result["microseconds"])
    text = table(rows, max(result["load_average"]))
    print(text)
    if not arguments.quick:
        RESULTS.mkdir(exist_ok=True)
        content = {"microseconds_a_call": rows, "processor": processor(), **result}
        json_text = json.dumps(content, indent=1) + "\n"
        (RESULTS / "clock.json").write_text(json_text, encoding="utf-8")
        (RESULTS / "clock.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
