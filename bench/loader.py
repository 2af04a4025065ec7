"""Throughput of the loader when every step has another size, against a plain `DataLoader`.

Run `python bench/loader.py`; the last result lies in `bench/results/loader.json` and `.txt`. The
aim is at least 0.97 of a shuffled `torch.utils.data.DataLoader` of one fixed batch size over the
same data set, with 0 and with 2 workers.

Both read one epoch, turn by turn, with one thread of torch in each process; what is compared is
samples per second after the first batches (so that starting workers does not count), and processor
time, that of the workers included, of the whole turn. The ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import processor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stretto import StepLoader, Timestamp
from stretto.batching import SizeFunction

RESULTS = Path(__file__).parent / "results"
BATCH_SIZE = 64
SIZES = [64 + delta for delta in (0, 17, -32, 5, -11, 32, -5, 11, -17, 23, -23, 29, -29)]
"""Another size at each step; their mean is that of the fixed one."""
WARM_UP = 16
"""Batches before the clock starts: more than all workers together fetch ahead."""


class Costly(Dataset[Any]):
    """Samples that take about 20 us of Python each, as decoding or augmenting them would."""

    def __init__(self, num_samples: int) -> None:
        self.values = torch.randn(num_samples, 64)
        self.turns = 1
        while seconds_of(lambda: self[0]) < 20e-6:
            self.turns += 10

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        total = 0
        for turn in range(self.turns):
            total += turn * index
        return self.values[index], total


class Turn(NamedTuple):
    """What one epoch took."""

    samples_per_second: float
    processor_seconds: float


def seconds_of(work: Any, repeats: int = 2000) -> float:
    """Return how long a call takes, the least of five tries."""
    tries = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats // 5):
            work()
        tries.append((time.perf_counter() - start) / (repeats // 5))
    return min(tries)


def processor_seconds() -> float:
    """Processor time of this process and of its workers that are gone."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def one_turn(batches: Iterable[int]) -> Turn:
    """Read an epoch; `batches` yields the number of samples in each batch."""
    processor_start = processor_seconds()
    count, start = 0, 0.0
    for number, samples in enumerate(batches):
        if number >= WARM_UP:
            count += samples
        if number == WARM_UP - 1:
            start = time.perf_counter()
    return Turn(count / (time.perf_counter() - start), processor_seconds() - processor_start)


def plain(data: Dataset[Any], num_workers: int) -> Iterable[int]:
    """Torch's own loader with one fixed size."""
    for batch in DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, num_workers=num_workers):
        yield len(batch[0])


def ours(data: Dataset[Any], num_workers: int, *, planned: bool) -> Iterable[int]:
    """Another size at every step: known beforehand, or decided at the step."""

    def size(timestamp: Timestamp, current: int | None) -> int:
        del current
        return SIZES[timestamp.batch % len(SIZES)]

    policy = SizeFunction(size, planned=planned)
    for step in StepLoader(data, policy, max_duration="1ep", loading={"num_workers": num_workers}):
        yield step.num_samples


def pair(data: Dataset[Any], num_workers: int, *, planned: bool, rounds: int) -> dict[str, Any]:
    """Return the ratios of ours to the plain loader, round by round."""
    speed, cost, plain_speed = [], [], []
    for number in range(rounds + 1):
        turns = {
            "plain": lambda: one_turn(plain(data, num_workers)),
            "ours": lambda: one_turn(ours(data, num_workers, planned=planned)),
        }
        # Whoever goes first in one round goes second in the next.
        names = ["plain", "ours"] if number % 2 else ["ours", "plain"]
        done = {name: turns[name]() for name in names}
        if number:  # the first round warms up
            speed.append(done["ours"].samples_per_second / done["plain"].samples_per_second)
            cost.append(done["ours"].processor_seconds / done["plain"].processor_seconds)
            plain_speed.append(done["plain"].samples_per_second)
    return {
        "throughput_ratio": spread(speed),
        "processor_time_ratio": spread(cost),
        "plain_samples_per_second": round(statistics.median(plain_speed)),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds, and nothing is saved")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    scale, rounds = (1, 3) if quick else (4, 15)
    light = TensorDataset(torch.randn(20_000 * scale, 64), torch.randint(10, (20_000 * scale,)))
    sources: dict[str, Dataset[Any]] = {
        "TensorDataset": light,
        "20 us a sample": Costly(5_000 * scale),
    }
    cases = []
    for name, data in sources.items():
        assert isinstance(data, Sized)
        for num_workers in (0, 2):
            for planned in (True, False):
                case = {
                    "data": name,
                    "num_samples": len(data),
                    "num_workers": num_workers,
                    "sizes": "known beforehand" if planned else "decided at the step",
                    **pair(data, num_workers, planned=planned, rounds=rounds),
                }
                cases.append(case)
                print(line(case), flush=True)
    if quick:
        return
    result = {
        "what": "loader throughput with another size at every step over a plain DataLoader's",
        "batch_size": BATCH_SIZE,
        "cases": cases,
        "rounds": rounds,
        "aim": 0.97,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "loader.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "loader.txt").write_text("\n".join(map(line, cases)) + "\n")


def line(case: dict[str, Any]) -> str:
    """Return a case as a line of text."""
    speed, cost = case["throughput_ratio"], case["processor_time_ratio"]
    return (
        f"{case['data']:15} {case['num_workers']} workers, {case['sizes']:20} throughput "
        f"{speed['median']:6.3f} ({speed['low']:.3f} to {speed['high']:.3f}), processor time "
        f"{cost['median']:.3f} ({cost['low']:.3f} to {cost['high']:.3f}) of the plain loader"
    )


if __name__ == "__main__":
    main()
