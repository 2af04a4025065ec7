"""Estimate the critical batch size: how large a batch still trains as well per sample.

    python examples/critical_batch_size.py [--checkpoint runs/a/checkpoints/checkpoint-...]

Branches start from the same weights and see the same number of samples, each at a constant batch
size and with the learning rate scaled by the square root of the size. The critical size is where
the mean excess loss over the smallest size crosses the tolerance (Merrill et al. 2025, arXiv
2505.23971, section 3). Differences are taken within one order of the samples, and the intervals are
90 percent of Student's distribution over the orders.

They do not cover another initialisation, another moment of the run (the critical size grows as the
loss falls), a learning rate that suits one size better, or branches that are too short to differ.
To use it for your own model, change `make` and `loss`.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import stretto
from stretto.checkpoint import open_checkpoint
from stretto.examples.text import PythonDocs, next_byte_loss
from stretto.examples.tiny_gpt import TinyGPT

LEAST_STEPS = 4
"""With fewer optimizer steps, a branch does not show how its batch size trains."""
STUDENT = (math.inf, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""Half the width of a 90 percent interval, in standard errors, by degrees of freedom."""


class Row(NamedTuple):
    """The result of one batch size."""

    size: int
    losses: tuple[float, ...]
    """The evaluation loss of each order of the samples."""
    excess: float
    """Mean of loss minus the loss of the smallest size, in the same order; inf if one diverged."""
    reach: float
    """Half the width of its interval; inf for a single order."""


def make() -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    """Return the model, its optimizer, the training data and the evaluation data."""
    torch.manual_seed(0)
    model = TinyGPT(layers=2, width=32, heads=2, context=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    return model, optimizer, PythonDocs(32), PythonDocs(32, split="validation")


def train(size: int, samples: int, seed: int, start: dict[str, Any], *, factor: float) -> float:
    """Train a branch and return its evaluation loss."""
    model, optimizer, data, held_out = make()
    model.load_state_dict(start["model"])
    optimizer.load_state_dict(copy.deepcopy(start["optimizer"]))
    for group in optimizer.param_groups:
        group["lr"] *= factor
    losses: list[float] = []

    class Watch(stretto.Callback):
        def on_evaluation_end(self, run: Any, name: str, metrics: Any) -> None:
            losses.append(metrics[f"{name}/loss"])

    stretto.Trainer(
        model,
        data,
        optimizer=optimizer,
        loss=next_byte_loss,
        max_duration=f"{samples}sp",
        batch_size=size,
        loading=stretto.Loading(seed=1_000_003 + seed, last_batch="carry"),
        stepping=stretto.Stepping(non_finite="ignore"),
        evaluate=stretto.Evaluation(held_out, every=f"{samples}sp"),
        log=stretto.Logging(console=False),
        callbacks=[Watch()],
    ).fit()
    return losses[-1]


def compare(sizes: Sequence[int], samples: int, seeds: int, start: dict[str, Any]) -> list[Row]:
    """Train the branches of all sizes in `seeds` orders.

    Raises:
        ValueError: fewer than two ascending sizes, too few samples, or a diverged baseline.
    """
    if len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes {list(sizes)} are not two or more in ascending order")
    if samples < LEAST_STEPS * sizes[-1]:
        raise ValueError(f"{samples} samples are fewer than {LEAST_STEPS} steps of {sizes[-1]}")
    base: tuple[float, ...] = ()
    rows: list[Row] = []
    for size in sizes:
        factor = math.sqrt(size / sizes[0])
        losses = tuple(train(size, samples, seed, start, factor=factor) for seed in range(seeds))
        base = base or losses
        if not all(map(math.isfinite, base)):
            raise ValueError(f"batches of {size} diverged: losses {base}; lower the learning rate")
        excess = [one - other for one, other in zip(losses, base, strict=True)]
        mean, reach = statistics.mean(excess), math.inf
        if not math.isfinite(mean):
            mean = math.inf
        elif size == sizes[0]:
            reach = 0.0
        elif seeds > 1:
            degrees = min(seeds - 1, len(STUDENT) - 1)
            reach = STUDENT[degrees] * statistics.stdev(excess) / math.sqrt(seeds)
        rows.append(Row(size, losses, mean, reach))
        print(f"{size:>10,}  {statistics.mean(losses):.4f}  {mean:+.4f} +- {reach:.4f}")
    return rows


def crossing(rows: Sequence[Row], tolerance: float) -> float | None:
    """Return the size at which the excess crosses the tolerance; None if it does not.

    Interpolated linearly in the logarithm of the size.
    """
    for before, after in pairwise(rows):
        if after.excess > tolerance:
            if not math.isfinite(after.excess):
                return float(before.size)
            part = (tolerance - before.excess) / (after.excess - before.excess)
            return float(before.size * (after.size / before.size) ** part)
    return None


def bounds(rows: Sequence[Row], tolerance: float) -> tuple[int, int | None]:
    """Return the last size surely within the tolerance and the first surely beyond it."""
    sure = [row.excess + row.reach <= tolerance for row in rows]
    within = rows[max(next((n for n, one in enumerate(sure) if not one), len(rows)) - 1, 0)].size
    return within, next((r.size for r in rows if r.excess - r.reach > tolerance), None)


def weights(checkpoint: Path | None, warmup: int) -> dict[str, Any]:
    """Return the model and optimizer to start from: a checkpoint's model, or a short training."""
    model, optimizer, data, _ = make()
    if checkpoint is not None:
        reader = open_checkpoint(checkpoint)
        model.load_state_dict(
            {name: reader.tensor("model", name) for name in reader.names("model")}
        )
    else:
        stretto.Trainer(
            model, data, optimizer=optimizer, loss=next_byte_loss,
            max_duration=f"{warmup}sp", batch_size=8, log=stretto.Logging(console=False),
        ).fit()  # fmt: skip
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def main() -> None:
    """Read the command line, train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint folder to start from")
    parser.add_argument("--warmup", type=int, default=2048, help="samples to train first")
    parser.add_argument("--sizes", default="8,16,32,64,128")
    parser.add_argument("--samples", type=int, default=1024, help="of each branch")
    parser.add_argument("--seeds", type=int, default=3, help="orders of the samples")
    parser.add_argument("--tolerance", type=float, default=0.01, help="in the unit of the loss")
    given = parser.parse_args()
    start = weights(given.checkpoint, given.warmup)
    print("batch size    loss  excess")
    rows = compare([int(one) for one in given.sizes.split(",")], given.samples, given.seeds, start)
    size, (low, high) = crossing(rows, given.tolerance), bounds(rows, given.tolerance)
    about = "not crossed" if size is None else f"about {size:,.0f}"
    print(f"critical batch size: {about}; surely within up to {low:,}, surely beyond from {high}")


if __name__ == "__main__":
    main()
