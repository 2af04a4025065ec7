"""The calls that `clock.py` times, ours and Composer's; prints JSON.

Started by `clock.py`: alone with stretto's Python, `--composer` with that of Composer's
environment, where both sides are timed in one process, turn by turn. stretto's core is pure Python
and needs nothing installed there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
import timeit
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from stretto.schedules import Cosine
from stretto.timing import Every, Horizon, Time, Timer, Timestamp

SAMPLES, TOKENS, BATCHES = 32, 4_096, 10_000

# 1,000 different texts, so that no cache answers.
TEXTS = [text for n in range(1, 251) for text in (f"{n}ep", f"{n}000ba", f"0.{n}dur", f"{n}tok")]

# What each side does for the same purpose, as `timeit` runs it. Reading texts is counted per text.
OURS = {
    "read a time": "for text in texts: Time(text)",
    "count a batch": "timer.update(SAMPLES, tokens=TOKENS)",
    "cosine": "cosine(timestamp)",
    "cosine with warm-up": "warmed(timestamp)",
    "check an interval": "is_due(previous, timestamp)",
    "all of a batch": """
before = timer.timestamp
warmed(before)
timer.update(SAMPLES, tokens=TOKENS)
is_due(before, timer.timestamp)
""",
}
# As Composer's trainer does; it also sums the counts over all ranks, which is left out here.
COMPOSERS = {
    "read a time": "for text in texts: Time.from_timestring(text)",
    "count a batch": """
now = datetime.now()
timestamp = timestamp.to_next_batch(SAMPLES, TOKENS, now - last)
last = now
""",
    "cosine": "cosine(state)",
    "cosine with warm-up": "warmed(state)",
    "check an interval": "is_due(state, event)",
    "all of a batch": """
state.previous_timestamp = state.timestamp
now = datetime.now()
state.timestamp = state.timestamp.to_next_batch(SAMPLES, TOKENS, now - last)
last = now
warmed(state)
is_due(state, event)
""",
}
COMPOSERS_SETUP = "from datetime import datetime; last = datetime.now(); timestamp = start"


def our_names() -> dict[str, object]:
    """Return what stretto's calls refer to."""
    horizon = Horizon(f"{BATCHES}ba", dataset_num_samples=SAMPLES * 1_000, batch_sizes=SAMPLES)
    return {
        "texts": TEXTS,
        "SAMPLES": SAMPLES,
        "TOKENS": TOKENS,
        "Time": Time,
        "timer": Timer(horizon),
        "cosine": Cosine().bind(horizon),
        "warmed": Cosine(warmup="1000ba").bind(horizon),
        "is_due": Every("500ba").bind(horizon),
        "previous": Timestamp(batch=4_999, sample=4_999 * SAMPLES),
        "timestamp": Timestamp(batch=5_000, sample=5_000 * SAMPLES),
    }


def composer_names() -> dict[str, object]:
    """Return what Composer's calls refer to."""
    from step_cost_peers import define_torchvision_operators

    define_torchvision_operators()
    core: Any = importlib.import_module("composer.core")
    optim: Any = importlib.import_module("composer.optim")
    misc: Any = importlib.import_module("composer.utils.misc")
    start = core.Timestamp()
    # The attributes of Composer's state that its schedules and intervals read, and no more.
    state: Any = SimpleNamespace(
        timestamp=start.copy(batch=5_000, sample=5_000 * SAMPLES),
        previous_timestamp=start.copy(batch=4_999, sample=4_999 * SAMPLES),
        max_duration=core.Time.from_timestring(f"{BATCHES}ba"),
        dataloader_len=core.Time.from_timestring("1000ba"),
    )
    state.get_elapsed_duration = lambda: state.timestamp.get("ba") / state.max_duration
    return {
        "texts": TEXTS,
        "SAMPLES": SAMPLES,
        "TOKENS": TOKENS,
        "Time": core.Time,
        "start": start,
        "state": state,
        "cosine": optim.CosineAnnealingScheduler(),
        "warmed": optim.CosineAnnealingWithWarmupScheduler("1000ba"),
        "is_due": misc.create_interval_scheduler("500ba"),
        "event": core.Event.BATCH_CHECKPOINT,
    }


def timers(side: str) -> dict[str, timeit.Timer]:
    """Return what to time on one side, on the clock of the processor."""
    statements, setup, names = (
        (OURS, "pass", our_names())
        if side == "stretto"
        else (COMPOSERS, COMPOSERS_SETUP, composer_names())
    )
    statements = {"call a function": "identity(1)", **statements}
    names["identity"] = lambda value: value  # what a call costs on this machine
    return {
        what: timeit.Timer(statement, setup, time.process_time, globals=names)
        for what, statement in statements.items()
    }


def measure(sides: list[str], *, calls: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return microseconds a call in every round; the order of the sides turns round each time."""
    all_timers = {side: timers(side) for side in sides}
    times: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    for number in range(rounds + 1):
        for what in all_timers[sides[0]]:
            repeats, each = (calls // len(TEXTS), len(TEXTS)) if "read" in what else (calls, 1)
            for side in sorted(sides, reverse=bool(number % 2)):
                seconds = all_timers[side][what].timeit(repeats)
                if number:  # the first round warms up
                    times[side].setdefault(what, []).append(seconds / repeats / each * 1e6)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--composer", action="store_true")
    parser.add_argument("--calls", type=int, default=BATCHES)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    sides = ["stretto", "composer"] if arguments.composer else ["stretto"]
    times = measure(sides, calls=arguments.calls, rounds=arguments.rounds)
    result = {
        "python": platform.python_version(),
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "calls": arguments.calls,
        "microseconds": times,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
