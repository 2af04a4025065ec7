"""The memory finder takes the trainer's own step: the same passes, with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.data import DataSpec, StepLoader
from stretto.distributed.strategy import Single
from stretto.errors import FitError
from stretto.memory import find_batch_size
from stretto.memory.step import WholeStep, read_step, step_bytes
from stretto.runtime import SupervisedStep, TrainStep
from stretto.runtime.ranks import Ranks
from stretto.settings import Stepping
from stretto.training.stepper import Stepper


def loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(("accumulation", "measures"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_its_weights_are_those_of_a_step_of_the_trainer(
    precision: Any, accumulation: int, measures: bool
) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 3)
    models = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = [
        SupervisedStep(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            loss,
            precision=precision,
            clip_norm=0.5,
        )
        for model in models
    ]
    WholeStep.of(steps[0], accumulation=accumulation, measures_noise=measures).run(batch)

    strategy = Single().of(Ranks(torch.device("cpu")))
    whole = torch.cat([batch] * accumulation)
    spec = DataSpec.of(list(whole))
    stepper = Stepper(steps[1], spec, settings=Stepping(), strategy=strategy)
    (given,) = StepLoader(
        list(whole), len(whole), max_duration="1ba", micro_batch_size=4, loading={"shuffle": False}
    )
    stepper.gradient(given)
    stepper.update()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_sum_is_not_divided() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.bias.detach().clone()
    step = SupervisedStep(model, optimizer, lambda m, x: m(x).sum(), loss_reduction="sum")
    WholeStep.of(step, accumulation=2).run(torch.ones(5, 3))
    assert torch.allclose(before - model.bias, torch.tensor(10.0))


def test_nothing_of_the_step_itself_is_bound_to_this_rank() -> None:
    """Neither the average over ranks nor a wrapped model is part of a step alone."""
    model = nn.Linear(3, 1)
    step: TrainStep = SupervisedStep(model, torch.optim.SGD(model.parameters()), loss)
    step.averaging = lambda: pytest.fail("no rank is waited for")
    alone = WholeStep.of(step).step
    alone.average_gradients()
    assert step.averaging is not None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("mask", torch.tensor([True, False]))


def test_a_step_travels_without_its_memory() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    step = SupervisedStep(model, optimizer, lambda m, x: m.second(m.first(x)).mean())
    WholeStep.of(step).run(torch.ones(2, 4))
    copied = read_step(step_bytes(WholeStep.of(step)), "cpu")
    first, second = copied.model.first, copied.model.second
    assert first.weight is second.weight
    assert isinstance(first.weight, nn.Parameter)
    assert first.weight.count_nonzero() == 0
    assert copied.model.mask.tolist() == [True, False]
    (own,) = copied.step.optimizers
    assert own.param_groups[0]["params"][0] is first.weight
    assert own.param_groups[0]["lr"] == 0.5
    assert own.state[first.weight]["step"].item() == 1
    copied.run(torch.ones(2, 4))
    assert own.state[first.weight]["step"].item() == 2
    assert step.optimizers[0].state[model.first.weight]["step"].item() == 1


class Scaled(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.factor = 2.0

    def step(self, closure: Any = None) -> Any:
        assert self.factor == 2
        return super().step(closure)


@pytest.mark.parametrize("kind", [Scaled, torch.optim.Adafactor])
def test_attributes_of_an_optimizer_travel(kind: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    step = WholeStep.of(SupervisedStep(model, optimizer, lambda m, x: m(x).mean()))
    copied = read_step(step_bytes(step), "cpu")
    copied.run(torch.ones(2, 4))
    assert copied.step.optimizers[0].param_groups[0]["params"][0] is copied.model.weight
    # Without it, Adafactor looks for an option that it does not have, on a GPU only.
    assert copied.step.optimizers[0]._warned_capturable_if_run_uncaptured


def test_views_share_a_storage_after_the_journey() -> None:
    flat = torch.zeros(6)
    one, two = read_step(step_bytes([flat[:3], flat[3:].view(torch.bfloat16)]), "cpu")
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    assert two.storage_offset() == 6


def test_a_model_alone_is_no_step() -> None:
    with pytest.raises(FitError, match="SupervisedStep"):
        find_batch_size(nn.Linear(2, 2), torch.zeros(3, 2))
