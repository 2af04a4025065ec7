"""Runs that follow the time on several ranks, whose clocks differ."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from stretto import NoiseScale, Trainer

FIXED = 32
"""Samples of a rank that cost as much as a step without any."""
RANK = int(os.environ.get("RANK", "0"))


class Clock:
    """A step takes `FIXED + samples` ms on rank 0, and three times as long on others."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def samples(self, module: nn.Module, given: Any) -> None:
        """Let the time of a pass go by."""
        del module
        self.now += len(given[0]) * 10**6 * (1 if RANK == 0 else 3)

    def update(self, *_: Any) -> None:
        """Let the time of an update go by."""
        self.now += FIXED * 10**6


def train(kind: str, c: Any, folder: Path) -> dict[str, Any]:
    """Train, and return what a rank saw."""
    torch.manual_seed(0)
    x = torch.randn(4000, 20)
    data = TensorDataset(x, x @ torch.randn(20, 1) + 3 * torch.randn(4000, 1))
    model, clock = nn.Sequential(nn.Linear(20, 4), nn.Dropout(0.2), nn.Linear(4, 1)), Clock()
    if kind == "sharded":
        fully_shard(model)
    model[0].register_forward_pre_hook(clock.samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(clock.update)
    trainer = Trainer(
        model,
        data,
        optimizer=optimizer,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        batch_size=NoiseScale(8, 256, c=c, power=0.5, minimum=4),
        rule={"sqrt": 8},
        max_duration="100ba",
        clock=clock,
        folder=folder,
    )
    trainer.fit()
    weights = [
        getattr(one, "full_tensor", lambda one=one: one)().tolist() for one in model.parameters()
    ]
    rows = (folder / "ledger.csv").read_text().splitlines()[1:] if RANK == 0 else []
    return {
        "weights": weights,
        "clock": clock.now,
        "sizes": [row.split(",")[4] for row in rows],
        "samples": trainer.timer.sample,
        "c": trainer._price.get("c"),
    }


def main(out: Path) -> None:
    """Train with each kind of model, then again with the number that was measured."""
    for kind in ("copied", "sharded"):
        runs = [train(kind, "time", out / f"{kind}-time")]
        runs.append(train(kind, runs[0]["c"], out / f"{kind}-number"))
        (out / f"{kind}{RANK}.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
