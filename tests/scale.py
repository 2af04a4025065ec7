"""A small run in float64 with a batch size that changes inside epochs."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import stretto
from stretto.ordering import SampleOrder

NUM_SAMPLES, SEED = 499, 7


class Waves(Dataset[dict[str, Tensor]]):
    """A regression; each sample has its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(NUM_SAMPLES, 8, generator=generator, dtype=torch.float64)
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index], "id": torch.tensor(index)}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


class Pace(stretto.Callback):
    """Makes each batch take some time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_batch_end(self, run: stretto.Run, step: stretto.Step) -> None:
        time.sleep(self.seconds)


def trainer(
    folder: str | Path | None = None,
    *,
    data: Any = None,
    every: str = "160sp",
    upload: Any = None,
    callbacks: tuple[stretto.Callback, ...] = (),
) -> stretto.Trainer:
    """Return the trainer of this run."""
    model = make_model()
    saving = stretto.Checkpointing(every=every, keep=2, upload=upload)
    return stretto.Trainer(
        model,
        Waves() if data is None else data,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss=loss,
        max_duration="3ep",
        batch_size="0sp:8 300sp:16 900sp:32",
        micro_batch_size=8,
        schedules={"lr": stretto.Cosine(end=0.1, warmup="10%")},
        device="cpu",
        loading=stretto.Loading(seed=SEED),
        checkpoint=None if folder is None else saving,
        folder=folder,
        callbacks=callbacks,
        log=stretto.Logging(console=False),
    )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def reference() -> Tensor:
    """Return the weights after the run in one process without interruption."""
    run = trainer()
    run.fit()
    return weights(run.model)


def planned_ids() -> dict[int, list[int]]:
    """The samples of each step, by its position."""
    plan, order = trainer().plan, SampleOrder(NUM_SAMPLES, seed=SEED)
    assert plan is not None
    return {
        step.timestamp.sample: sorted(order[step.timestamp.sample + at] for at in range(step.size))
        for step in plan.batches()
    }


def traced_ids(folder: Path) -> dict[int, list[int]]:
    """The samples of each step over all ranks, as the last attempt that took the step saw them."""
    attempts: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for file in folder.glob("trace-*"):
        for line in file.read_text().splitlines():
            sample, ids = json.loads(line)
            attempts[file.name.split("-")[1]][sample] += ids
    found: dict[int, list[int]] = {}
    for name in sorted(attempts):
        found |= attempts[name]
    return {sample: sorted(ids) for sample, ids in sorted(found.items())}
