"""The model of the caching allocator against torch's own: random allocations, and every option.

Run `make phantom`, then `python bench/cuda_allocator.py`; the last result lies in
`bench/results/cuda_allocator.json` and `.txt`. torch's allocator runs on a device that is not
there (`tools/phantom/make.py`). A trace differs if one of these does: reserved bytes and bytes in
use, at the end and at the peak, or which of the allocations run out of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import processor
from phantom_runs import VERSION, folder_of

from stretto.memory.prediction.allocator.caching_allocator import CachingAllocator
from stretto.memory.prediction.allocator.settings import AllocatorSettings

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
GOLDEN = (
    ROOT / "tests" / "memory" / "prediction" / "allocator" / "golden" / "caching_allocator.json"
)
MIB = 1 << 20
DEVICE_MEMORY = 64 << 30
"""Enough for every trace; those with a limit get less."""
SETTINGS = (
    "",
    "max_split_size_mb:24",
    "max_split_size_mb:64,max_non_split_rounding_mb:30",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:4,4:2,16:8,>:1]",
    "large_segment_size_mb:32",
    "large_segment_size_mb:21",
    "per_process_memory_fraction:0.7",
    "per_process_memory_fraction:0.8,throw_on_cudamalloc_oom:True",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9,max_split_size_mb:40",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:24",
    "expandable_segments:True,roundup_power2_divisions:8",
    "expandable_segments:True,large_segment_size_mb:64",
    "expandable_segments:True,garbage_collection_threshold:0.6,per_process_memory_fraction:0.8",
    (
        "max_split_size_mb:32,roundup_power2_divisions:2,large_segment_size_mb:24,"
        "garbage_collection_threshold:0.7,per_process_memory_fraction:0.9"
    ),
)


@dataclass(frozen=True)
class Trace:
    """Allocations and frees on a device with a limit."""

    events: tuple[tuple[int, int, int] | int, ...]
    """Key, bytes and stream of an allocation; the key of what is freed."""
    limit: int | None

    def command(self, settings: AllocatorSettings) -> Iterator[str]:
        """Yield the lines for the replay program."""
        limit = self.limit or DEVICE_MEMORY
        fraction = settings.memory_fraction
        yield f"t {limit} {0 if fraction is None else int(fraction * limit)}"
        for event in self.events:
            yield f"f {event}" if isinstance(event, int) else "a {} {} {}".format(*event)
        yield "e"


def random_trace(seed: int, settings: AllocatorSettings, length: int | None = None) -> Trace:
    """Return a trace of 1 to 3 streams; every second one has a limit that may be too small."""
    chance = random.Random(seed)
    num_streams = chance.choice((1, 1, 2, 3))
    sizes = [_random_size(chance) for _ in range(chance.randrange(3, 30))]
    num_events = length or chance.choice((50, 200, 400, 1500))
    growth = chance.uniform(0.35, 0.7)
    events: list[tuple[int, int, int] | int] = []
    live: list[int] = []
    for key in range(num_events):
        if live and (chance.random() > growth or len(live) > 60):
            last = len(live) - 1
            events.append(live.pop(chance.randrange(len(live)) if chance.random() < 0.6 else last))
        else:
            is_usual = chance.random() < 0.8
            size = chance.choice(sizes) if is_usual else int(2 ** chance.uniform(0, 27))
            events.append((key, size, chance.randrange(num_streams)))
            live.append(key)
    trace = Trace(tuple(events), None)
    if seed % 2:
        peak = replay_model(trace, settings)[1]
        limit = max(40 * MIB, int(peak * chance.uniform(0.5, 1.05))) // (2 * MIB) * (2 * MIB)
        return Trace(trace.events, limit)
    # A fraction is one of all memory, so there must be a number.
    return trace if settings.memory_fraction is None else Trace(trace.events, DEVICE_MEMORY)


def _random_size(chance: random.Random) -> int:
    most = chance.choice((MIB, 10 * MIB, 80 * MIB, 0))
    if most:
        return chance.randrange(1, most)
    return chance.choice((1, 2, 3, 5, 8, 10, 16, 20, 32, 40)) * MIB


def replay_model(trace: Trace, settings: AllocatorSettings) -> list[int]:
    """Return what the model answers, in the order of the replay program."""
    allocator = CachingAllocator(trace.limit, settings)
    failed = []
    for place, event in enumerate(trace.events):
        if isinstance(event, int):
            allocator.free(event)
        elif not allocator.allocate(*event):
            failed.append(place)
    used = (allocator.allocated, allocator.peak_allocated)
    return [allocator.reserved, allocator.peak_reserved, *used, *failed]


def replay_torch(traces: list[Trace], text: str, phantom: Path) -> list[list[int]]:
    """Return what torch's own allocator answers."""
    settings = AllocatorSettings.from_text(text)
    lines = [line for trace in traces for line in trace.command(settings)]
    environment = {
        **os.environ,
        "PYTORCH_ALLOC_CONF": text,
        "PHANTOM_MEMORY": str(DEVICE_MEMORY),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else it warns of each lack of memory
    }
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    done = subprocess.run(
        [phantom / "replay"],
        input="\n".join(lines) + "\n",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


def compare(text: str, num_traces: int, phantom: Path) -> dict[str, Any]:
    """Return how many traces differ with these settings."""
    settings = AllocatorSettings.from_text(text)
    traces = [random_trace(seed, settings) for seed in range(num_traces)]
    start = time.process_time()
    ours = [replay_model(trace, settings) for trace in traces]
    seconds = time.process_time() - start
    theirs = replay_torch(traces, text, phantom)
    assert len(theirs) == len(ours)
    differ = [seed for seed in range(num_traces) if ours[seed] != theirs[seed]]
    num_events = sum(len(trace.events) for trace in traces)
    return {
        "traces": num_traces,
        "with_limit": sum(trace.limit not in {None, DEVICE_MEMORY} for trace in traces),
        "out_of_memory": sum(len(answer) > 4 for answer in theirs),
        "differ": len(differ),
        "first_that_differ": differ[:10],
        "events": num_events,
        "microseconds_per_event": round(1e6 * seconds / num_events, 2),
    }


def write_golden(phantom: Path) -> None:
    """Write a few short traces, and the answers of torch's allocator, for the tests."""
    rows = []
    for index, text in enumerate(SETTINGS):
        settings = AllocatorSettings.from_text(text)
        traces = [random_trace(2 * index + seed, settings, length=120) for seed in range(2)]
        for trace, answer in zip(traces, replay_torch(traces, text, phantom), strict=True):
            words = (
                f"-{event}" if isinstance(event, int) else "{}:{}@{}".format(*event)
                for event in trace.events
            )
            rows.append(
                {
                    "settings": text,
                    "limit": trace.limit,
                    "events": " ".join(words),
                    "answer": answer,
                }
            )
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def table(settings: dict[str, dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = ["traces  out of memory  differ  us/event  settings"]
    lines += [
        f"{row['traces']:>6,}  {row['out_of_memory']:>13,}  {row['differ']:>6,}  "
        f"{row['microseconds_per_event']:>8.2f}  {text or 'default'}"
        for text, row in settings.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Compare, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="50 traces; nothing is saved")
    parser.add_argument("--torch", default=VERSION, help=f"version of torch; {VERSION} is saved")
    parser.add_argument("--golden", action="store_true", help="write the golden file of the tests")
    given = parser.parse_args()
    phantom = folder_of(given.torch)
    if given.golden:
        write_golden(phantom)
        return
    num_traces = 50 if given.quick else 2000
    settings = {text: compare(text, num_traces, phantom) for text in SETTINGS}
    text = table(settings)
    if not given.quick and given.torch == VERSION:
        result = {
            "what": "random allocations of 1 to 3 streams, half of them with a limit: reserved and "
            "used bytes, their peaks, and what runs out of memory, model against torch",
            "settings": settings,
            "python": platform.python_version(),
            "torch": given.torch,
            "processor": processor(),
            "load_average": round(os.getloadavg()[0], 1),
        }
        (RESULTS / "cuda_allocator.json").write_text(
            json.dumps(result, indent=2) + "\n", encoding="utf-8"
        )
        (RESULTS / "cuda_allocator.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
