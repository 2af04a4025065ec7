"""Runs whose memory runs out where the step cannot be repeated in smaller pieces."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from stretto.training import Trainer
from stretto.training.stepper import Retry


def short(*_: object, **__: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class ShortUpdate(torch.optim.SGD):
    step = short


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).mean()
    return loss


def trainer(kind: type[torch.optim.SGD] = torch.optim.SGD, loss: Any = mean) -> Trainer:
    model = nn.Linear(3, 1)
    return Trainer(
        model,
        TensorDataset(torch.zeros(20, 3)),
        optimizer=kind(model.parameters()),
        loss=loss,
        max_duration="2ep",
        batch_size=4,
    )


def together(samples: int) -> None:
    """Ranks that meet in each pass."""
    loader = trainer().run.loader
    retry = Retry(
        nn.SyncBatchNorm(3),
        loader.spec,
        SimpleNamespace(world_size=2, rank=1),  # type: ignore[arg-type]
        size=samples,
    )
    step = next(loader)
    step.micro_batches[0].num_samples = samples
    retry.fall_back(step, step.micro_batches, "CUDA out of memory", clear=short)


CASES: list[tuple[str, Callable[[], object]]] = [
    ("shortage-in-update", lambda: trainer(ShortUpdate).fit()),
    ("shortage-where-ranks-wait", lambda: together(4)),
    ("shortage-where-ranks-wait-for-one", lambda: together(1)),
]
