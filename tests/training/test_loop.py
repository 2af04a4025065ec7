"""Steps that follow each other without questions are the same as any others."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.runtime import TrainStep
from stretto.training import Callback, Logging, Stepping, Trainer

Make = Callable[..., Any]


def ledger(folder: Path) -> list[dict[str, str]]:
    with (folder / "ledger.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_step_may_load_a_state_into_its_optimizer(problem: Make, tmp_path: Path) -> None:
    """Loading puts new parameter groups into it, which get the learning rate of the next step."""
    run = problem()
    rates: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        rates.append(run.optimizer.param_groups[0]["lr"])
        if len(rates) == 3:
            state = run.optimizer.state_dict()
            state["param_groups"][0]["lr"] = 0.7
            run.optimizer.load_state_dict(state)
        return (model(batch[0]) - batch[1]).square().mean()

    run.trainer(
        loss=loss,
        max_duration="6ba",
        log=Logging("100ba", console=False),
        folder=tmp_path,
    ).fit()
    assert rates == [0.1] * 6
    assert [row["lr"] for row in ledger(tmp_path)] == ["0.1", "0.1", "0.7", "0.1", "0.1", "0.1"]


class Unreadable(TrainStep):
    """Fails in its fourth step, and no loss can be read any more: as on a device that has died."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizers = model, [optimizer]
        self.steps = 0

    def forward_backward(self, batch: Any, weight: float) -> Tensor:
        self.steps += 1
        if self.steps == 4:
            raise ZeroDivisionError
        inputs, targets = batch
        (weight * (self.model(inputs) - targets).square().mean()).backward()
        return torch.zeros((), device="meta")

    def update(self) -> dict[str, float]:
        self.optimizers[0].step()
        return {}


def test_a_failed_device_hides_neither_its_error_nor_the_ledger(
    problem: Make, tmp_path: Path
) -> None:
    run = problem()
    trainer = Trainer(
        Unreadable(run.model, run.optimizer),
        run.data,
        max_duration="2ep",
        batch_size=8,
        folder=tmp_path,
        log=Logging("100ba", console=False),
        stepping=Stepping(non_finite="ignore"),
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert [row["batch"] for row in ledger(tmp_path)] == ["0", "1", "2"]


def test_a_step_that_fails_has_no_loss(problem: Make) -> None:
    """Not that of the step before it."""
    losses: list[float] = []
    steps = 0

    class End(Callback):
        def on_fit_end(self, run: Any) -> None:
            losses.append(run.loss)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise ZeroDivisionError
        return (model(batch[0]) - batch[1]).square().mean()

    with pytest.raises(ZeroDivisionError):
        problem().trainer(loss=loss, callbacks=[End()]).fit()
    assert len(losses) == 1
    assert math.isnan(losses[0])


def test_what_is_written_to_the_optimizer_behind_the_last_batch_stays(problem: Make) -> None:
    class Change(Callback):
        def on_epoch_end(self, run: Any) -> None:
            run.optimizers[0].param_groups[0]["lr"] = 0.7

    run = problem()
    run.trainer(max_duration="1ep", callbacks=[Change()]).fit()
    assert run.optimizer.param_groups[0]["lr"] == 0.7
