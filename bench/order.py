"""Start-up time and memory of the order of a billion samples, against `torch.randperm`.

Run `python bench/order.py`; the last result lies in `bench/results/order.json` and `.txt`. The aim
is under 50 ms and 10 MB. Each side runs in a process of its own: the time until the first batch of
indices can be had, and how much the process has grown by then. `torch.randperm` of a billion takes
8 GB: it is measured only where that is free, and at 1e8 in any case.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import processor

RESULTS = Path(__file__).parent / "results"
MEASURE = """
import json, resource, sys, time
import torch
import stretto
from stretto.data.indices import IndexStream
from stretto.ordering import SampleOrder

torch.set_num_threads(1)
n = 2000  # once on a few, so that the code itself is in memory

def ours():
    stream = IndexStream(SampleOrder(n, seed=7))
    return lambda place: stream.take(place, 256)

def randperm():
    order = torch.randperm(n)
    return lambda place: order[place : place + 256].tolist()

{side}()(0)
n = int(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
batch = {side}()
batch(0)
ready = time.perf_counter() - start
for place in range(256, 256 * 4000, 256):
    batch(place)
passed = time.perf_counter() - start - ready
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([1e3 * ready, (after - before) / 1024, 1e6 * passed / 4000 / 256]))
"""


def measure(side: str, num_samples: int, processes: int) -> dict[str, float]:
    """Return medians over fresh processes."""
    outputs = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", MEASURE.format(side=side), str(num_samples)],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            ).stdout
        )
        for _ in range(processes)
    ]
    ready, memory, each = (statistics.median(column) for column in zip(*outputs, strict=True))
    return {
        "ready_milliseconds": round(ready, 2),
        "memory_megabytes": round(memory, 1),
        "microseconds_an_index_afterwards": round(each, 3),
    }


def free_bytes() -> int:
    """Return how much memory is free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds, and nothing is saved")
    quick = parser.parse_args().quick
    rows: dict[str, dict[str, float]] = {}
    for exponent in (6,) if quick else (6, 8, 9):
        rows[f"stretto 1e{exponent}"] = measure("ours", 10**exponent, 1 if quick else 9)
    for exponent in (6,) if quick else (6, 8):
        rows[f"randperm 1e{exponent}"] = measure("randperm", 10**exponent, 1 if quick else 3)
    if not quick and free_bytes() > 12e9:
        rows["randperm 1e9"] = measure("randperm", 10**9, 1)
    text = table(rows)
    print(text)
    if quick:
        return
    result: dict[str, Any] = {
        "what": "the order of samples until the first batch of 256, in a process of its own",
        "rows": rows,
        "aim": {"ready_milliseconds": 50, "memory_megabytes": 10},
        "python": platform.python_version(),
        "processor": processor(),
        "load_average": round(os.getloadavg()[1], 1),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "order.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "order.txt").write_text(text + "\n")


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return the results as text."""
    lines = [f"{'samples':16}{'ready, ms':>12}{'memory, MB':>12}{'then, us an index':>20}"]
    lines += [
        f"{name:16}"
        + "".join(
            f"{value:>{width}}" for value, width in zip(row.values(), (12, 12, 20), strict=True)
        )
        for name, row in rows.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
