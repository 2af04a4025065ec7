"""How long `import stretto` takes: the median over fresh processes, beyond starting Python.

Run `python bench/import_time.py`; the last result lies in `bench/results/import_time.json` and
`.txt`. The aim is under 100 ms.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

PROCESSES = 20
RESULTS = Path(__file__).parent / "results"

# Timed inside the process, so that starting Python (about 15 ms) is not counted.
MEASURE = """
import time
start = time.perf_counter_ns()
import {module}
print(time.perf_counter_ns() - start)
"""


def measure_milliseconds(module: str) -> list[float]:
    """Return the time of importing a module in each of several fresh processes."""
    command = [sys.executable, "-c", MEASURE.format(module=module)]
    # The first process may have to compile or to read from a cold disk, so it is left out.
    outputs = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for _ in range(PROCESSES + 1)
    ]
    return [int(output) / 1e6 for output in outputs[1:]]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="nothing is saved")
    is_quick = parser.parse_args().quick
    milliseconds = measure_milliseconds("stretto")
    result = {
        "what": "import stretto",
        "median_milliseconds": round(statistics.median(milliseconds), 2),
        "slowest_milliseconds": round(max(milliseconds), 2),
        "processes": PROCESSES,
        "python": platform.python_version(),
    }
    text = (
        f"import stretto: median {result['median_milliseconds']} ms, slowest "
        f"{result['slowest_milliseconds']} ms over {PROCESSES} fresh processes "
        f"(Python {result['python']}; aim: under 100 ms)"
    )
    if not is_quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "import_time.json").write_text(json.dumps(result, indent=2) + "\n")
        (RESULTS / "import_time.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
