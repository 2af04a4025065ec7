"""Models whose kernels are others for other sizes: no curve describes them, and none is trusted."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.errors import FitError
from stretto.memory import predict
from stretto.memory.finding.finder import find_batch_size
from stretto.memory.measuring.real import record_step
from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep


class Distances(nn.Module):
    """All distances in a batch; `torch.cdist` takes another kernel above 25 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        features = self.layer(x)
        return torch.cdist(features, features)


class Chunks(nn.Module):
    """A cross-entropy over chunks of 64 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(32, 32), nn.Linear(32, 512)

    def forward(self, x: Tensor) -> Tensor:
        losses = [
            functional.cross_entropy(self.head(rows), torch.zeros(len(rows), dtype=torch.long))
            for rows in self.layer(x).split(64)
        ]
        return torch.stack(losses)


class Fours(nn.Module):
    """Takes samples in fours."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) % 4:
            raise ValueError("the samples come in fours")
        result: Tensor = self.layer(x)
        return result


@pytest.fixture(autouse=True)
def _little_garbage() -> Iterator[None]:
    # Each trial collects garbage, which takes long with all that pytest and torch hold.
    gc.freeze()
    yield
    gc.unfreeze()


def step_of(model: nn.Module) -> SupervisedStep:
    torch.manual_seed(0)
    return SupervisedStep(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).mean())


def rows(size: int) -> Tensor:
    return torch.ones(size, 32)


def real_peak(step: SupervisedStep, size: int) -> int:
    WholeStep.of(step).run(rows(2))
    return record_step(step, rows(size), size).peak


@pytest.mark.parametrize("model", [Distances, Chunks])
def test_a_prediction_calls_only_verified_sizes_exact(model: Callable[[], nn.Module]) -> None:
    step = step_of(model())
    prediction = predict(step, rows)
    assert prediction.certainty(200) == "extrapolated"
    true = real_peak(step_of(model()), 200)
    assert abs(prediction.peak(200) / true - 1) > 0.2  # what is extrapolated may be far off
    while not prediction.verify(200):
        pass
    assert prediction.certainty(200) == "exact"
    assert prediction.peak(200) == pytest.approx(true, rel=0.001)


@pytest.mark.parametrize("model", [Distances, Chunks])
def test_an_answer_for_stated_memory_is_verified_and_fits(model: Callable[[], nn.Module]) -> None:
    answer = find_batch_size(step_of(model()), rows(2), device_memory="1500kB", margin=0)
    assert answer.certainty == "exact"
    assert answer.peak is not None
    assert answer.peak == pytest.approx(real_peak(step_of(model()), answer.size), rel=0.001)
    assert 0.97 * 1_500_000 < answer.peak <= 1_500_000
    assert answer.cost.real_steps == 0


@pytest.mark.parametrize("model", [Distances, Chunks])
def test_a_trainer_finds_its_micro_batch(model: Callable[[], nn.Module]) -> None:
    from stretto import Trainer

    made = model()
    trainer = Trainer(
        made,
        torch.utils.data.TensorDataset(torch.ones(400, 32)),
        optimizer=torch.optim.AdamW(made.parameters()),
        loss=lambda model, batch: model(batch[0]).mean(),
        max_duration="1ep",
        batch_size=400,
        micro_batch_size="auto",
    )
    assert trainer.loader.micro_batch_size == 400


def test_what_can_neither_be_predicted_nor_probed_is_tried() -> None:
    """Steps of two and three samples raise an error of the model's own."""
    step = step_of(Fours())
    answer = find_batch_size(step, rows(4), multiple_of=4, maximum=64)
    assert (answer.size, answer.certainty) == (64, "tried")
    with pytest.raises(FitError, match="MiB"):
        find_batch_size(step, rows(4), multiple_of=4, maximum=64, device_memory="1MiB")
    with pytest.raises(ValueError, match="fours"):  # the user's own mistake, as it is
        find_batch_size(step, rows(4), maximum=64)


def test_where_each_size_costs_a_step_few_are_asked_about() -> None:
    sizes: list[int] = []

    def make(size: int) -> Tensor:
        sizes.append(size)
        return rows(size)

    answer = find_batch_size(step_of(Chunks()), make, device_memory="3MB", margin=0)
    assert answer.size > 1000
    assert len(sizes) < 20
