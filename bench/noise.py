"""What measuring the noise of the gradient adds to a training step of four micro-batches.

Run `python bench/noise.py`; the last result lies in `bench/results/noise.json` and `.txt`. The aim
is at most 5 percent of a step. Two runs take turns, five steps each, in one process: one whose
callback listens to the noise and one whose callback does not. Times are of the processor, of each
step from when its batch is there; on a machine that others use, the fastest quarter of the steps
says more than the median. Where it is said, the noise is measured in the LayerNorms alone.
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

import torch
from machine import processor
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.examples.text import next_byte_loss
from stretto.examples.tiny_gpt import TinyGPT
from stretto.training import Callback, Run, Trainer

STEPS = 5
MICRO_BATCHES = 4
RESULTS = Path(__file__).parent / "results"


class Watch(Callback):
    """Stops the run every five steps, and knows how long each took."""

    def __init__(self) -> None:
        self.microseconds: list[float] = []
        self._since = 0.0

    def on_batch_start(self, run: Run, step: Any) -> None:
        """Take the time; the batch is there."""
        del run, step
        self._since = time.process_time()

    def on_batch_end(self, run: Run, step: Any) -> None:
        """Take the time again."""
        del step
        self.microseconds.append((time.process_time() - self._since) * 1e6)
        if run.timer.batch % STEPS == 0:
            run.stop("the other one's turn", is_final=False)


class Listen(Callback):
    """Has the noise measured."""

    def on_noise(self, run: Run, step: Any, signals: Any) -> None:
        """Nothing: what is measured is the measuring."""


def gpt(layers: int, width: int, context: int, batch: int) -> dict[str, Any]:
    """A GPT over bytes, with AdamW and clipping."""
    model = TinyGPT(layers=layers, width=width, context=context, heads=4)
    tokens = torch.randint(0, 256, (2048, context + 1))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return {"model": model, "data": data, "loss": next_byte_loss, "batch": batch}


def mlp(width: int, batch: int) -> dict[str, Any]:
    """Two layers, many parameters for little computation."""
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    data = TensorDataset(torch.randn(2048, width), torch.randint(0, 10, (2048,)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return {"model": model, "data": data, "loss": loss, "batch": batch}


PROBLEMS: dict[str, Callable[[], dict[str, Any]]] = {
    "GPT 2x64, 16 of 64 bytes": lambda: gpt(2, 64, 64, 16),
    "GPT 4x128, 16 of 128 bytes": lambda: gpt(4, 128, 128, 16),
    "GPT 2x256, 16 of 64 bytes": lambda: gpt(2, 256, 64, 16),
    "  cut, as it is a single pass": lambda: {**gpt(4, 128, 128, 16), "micro_batches": 1},
    "MLP 64-64-10, 32 samples": lambda: mlp(64, 32),
    "MLP 1024-1024-10, 128 samples": lambda: mlp(1024, 128),
    "MLP 1024-1024-10, 1,024 samples": lambda: mlp(1024, 1024),
}


def trainer(problem: dict[str, Any], watch: Watch, *, listens: bool) -> Trainer:
    """Return a run of a problem that goes on for ever."""
    model = problem["model"]
    return Trainer(
        model,
        problem["data"],
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=problem["loss"],
        max_duration="1_000_000ba",
        batch_size=problem["batch"],
        micro_batch_size=problem["batch"] // problem.get("micro_batches", MICRO_BATCHES),
        callbacks=[watch, Listen()] if listens else [watch],
    )


def measure(make: Callable[[], dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Return the quartiles of a step's time without and with measuring, in microseconds."""
    watches = Watch(), Watch()
    runs = [
        trainer(make(), watch, listens=listens)
        for watch, listens in zip(watches, (False, True), strict=True)
    ]
    for number in range(rounds + 1):
        for run in runs if number % 2 else reversed(runs):
            run.fit()
    plain, listening = (statistics.quantiles(one.microseconds[STEPS:], n=4) for one in watches)
    return {
        "quartiles": [round(one) for one in plain],
        "quartiles_measured": [round(one) for one in listening],
        "percent": [
            round(100 * (more / less - 1), 1) for less, more in zip(plain, listening, strict=True)
        ],
        "parameters": sum(p.numel() for p in runs[0].model.parameters()),
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model; nothing is saved")
    is_quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    problems = dict(list(PROBLEMS.items())[: 1 if is_quick else None])
    rows = {name: measure(make, 1 if is_quick else 25) for name, make in problems.items()}
    width = max(map(len, rows))
    heads = ("parameters", "step us", "measured", "more %", "median")
    lines = [f"{'4 micro-batches':<{width}}" + "".join(f"{head:>12}" for head in heads)]
    for name, row in rows.items():
        low, middle, _ = row["percent"]
        step, measured = row["quartiles"][0], row["quartiles_measured"][0]
        line = f"{name:<{width}}{row['parameters']:>12,}{step:>12,}{measured:>12,}"
        lines.append(f"{line}{low:>12}{middle:>12}")
    lines.append("times are of the fastest quarter of the steps; the last column is of the medians")
    text = "\n".join(lines)
    result = {
        "what": "processor time of a training step with and without measuring; one thread",
        "rows": rows,
        "steps_a_turn": STEPS,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "load_average": round(os.getloadavg()[0], 1),
    }
    if not is_quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "noise.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (RESULTS / "noise.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
