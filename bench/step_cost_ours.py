"""The same run with stretto's Trainer, with everything on that its claim names.

The exact clock in all units, a cosine learning rate, and a run folder with a logged line every
3,200 samples (some 30 lines) in `metrics.jsonl`. The data are `Rows`, whose `get_batch` is the
indexing operation of the yardstick, or a `TensorDataset`; the order is stretto's own, shuffled.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from step_cost_setting import BATCH, Batch, Rows, Stopwatch, network, sgd, tensors, widened
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from stretto.batching import LinearRamp
from stretto.data import DataSpec
from stretto.schedules import Cosine
from stretto.training import Logging, Trainer

RAMP = LinearRamp(24, 43, "100%")
"""The sizes 24 to 42, an equal number of samples each: the mean over batches is 32.07."""


def run_fixed(data: Rows, stopwatch: Stopwatch) -> None:
    """Batches of 32, as in the yardstick."""
    _fit(data, stopwatch, BATCH)


def run_ramp(data: Rows, stopwatch: Stopwatch) -> None:
    """A batch size that grows from 24 to 42 over the same samples, in nearly as many steps."""
    _fit(data, stopwatch, RAMP)


def run_wide(_: Rows, stopwatch: Stopwatch) -> None:
    """Batches of 256 with a wide network, so that a step takes some milliseconds."""
    rows = widened(stopwatch)
    _fit(rows, stopwatch, stopwatch.batch)


def run_tensors(data: Rows, stopwatch: Stopwatch) -> None:
    """Batches of 32 from a `TensorDataset`."""
    _fit(tensors(data), stopwatch, BATCH)


def run_tensors_ramp(data: Rows, stopwatch: Stopwatch) -> None:
    """The same ramp from a `TensorDataset`."""
    _fit(tensors(data), stopwatch, RAMP)


def _fit(data: Rows | TensorDataset, stopwatch: Stopwatch, batch_size: Any) -> None:
    model = network(stopwatch)
    spec = DataSpec(data, get_batch=data.get_batch if isinstance(data, Rows) else None)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            spec,
            optimizer=sgd(model),
            loss=_loss,
            max_duration="1ep",
            batch_size=batch_size,
            schedules={"lr": Cosine()},
            log=Logging("3200sp", console=False),
            folder=folder,
        )
        assert trainer.plan is not None
        assert trainer.plan.num_batches is not None
        stopwatch.last = trainer.plan.num_batches
        trainer.fit()


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    rows, labels = batch
    return functional.cross_entropy(model(rows), labels)
