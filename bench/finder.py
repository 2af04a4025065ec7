"""The largest batch under a real limit: `find_batch_size` against Lightning's and Accelerate's.

Run `python bench/finder.py`; the last result lies in `bench/results/finder.json` and `.txt`.

Each finder runs in a process of its own, with one thread, that may take 800 MiB beyond what it has
when its model is built (`RLIMIT_DATA`): what exceeds that fails for real. The true maximum is that
of a plain loop of torch, bisected with a new process for each size; every answer is then taken
by such a loop, so that one that does not fit is seen. All processes return freed memory at once
(`MALLOC_MMAP_THRESHOLD_=65536`): else the fragments of the heap decide, by chance. Samples are
those that go through the model in real steps; out-of-memories are those that a finder caught.

`--ours` measures stretto again and keeps what was saved of the peers and of the true maximum.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from finder_setting import CASES, LIMIT
from machine import processor
from peer_environments import python_of

RESULTS = Path(__file__).parent / "results"
RUN = Path(__file__).with_name("finder_run.py")
MARGINS = {"predict": 0.05, "auto": 0.015, "probe": 0.015, "try": 0.015}
"""What `find_batch_size` leaves free unless told otherwise; an estimate of the CNN 0.25."""
FINDERS = [
    ("stretto auto", "stretto", "auto"),
    ("stretto predict", "stretto", "predict"),
    ("stretto probe", "stretto", "probe"),
    ("stretto try", "stretto", "try"),
    ("Lightning power", "lightning", "power"),
    ("Lightning binsearch", "lightning", "binsearch"),
    ("Accelerate from 1024", "accelerate", "1024"),
    ("Accelerate from twice the maximum", "accelerate", "twice"),
]
PRECISION = 0.005
"""How near the true maximum is found."""


def run(python: Path | str, *arguments: str) -> dict[str, Any]:
    """Return what one process has found."""
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [str(python), str(RUN), *arguments],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"size": None, "error": f"ended with {done.returncode}: {done.stderr[-300:]}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@cache
def does_fit(case: str, size: int) -> bool:
    """Return whether a plain loop has memory for steps of that size."""
    found = run(sys.executable, "fits", case, str(size))
    return bool(found.get("fits"))


def true_maximum(case: str, near: int, precision: float) -> int:
    """Return the largest size, as exactly as is asked for, that a plain loop has memory for."""
    low, high = near, near
    while not does_fit(case, low):
        low = int(low * 0.94)
    while low == high or does_fit(case, high):
        low, high = high if high != low else low, max(int(high * 1.06), high + 1)
    while high - low > max(1, precision * low):
        middle = (low + high) // 2
        if does_fit(case, middle):
            low = middle
        else:
            high = middle
    return low


def measure(
    case: str, *, quick: bool = False, saved: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what every finder answers for one model; the peers' as `saved`, where it is given."""
    rows: dict[str, Any] = {}
    first = run(sys.executable, "stretto", case, "auto")
    maximum = (
        true_maximum(case, first["size"], 0.1 if quick else PRECISION)
        if saved is None
        else saved["maximum"]
    )
    for name, who, argument in FINDERS[:1] if quick else FINDERS:
        if saved is not None and who != "stretto":
            rows[name] = saved["finders"][name]
            continue
        python = sys.executable if who == "stretto" else python_of(who)
        value = str(2 * maximum) if argument == "twice" else argument
        found = first if name == "stretto auto" else run(python, who, case, value)
        size = found["size"]
        found["part_of_maximum"] = None if size is None else round(size / maximum, 3)
        # What is well below the maximum fits; near it and above, it is looked at.
        found["fits"] = size is not None and (size < 0.9 * maximum or does_fit(case, size))
        rows[name] = found
        print(line(case, name, found), flush=True)
    return {"maximum": maximum, "finders": rows}


def line(case: str, name: str, found: dict[str, Any]) -> str:
    """Return a finder's result as a line of text."""
    if found["size"] is None:
        return f"{case}  {name:34} no answer: {found.get('error')}"
    says = f" ({found['says']})" if "says" in found else ""
    verdict = "fits" if found["fits"] else "DOES NOT FIT"
    return (
        f"{case}  {name:34} {found['size']:>7,} = {found['part_of_maximum']:6.1%} of the maximum, "
        f"{verdict}{says}; {found['trials']} sizes, {found['out_of_memory']} out of memory, "
        f"{found['samples']:,} samples, {found['seconds']} s "
        f"({found['processor_seconds']} s of the processor)"
    )


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model, and nothing is saved")
    parser.add_argument("--case", choices=list(CASES), help="one model, and nothing is saved")
    parser.add_argument("--ours", action="store_true", help="keep what was saved of the peers")
    arguments = parser.parse_args()
    if arguments.quick or arguments.case:
        measure(arguments.case or "MLP", quick=arguments.quick)
        return
    path = RESULTS / "finder.json"
    peers = json.loads(path.read_text())["cases"] if arguments.ours else {}
    results = {case: measure(case, saved=peers.get(case)) for case in CASES}
    lines = [
        line(case, name, found)
        for case, result in results.items()
        for name, found in result["finders"].items()
    ]
    saved = {
        "what": "answers of batch size finders under a real limit",
        "limit_bytes": LIMIT,
        "margins": MARGINS,
        "cases": results,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
    }
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(saved, indent=2) + "\n")
    (RESULTS / "finder.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
