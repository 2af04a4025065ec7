"""What a bound schedule costs per call: the median over repeats, beyond the loop around it.

Run `python bench/schedules.py`; the last result lies in `bench/results/schedules.json` and `.txt`.
The aim is at most 2 us a call (Composer's schedulers and clock take 24 us per batch).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Custom,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    Periods,
    Polynomial,
    Schedule,
    StepDecay,
)
from stretto.timing import Horizon, Timestamp

REPEATS = 31
SAMPLES, BATCH_SIZE = 50_000, 512
RESULTS = Path(__file__).parent / "results"

SCHEDULES: dict[str, Schedule] = {
    "Cosine with warm-up": Cosine(end=0.1, warmup="5%"),
    "Periods of 3": Periods(
        [("5%", Linear(0, 1)), ("rest", Cosine(1, 0.1)), ("5ep", Linear(0.1, 0))]
    ),
    "product of Cosine with warm-up and StepDecay": Cosine(warmup="5%") * StepDecay("30ep"),
    "Constant": Constant(),
    "Linear": Linear(),
    "Cosine": Cosine(),
    "CosineRestarts": CosineRestarts("5ep", 2),
    "Polynomial": Polynomial(power=2),
    "Exponential": Exponential("1ep", 0.95),
    "StepDecay": StepDecay("30ep"),
    "MultiStep": MultiStep(["30ep", "60ep"]),
    "InverseSqrt with warm-up": InverseSqrt(warmup="5%"),
    "WSD with warm-up": WSD("20%", warmup="5%"),
    "Custom": Custom(lambda timer: 0.5**timer.epoch),
}


def nothing(timestamp: Timestamp) -> float:  # noqa: ARG001
    """Return at once: what the loop and a call cost by themselves."""
    return 1.0


def nanoseconds_a_call(factor: Callable[[Timestamp], float], stamps: list[Timestamp]) -> float:
    """Return the time of a call, over one pass through all the timestamps of a run."""
    # The processor's time for this thread, so that other programs on the machine count little.
    start = time.thread_time_ns()
    for stamp in stamps:
        factor(stamp)
    return (time.thread_time_ns() - start) / len(stamps)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="nothing is saved")
    is_quick = parser.parse_args().quick
    horizon = Horizon("90ep", dataset_num_samples=SAMPLES, batch_sizes=BATCH_SIZE)
    # Every batch of the run, so that warm-up, middle and end are weighted as in a real one.
    stamps = [
        Timestamp(epoch=sample // SAMPLES, batch=batch, sample=sample)
        for batch, sample in enumerate(range(0, 90 * SAMPLES, BATCH_SIZE))
    ]
    factors = {name: schedule.bind(horizon) for name, schedule in SCHEDULES.items()}
    factors = {"(an empty function)": nothing, **factors}
    # One after another in each pass, so that a slow moment of the machine meets all of them.
    passes = [
        {name: nanoseconds_a_call(factor, stamps) for name, factor in factors.items()}
        for _ in range(3 if is_quick else REPEATS)
    ]
    medians = {name: statistics.median(one[name] for one in passes) for name in factors}
    width = max(map(len, medians))
    lines = [f"{name:<{width}} {median:>6.0f} ns" for name, median in medians.items()]
    heading = (
        f"cost of a bound schedule per call, median of {len(passes)} passes over {len(stamps):,} "
        f"batches (Python {platform.python_version()}; aim: at most 2000 ns)"
    )
    text = "\n".join([heading, *lines])
    result = {
        "what": "a bound schedule, nanoseconds per call",
        "median_nanoseconds": {name: round(median) for name, median in medians.items()},
        "passes": REPEATS,
        "calls_in_a_pass": len(stamps),
        "python": platform.python_version(),
    }
    if not is_quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "schedules.json").write_text(json.dumps(result, indent=2) + "\n")
        (RESULTS / "schedules.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
