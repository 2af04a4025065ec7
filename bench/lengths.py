"""Ten million samples of unequal lengths in batches of 131,072 tokens: a plan, a start, a resume.

Run `python bench/lengths.py`; the last result lies in `bench/results/lengths.json` and `.txt`. The
aims: a plan in at most 3 s and 500 MB, a start and a resume in the middle in at most 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import processor
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto import Cosine, DataSpec, StepLoader, plan, prepare
from stretto.data.lengths import OrderedLengths
from stretto.planning import Plan
from stretto.training import Loading

RESULTS = Path(__file__).parent / "results"
NUM_SAMPLES = 10_000_000
BATCH_SIZE = "131_072tok"
SCHEDULES = {"lr": Cosine(1, 0.1, warmup="100ba")}


class Texts(Dataset[Tensor]):
    """Samples that cost nothing to read."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1,), float(index % 1000))


def memory() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def planned(spec: DataSpec) -> Plan:
    """Plan an epoch with what a real run has."""
    return plan(
        spec.horizon("1ep"),
        BATCH_SIZE,
        world_size=8,
        schedules=SCHEDULES,
        triggers={"evaluate": "10%", "log": "100ba", "checkpoint": "50Mtok"},
    )


def loader(spec: DataSpec) -> StepLoader:
    """Return a loader of the same epoch."""
    return StepLoader(spec, BATCH_SIZE, max_duration="1ep", rank=0, world_size=8)


def own_loop(spec: DataSpec) -> Any:
    """Return a bound run of the same epoch."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    run = prepare(spec, BATCH_SIZE, max_duration="1ep", schedules=SCHEDULES, loading=Loading())
    return run.bind(optimizer, rank=0, world_size=8)


def saved(spec: DataSpec, at: int, whole: Plan) -> dict[str, Any]:
    """Return the state of a loader after `at` batches."""
    state = loader(spec).state_dict()
    clock = whole.timestamp_at_batch(at).to_state()
    size = f"{whole.stages[0].size:d}tok"
    return {**state, "clock": {**state["clock"], **clock}, "past": [[0, size]]}


def times(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Return the processor's time for this thread, and the median time of the wall."""
    spent, wall = [], []
    for _ in range(repeats):
        start, began = time.thread_time(), time.perf_counter()
        work()
        spent.append(time.thread_time() - start)
        wall.append(time.perf_counter() - began)
    return {
        "seconds": round(statistics.median(spent), 3),
        "wall": round(statistics.median(wall), 3),
    }


def measure(num_samples: int, repeats: int) -> dict[str, Any]:
    """Return what each of them costs."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(5.5, 0.9, num_samples), 5, 4096).astype(np.int32)
    spec = DataSpec(Texts(num_samples), lengths=lengths)
    OrderedLengths(spec.lengths[:9], spec.order(Loading()))  # what is imported late
    before = memory()
    whole = planned(spec)
    used, middle = memory() - before, (whole.num_batches or 0) // 2
    state = saved(spec, middle, whole)

    def resumed() -> None:
        one = loader(spec)
        one.load_state_dict(state)
        step = next(one)
        assert step.timestamp.sample == whole.sample_at_batch(middle)

    def resumed_loop() -> None:
        run = own_loop(spec)
        run.loader.load_state_dict(state)
        assert run.begin().timestamp.batch == middle

    return {
        "batches": whole.num_batches,
        "plan": times(lambda: planned(spec), repeats),
        "megabytes": round(used, 1),
        "loader, start": times(lambda: next(loader(spec)), repeats),
        "loader, middle": times(resumed, repeats),
        "own loop, start": times(lambda: own_loop(spec).begin(), repeats),
        "own loop, middle": times(resumed_loop, repeats),
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples, nothing is saved")
    is_quick = parser.parse_args().quick
    torch.set_num_threads(1)
    num_samples = NUM_SAMPLES // 20 if is_quick else NUM_SAMPLES
    found = measure(num_samples, 3 if is_quick else 5)
    lines = [f"{num_samples:,} samples, {found['batches']:,} batches of 131,072 tokens, one thread"]
    for name, row in found.items():
        if isinstance(row, dict):
            lines.append(
                f"{name:<17} {row['seconds']:6.3f} s of the processor, {row['wall']:.3f} s"
            )
    lines.append(f"resident memory of the plan: {found['megabytes']} MB")
    print("\n".join(lines))
    if is_quick:
        return
    result = {
        "what": "a plan of one epoch; from nothing to a first step, at the start or in the middle",
        "aim": {"plan": 3.0, "megabytes": 500, "start and resume": 0.5},
        **found,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "lengths.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (RESULTS / "lengths.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
