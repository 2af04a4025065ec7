"""What a plan of ten million batches costs, and a step of the walk that a run follows.

Run `python bench/plan.py`; the last result lies in `bench/results/plan.json` and `.txt`. The aim
is well under a second for ten million batches, whatever the batch sizes do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import processor

from stretto.batching import (
    BatchSizePolicy,
    DoublingRamp,
    Fixed,
    LinearRamp,
    PeriodSizes,
    PiecewiseConstant,
)
from stretto.planning import Plan, plan, walk
from stretto.schedules import Cosine, Linear, Periods
from stretto.timing import Horizon, LastBatch

REPEATS = 9
WALKED = 100_000
RESULTS = Path(__file__).parent / "results"

# Batch sizes, and the samples that make it about ten million batches of them over three epochs,
# the last batch of each smaller than the others.
RUNS: dict[str, tuple[BatchSizePolicy, int]] = {
    "constant 512": (Fixed(512), 1_706_666_777),
    "doubling ramp 64 to 1024": (DoublingRamp(64, 1024, "40%"), 950_000_777),
    "linear ramp 64 to 4096": (LinearRamp(64, 4096, "40%"), 6_000_000_777),
    "steps in mixed units": (PiecewiseConstant("0ep:64 2_000_000ba:512 1.5ep:1024"), 1_900_000_777),
    "periods, ramp in the second": (
        PeriodSizes([("1_000_000ba", 64), ("50%", LinearRamp(64, 1024, "1dur")), ("rest", 1024)]),
        1_560_000_777,
    ),
}


def planned(policy: BatchSizePolicy, num_samples: int, last_batch: LastBatch = "keep") -> Plan:
    """Plan a run with what a real one has: a learning rate in mixed units, evaluations, logs."""
    return plan(
        Horizon("3ep", dataset_num_samples=num_samples, last_batch=last_batch),
        policy,
        world_size=8,
        micro_batch_size=16,
        schedules={"lr": Periods([("10_000ba", Linear(0, 1)), ("rest", Cosine(end=0.1))])},
        triggers={"evaluate": "1%", "log": "4096sp"},
    )


def seconds(work: Callable[[], object]) -> list[float]:
    """Return the time of each of several rounds of `work`.

    The processor's time for this thread, so that other programs on the machine count little.
    """
    results = []
    for _ in range(REPEATS):
        start = time.thread_time()
        work()
        results.append(time.thread_time() - start)
    return results


def measure() -> dict[str, dict[str, Any]]:
    """Return how long each plan takes, and what it is a plan of."""
    rows = {}
    for name, (policy, num_samples) in RUNS.items():
        whole = planned(policy, num_samples)
        rows[name] = {
            "batches": whole.num_batches,
            "stages": len(whole.stages),
            "seconds": round(statistics.median(seconds(lambda: planned(*RUNS[name]))), 4),  # noqa: B023 (called at once)
        }
    return rows


def walked() -> float:
    """Return what one step of the walk costs, in microseconds."""
    policy, num_samples = RUNS["doubling ramp 64 to 1024"]
    horizon = Horizon("3ep", dataset_num_samples=num_samples)
    bound = policy.bind(horizon)

    def work() -> None:
        for _ in itertools.islice(walk(horizon, bound), WALKED):
            pass

    return round(statistics.median(seconds(work)) / WALKED * 1e6, 2)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="nothing is saved")
    is_quick = parser.parse_args().quick
    rows, step = measure(), walked()
    width = max(map(len, rows))
    lines = [f"{'a plan of':<{width}}  {'batches':>10}  {'stages':>6}  {'seconds':>7}"]
    for name, row in rows.items():
        line = f"{name:<{width}}  {row['batches']:>10,}  {row['stages']:>6,}"
        lines.append(f"{line}  {row['seconds']:>7.4f}")
    lines.append(f"a step of the walk, batch for batch: {step} us")
    text = "\n".join(lines)
    result = {
        "what": "a plan with a learning rate in mixed units, evaluations and logs; one thread",
        "plans": rows,
        "walk_microseconds_a_batch": step,
        "repeats": REPEATS,
        "python": platform.python_version(),
        "processor": processor(),
        "load_average": round(os.getloadavg()[0], 1),
    }
    if not is_quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "plan.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (RESULTS / "plan.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
