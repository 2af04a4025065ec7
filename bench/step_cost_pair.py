"""One framework against the bare loop, alternated in one process; prints JSON.

Started by `step_cost.py` with the Python of the framework's environment:
`python step_cost_pair.py lightning --rounds 7`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from step_cost_setting import (
    BATCH,
    Rows,
    Stopwatch,
    run_bare,
    run_bare_tensors,
    run_bare_tensors_with_loader,
    run_bare_wide,
    run_bare_without_loader,
)

Loop = Callable[[Rows, Stopwatch], None]

DISTRIBUTIONS = {"ignite": "pytorch-ignite", "composer": "mosaicml"}
"""Names in the package index, where they differ from ours."""


def loops_of(name: str) -> dict[str, Loop]:
    """Return the loops to time, the yardstick first."""
    if name == "stretto":
        from step_cost_ours import run_fixed, run_ramp, run_tensors, run_tensors_ramp, run_wide

        return {
            "bare": run_bare,
            "bare without DataLoader": run_bare_without_loader,
            "stretto": run_fixed,
            "stretto, ramp": run_ramp,
            "bare, TensorDataset": run_bare_tensors,
            "bare, TensorDataset, DataLoader": run_bare_tensors_with_loader,
            "stretto, TensorDataset": run_tensors,
            "stretto, TensorDataset, ramp": run_tensors_ramp,
            "bare, wide": run_bare_wide,
            "stretto, wide": run_wide,
        }
    from step_cost_peers import LOOPS

    return {"bare": run_bare, name: LOOPS[name]}


def measure(name: str, rounds: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Return microseconds a step of each loop in each round; the order turns round each time."""
    data = Rows(steps * BATCH, is_dict=name == "transformers")
    loops = loops_of(name)
    times: dict[str, list[dict[str, float]]] = {label: [] for label in loops}
    for number in range(rounds + 1):
        for label in sorted(loops, reverse=bool(number % 2)):
            stopwatch = Stopwatch(steps)
            # What trainers print at the start of a run belongs to no step.
            with contextlib.redirect_stdout(io.StringIO()):
                loops[label](data, stopwatch)
            if number:  # the first round warms up
                times[label].append(stopwatch.microseconds())
    return times


def main() -> None:
    """Measure one pair and print it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3_000)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)

    load_before, start = os.getloadavg()[0], time.monotonic()
    times = measure(arguments.name, arguments.rounds, arguments.steps)
    version = metadata.version(DISTRIBUTIONS.get(arguments.name, arguments.name))
    result: dict[str, Any] = {
        "name": arguments.name,
        "version": version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "seconds": round(time.monotonic() - start, 1),
        "microseconds": times,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
