"""Runs that measure their noise, in steps that fail or are beyond all measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.batching import Signals
from stretto.data import DataSpec
from stretto.training import Callback, Checkpointing, Stepping, Trainer

Make = Callable[..., Any]


class Listener(Callback):
    """Notes which batches were measured; has tokens counted after the last pass of each."""

    changes_tokens = True

    def __init__(self) -> None:
        self.batches: list[int] = []

    def transform_batch(self, run: Any, batch: Any) -> Any:
        return batch

    def on_noise(self, run: Any, step: Any, signals: Signals) -> None:
        self.batches.append(step.timestamp.batch)


def test_squares_beyond_a_float_are_not_told() -> None:
    # Gradients are finite, but not the sum of their squares.
    listener, model = Listener(), nn.LayerNorm(1, dtype=torch.float64)
    Trainer(
        model,
        torch.ones(64, 1, dtype=torch.float64),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss=lambda model, batch: model(batch).mean() * 4.5e154,
        max_duration="2ba",
        batch_size=8,
        micro_batch_size=2,
        stepping=Stepping(non_finite="skip"),
        callbacks=[listener],
    ).fit()
    assert listener.batches == []


def test_a_step_that_failed_is_not_taken_for_the_next(problem: Make, tmp_path: Path) -> None:
    one, passes, fails = problem(), 0, False

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal passes, fails
        passes += 1
        fails = passes == 5 * 2  # the last of the batch numbered 4
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def count(batch: Any) -> int:
        nonlocal fails
        if fails:
            fails = False
            raise LookupError("the tokens cannot be counted")
        return len(batch[0])

    listener = Listener()
    one.data = DataSpec(one.data, get_num_tokens_in_batch=count)
    trainer = one.trainer(
        loss=loss,
        max_duration="6ba",
        micro_batch_size=4,
        stepping=Stepping(measure_noise=2),
        callbacks=[listener],
        folder=tmp_path / "run",
        checkpoint=Checkpointing("3ba"),
    )
    with pytest.raises(LookupError):
        trainer.fit()
    assert listener.batches == [0, 2]
    trainer.resume()  # behind batch 2; 3 is not measured
    trainer.fit()
    assert listener.batches == [0, 2, 4]
