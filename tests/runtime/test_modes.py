"""The modes of a model's parts: the same in training, in trials and when steps are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto import SupervisedStep, Trainer, find_batch_size
from stretto.memory import measure_step
from stretto.memory.step import WholeStep, read_step, step_bytes
from stretto.runtime.modes import train_mode

LEAVES: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(2, 2),
    lambda: nn.BatchNorm1d(2),
    lambda: nn.Dropout(0.1),
]


class SelfFreezing(nn.Sequential):
    """Puts its first part into eval mode in its own `train`, as MMDetection's backbones do."""

    def train(self, mode: bool = True) -> SelfFreezing:
        super().train(mode)
        self[0].eval()
        return self


def modes(model: nn.Module) -> list[bool]:
    return [one.training for one in model.modules()]


def as_trained(model: nn.Module) -> list[bool]:
    """What a run must train in, without a module of its own that has a `train`."""
    return modes(model) if model.training else [True] * len(modes(model))


def trees() -> st.SearchStrategy[nn.Module]:
    leaves = st.sampled_from(LEAVES).map(lambda make: make())
    grown = st.recursive(
        leaves,
        lambda inner: st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: nn.Sequential(*parts)
        ),
    )
    wrapped = grown.map(lambda one: nn.Sequential(nn.Linear(2, 2), one))
    return st.tuples(wrapped, st.lists(st.booleans(), min_size=1)).map(lambda both: _mixed(*both))


def _mixed(model: nn.Module, drawn: list[bool]) -> nn.Module:
    for number, one in enumerate(model.modules()):
        one.training = drawn[number % len(drawn)]
    return model


class Seen:
    """Notes the modes of each forward pass that has gradients, and of those that have none."""

    def __init__(self) -> None:
        self.training: set[tuple[bool, ...]] = set()
        self.evaluation: set[tuple[bool, ...]] = set()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        seen = self.training if torch.is_grad_enabled() else self.evaluation
        seen.add(tuple(modes(model)))
        return cast(Tensor, model(batch[0])).square().mean()


def data() -> TensorDataset:
    return TensorDataset(torch.randn(16, 2))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees())
def test_all_that_runs_a_step_runs_it_in_the_modes_of_training(model: nn.Module) -> None:
    before, expected, loss = modes(model), as_trained(model), Seen()
    step = SupervisedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    find_batch_size(step, [torch.randn(2, 2)], maximum=4)
    measure_step(step, [torch.randn(2, 2)], [2])
    assert (loss.training, modes(model)) == ({tuple(expected)}, before)
    trainer = Trainer(
        model,
        data(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        max_duration="4ba",
        batch_size=4,
        micro_batch_size="auto",
        evaluate={"data": data(), "every": "2ba"},
    )
    trainer.measure_cost([2, 4])
    trainer.evaluate()
    assert (loss.training, modes(model)) == ({tuple(expected)}, before)
    trainer.fit()
    assert loss.training == {tuple(expected)}
    assert loss.evaluation == {tuple([False] * len(before))}
    assert modes(model) == expected


@settings(max_examples=15, deadline=None)
@given(trees())
def test_a_step_that_travels_to_the_phantom_runs_in_the_modes_of_training(model: nn.Module) -> None:
    expected = as_trained(model)
    step = SupervisedStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).mean())
    travelled = read_step(step_bytes(WholeStep.of(step)), "cpu")
    travelled.run(torch.randn(2, 2))
    assert modes(travelled.model) == expected


@pytest.mark.parametrize("is_training", [True, False])
def test_the_train_of_a_model_itself_is_called(is_training: bool) -> None:
    model = SelfFreezing(nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 1))
    model.training = is_training
    for _ in range(2):
        train_mode(model)
        assert modes(model) == [True, False, True, True]


def test_a_frozen_batch_normalisation_keeps_its_statistics() -> None:
    backbone = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)).eval().requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(4, 1))
    before = [one.clone() for one in backbone.buffers()]
    Trainer(
        model,
        data(),
        optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1),
        loss=Seen(),
        max_duration="1ep",
        batch_size=4,
    ).fit()
    assert all(map(torch.equal, before, backbone.buffers()))


class Dropping(nn.Module):
    """Needs memory in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) > 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cast(Tensor, self.layer(x))


def test_a_model_in_eval_mode_is_tried_as_it_trains() -> None:
    sleeping = Dropping().eval()  # as `from_pretrained` returns a model
    optimizer = torch.optim.SGD(sleeping.parameters(), lr=0.1)
    step = SupervisedStep(sleeping, optimizer, lambda m, x: m(x).mean())
    assert find_batch_size(step, torch.randn(2, 2), maximum=64).size == 9
    assert not sleeping.training


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_model_inside_a_wrapper_decides(is_compiled: bool) -> None:
    for inner, expected in [
        (nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).eval(), [True, True, True]),
        (nn.Sequential(nn.Dropout().eval(), nn.Linear(2, 2)), [True, False, True]),
    ]:
        model: nn.Module = nn.DataParallel(inner)
        train_mode(cast(nn.Module, torch.compile(model)) if is_compiled else model)
        assert modes(inner) == expected
