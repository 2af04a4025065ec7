"""A loss that is a sum over the samples is said, and looking at it changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.training import Trainer

torch.manual_seed(0)
DATA = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def error(model: Any, batch: Any) -> Tensor:
    out: Tensor = (model(batch[0]) - batch[1]) ** 2
    return out


def mean(model: Any, batch: Any) -> Tensor:
    return error(model, batch).mean()


def fit(loss: Any, **settings: Any) -> tuple[list[str], nn.Module]:
    model = Model()
    given: dict[str, Any] = {"batch_size": 8, "micro_batch_size": 4, "max_duration": "1ep"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Trainer(model, DATA, optimizer=optimizer, loss=loss, **given | settings).fit()
    return [str(one.message) for one in found], model


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: error(model, batch).sum(),
        lambda model, batch: 0.5 * error(model, batch).sum() + model[0].weight.sum() * 0,
        lambda model, batch: error(model, batch).flatten().sum(),
        lambda model, batch: error(model, batch).sum((0, 1)),
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"),
        lambda model, batch: (
            nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")
            + model[0].weight.square().sum()
        ),
        criterion,
    ],
)
def test_a_loss_that_is_a_sum_is_said_when_it_is_cut(loss: Callable[..., Tensor]) -> None:
    said, _ = fit(loss)
    assert len(said) == 1
    assert "sum over the samples" in said[0]
    assert fit(loss, micro_batch_size=8)[0] == []
    if loss is not criterion:
        assert fit(loss, stepping={"loss_reduction": "sum"})[0] == []


@pytest.mark.parametrize(
    "loss",
    [
        mean,
        nn.MSELoss(),
        lambda model, batch: mean(model, batch) + 0.1 * model[0].weight.square().sum(),
        lambda model, batch: 0.5 * mean(model, batch),
        lambda model, batch: mean(model, batch) + torch.rand(()),
        lambda model, batch: mean(model, batch) + model[0].weight.square().sum(),
        lambda model, batch: torch.stack([mean(model, batch)] * 4).sum(),
        lambda model, batch: error(model, batch).sum() / len(batch[0]),
    ],
)
def test_other_losses_hear_nothing(loss: Any) -> None:
    assert fit(loss)[0] == []


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda model, batch: error(model, batch).sum() / 64, "divided by another number"),
        (lambda model, batch: mean(model, batch).sqrt(), "Sqrt"),
        (lambda model, batch: error(model, batch).max(), "Max"),
        (
            lambda model, batch: error(model, batch)[batch[1] > 0].mean(),
            "some of the samples",
        ),
    ],
    ids=["a constant", "root", "largest", "selected"],
)
def test_a_loss_that_is_not_known_to_be_a_mean_is_said_once(loss: Any, why: str) -> None:
    said, _ = fit(loss, max_duration="2ep")
    assert len(said) == 1
    assert why in said[0]
    assert fit(loss, micro_batch_size=8)[0] == []
    assert fit(loss, stepping={"loss_weight": lambda batch: len(batch[0])})[0] == []


def test_a_loss_is_called_once_for_each_micro_batch() -> None:
    """It may count its calls in ways that nobody sees, so looking must not call it."""
    calls = 0

    def counting(model: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return error(model, batch).sum()

    assert len(fit(counting)[0]) == 1
    assert calls == 4
