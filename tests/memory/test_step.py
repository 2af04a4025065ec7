"""The step is the Trainer's: the same memory at each moment, the same weights after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.data import StepLoader
from stretto.memory import TrainingStep
from stretto.training.ranks import Ranks
from stretto.training.settings import Stepping
from stretto.training.stepper import Stepper


def loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(("accumulation", "measures"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_the_step_of_the_trainer(precision: Any, accumulation: int, measures: bool) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 3)
    models = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    step = TrainingStep(
        models[0],
        optimizers[0],
        loss,
        precision=precision,
        clip_norm=0.5,
        accumulation=accumulation,
        measures_noise=measures,
    )
    step.run(batch)

    stepper = Stepper(
        models[1],
        optimizers[1],
        loss=loss,
        settings=Stepping(precision=precision, clip_norm=0.5),
        ranks=Ranks(torch.device("cpu")),
    )
    whole = torch.cat([batch] * accumulation)
    (given,) = StepLoader(
        list(whole), len(whole), max_duration="1ba", micro_batch_size=4, shuffle=False
    )
    stepper.gradient(given)
    stepper.update()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_phases_in_order() -> None:
    model = nn.Linear(3, 1)
    step = TrainingStep(model, torch.optim.SGD(model.parameters()), loss, accumulation=2)
    phases: list[str] = []
    step.run(torch.ones(2, 3), enter=phases.append)
    assert phases == ["forward", "backward", "forward", "backward", "optimizer"]


def test_a_sum_is_not_divided() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.bias.detach().clone()
    TrainingStep(
        model, optimizer, lambda m, x: m(x).sum(), accumulation=2, loss_reduction="sum"
    ).run(torch.ones(5, 3))
    assert torch.allclose(before - model.bias, torch.tensor(10.0))
