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
SEEN: list[int] = []


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
    return ((output - target) ** 2).sum() / 8


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: error(model, batch).sum(),
        lambda model, batch: error(model, batch).sum() / 64,
        lambda model, batch: error(model, batch).sum() + model[0].weight.sum() * 0,
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
        lambda model, batch: mean(model, batch).sqrt(),
        lambda model, batch: 0 * mean(model, batch),
        lambda model, batch: mean(model, batch) + torch.rand(()),
    ],
)
def test_other_losses_hear_nothing(loss: Any) -> None:
    assert fit(loss)[0] == []


def test_looking_leaves_the_run_as_it_was() -> None:
    own: list[int] = []

    class Noting:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def __call__(self, model: Any, batch: Any) -> Tensor:
            self.seen.append(len(batch[0]))
            own.append(len(batch[0]))
            return error(model, batch).mean()

        def method(self, model: Any, batch: Any) -> Tensor:
            return self(model, batch)

    def in_closure(model: Any, batch: Any) -> Tensor:
        own.append(len(batch[0]))
        SEEN.append(len(batch[0]))
        return error(model, batch).mean()

    first, second = Noting(), Noting()
    _, expected = fit(mean, stepping={"loss_weight": len_of})
    for loss in (first, second.method, in_closure):
        own.clear()
        said, model = fit(loss)
        assert said == []
        for one, other in zip(
            model.state_dict().values(), expected.state_dict().values(), strict=True
        ):
            assert torch.equal(one, other)
    assert first.seen == second.seen == SEEN == own == [4] * 4


def len_of(batch: Any) -> int:
    return len(batch[0])
