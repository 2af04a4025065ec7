"""What is probably a mistake is warned of once, when the run is built."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from stretto import Trainer, prepare
from stretto.errors import PlanWarning
from stretto.schedules import Cosine

DATA = TensorDataset(torch.randn(33, 4), torch.randn(33, 4))


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def said(**given: Any) -> list[str]:
    """What a run and a trainer with these arguments warn of; both say the same."""
    found = []
    model = given.pop("model", None) or nn.Linear(4, 4)
    usual: dict[str, Any] = {"batch_size": 8, "max_duration": "1ep"}
    lr = given.pop("lr", 0.1)
    usual |= given | {"optimizer": torch.optim.SGD(model.parameters(), lr=lr)}
    for make in (
        lambda: prepare(DATA, model=model, **usual),
        lambda: Trainer(model, DATA, loss=nn.MSELoss(), **usual),
    ):
        with warnings.catch_warnings(record=True) as each:
            warnings.simplefilter("always")
            make()
        assert {one.category for one in each} <= {PlanWarning}
        found.append([str(one.message) for one in each])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"batch_size": 4096}, "33 samples"),
        ({"max_duration": "1000s"}, "1000sp"),
        ({"model": norm()}, "one sample"),
        ({"model": norm(), "batch_size": "0sp:1 8sp:8", "max_duration": "32sp"}, "one sample"),
        (
            {"model": norm(), "micro_batch_size": 1, "loading": {"last_batch": "drop"}},
            "one sample",
        ),
    ],
)
def test_mistakes(given: dict[str, Any], word: str) -> None:
    (line,) = said(**given)
    assert word in line


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_duration": "90s"},
        {"max_duration": "1h"},
        {"model": norm(), "loading": {"last_batch": "drop"}},
        {"model": norm(), "max_duration": "32sp"},
    ],
)
def test_what_is_none(given: dict[str, Any]) -> None:
    assert said(**given) == []


def test_weights_that_no_optimizer_has_are_said() -> None:
    class Rebuilt(nn.Linear):
        def named_parameters(self, *args: Any, **named: Any) -> Any:
            yield from super().named_parameters(*args, **named)
            yield "late", nn.Parameter(torch.ones(1))

    (line,) = said(model=Rebuilt(4, 4))
    assert "no optimizer has late of the model" in line


@pytest.mark.parametrize("schedules", [{"lr": Cosine()}, {"lr": 1.0}])
def test_a_schedule_of_a_learning_rate_of_zero_is_said(schedules: dict[str, Any]) -> None:
    (line,) = said(schedules=schedules, lr=0.0)
    assert "learning rate of the optimizer is 0" in line
    assert said(lr=0.0) == []  # nothing is scheduled: it is meant
