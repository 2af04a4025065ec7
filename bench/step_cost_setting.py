"""What every loop of the step-cost benchmark has in common: data, model, optimizer, stopwatch.

Imports torch only, because it runs in the environments of the peers as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH = 32
FEATURES, HIDDEN, CLASSES = 64, 64, 10
# Steps of some milliseconds, as short as real ones are, and so many that they take a few seconds.
WIDE_BATCH, WIDE, WIDE_STEPS = 256, 2_048, 600
LEARNING_RATE = 0.05
# Nothing before this step counts: the first ones fill caches, and trainers set up as they go.
FIRST_TIMED_STEP = 200

Batch: TypeAlias = Any
"""`(rows, labels)`, or `{"rows": ..., "labels": ...}` where the peer takes nothing else."""


class Rows(Dataset[Batch]):
    """Rows of noise with labels; a whole batch is one indexing operation on each tensor.

    `__getitems__` is torch's own way to fetch a batch at once, and stretto is given `get_batch`;
    both do the same, so that all loops collate equally fast.
    """

    def __init__(self, num_samples: int, *, is_dict: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(num_samples, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (num_samples,), generator=generator)
        self.is_dict = is_dict

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        rows, labels = self.rows[indices], self.labels[indices]
        return {"rows": rows, "labels": labels} if self.is_dict else (rows, labels)

    get_batch = __getitems__


def as_it_is(batch: Batch) -> Batch:
    """Collate what is collated already."""
    return batch


def tensors(data: Rows) -> TensorDataset:
    """Return the same samples as a `TensorDataset`."""
    return TensorDataset(data.rows, data.labels)


def data_loader(data: Rows, batch: int = BATCH) -> DataLoader[Batch]:
    """Return the loader of the bare loop and of every peer."""
    return DataLoader(data, batch_size=batch, shuffle=True, collate_fn=as_it_is)


@dataclass
class Stopwatch:
    """Reads the clocks at two steps of a run, as the model's forward passes tell it.

    So a loop's time is that of its steps alone: what is done before the first and after the last,
    which a short run would count too dearly, is left out, on both sides alike.
    """

    last: int
    """The length of the run, in steps."""
    steps: int = 0
    batch: int = BATCH
    hidden: int = HIDDEN
    """The width of the network's hidden layer."""
    wall: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)

    def step(self) -> None:
        """Count a forward pass."""
        self.steps += 1
        if self.steps in (FIRST_TIMED_STEP, self.last):
            self.wall.append(time.perf_counter_ns())
            self.cpu.append(time.process_time_ns())

    def microseconds(self) -> dict[str, float]:
        """Return the time of one step, by the wall and of the processor (all threads)."""
        if self.steps != self.last:
            raise RuntimeError(f"the loop took {self.steps} steps, not {self.last}")
        timed = 1_000 * (self.last - FIRST_TIMED_STEP)
        return {
            "wall": (self.wall[1] - self.wall[0]) / timed,
            "cpu": (self.cpu[1] - self.cpu[0]) / timed,
        }


class Network(nn.Module):
    """The MLP 64-64-10, or a wider one."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, stopwatch.hidden), nn.ReLU(), nn.Linear(stopwatch.hidden, CLASSES)
        )
        self.stopwatch = stopwatch

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits `(batch, 10)`."""
        self.stopwatch.step()
        logits: torch.Tensor = self.layers(rows)
        return logits


def network(stopwatch: Stopwatch) -> Network:
    """Return the network, the same in every run."""
    torch.manual_seed(1)
    return Network(stopwatch)


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Return the optimizer of every loop."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def torch_cosine(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.CosineAnnealingLR:
    """Return torch's scheduler, for the peers that take one."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def cosine(step: int, steps: int) -> float:
    """Return the learning rate of a step, as the bare loop computes it."""
    return LEARNING_RATE * (1 + math.cos(math.pi * step / steps)) / 2


def run_bare(data: Rows, stopwatch: Stopwatch) -> None:
    """Train with nothing but torch: the yardstick."""
    model = network(stopwatch)
    optimizer = sgd(model)
    keys = ("rows", "labels") if data.is_dict else (0, 1)
    for step, batch in enumerate(data_loader(data, stopwatch.batch)):
        for group in optimizer.param_groups:
            group["lr"] = cosine(step, stopwatch.last)
        loss = functional.cross_entropy(model(batch[keys[0]]), batch[keys[1]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def widened(stopwatch: Stopwatch) -> Rows:
    """Have a loop train the wide network in larger batches; return the rows."""
    stopwatch.batch, stopwatch.hidden = WIDE_BATCH, WIDE
    stopwatch.last = min(stopwatch.last, WIDE_STEPS)
    return Rows(stopwatch.last * WIDE_BATCH)


def run_bare_wide(_: Rows, stopwatch: Stopwatch) -> None:
    """The yardstick with steps of some milliseconds."""
    run_bare(widened(stopwatch), stopwatch)


def run_bare_tensors(data: Rows, stopwatch: Stopwatch) -> None:
    """Train on a `TensorDataset` that is indexed a batch at a time, with torch's scheduler."""
    samples = tensors(data)
    batches = torch.randperm(len(samples)).split(BATCH)
    _train((samples[indices] for indices in batches), stopwatch)


def run_bare_tensors_with_loader(data: Rows, stopwatch: Stopwatch) -> None:
    """The same as torch's tutorials write it: its loader takes the samples one by one."""
    _train(DataLoader(tensors(data), batch_size=BATCH, shuffle=True), stopwatch)


def _train(batches: Iterable[Batch], stopwatch: Stopwatch) -> None:
    model = network(stopwatch)
    optimizer = sgd(model)
    scheduler = torch_cosine(optimizer, stopwatch.last)
    for rows, labels in batches:
        loss = functional.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


def run_bare_without_loader(data: Rows, stopwatch: Stopwatch) -> None:
    """Train without a DataLoader too: batches cut from one permutation. The hardest yardstick."""
    model = network(stopwatch)
    optimizer = sgd(model)
    order = torch.randperm(len(data)).tolist()
    for step in range(stopwatch.last):
        for group in optimizer.param_groups:
            group["lr"] = cosine(step, stopwatch.last)
        rows, labels = data.get_batch(order[step * BATCH : (step + 1) * BATCH])
        loss = functional.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
