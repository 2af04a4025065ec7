"""Micro-batches that shrink where memory runs out and grow again; the batch stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training.conftest import squared_error
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.errors import TrainingError
from stretto.training import Callback, Stepping, Trainer, safety_net
from stretto.training.safety_net import SafetyNet

Make = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:memory ran out:RuntimeWarning")


class Memory:
    """A loss that runs out of memory where a micro-batch is larger than there is room for."""

    def __init__(self, *rooms: tuple[int, int]) -> None:
        self.rooms = dict(rooms)
        """From which batch on there is room for how many samples."""
        self.batch = 0
        self.sizes: list[tuple[int, int]] = []

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        room = [size for first, size in self.rooms.items() if first <= self.batch][-1]
        loss = squared_error(model, batch)
        if len(batch[0]) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.sizes.append((self.batch, len(batch[0])))
        return loss


class Count(Callback):
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def on_batch_start(self, trainer: Any, step: Any) -> None:
        self.memory.batch = step.timestamp.batch


class Noisy(nn.Module):
    """Dropout and batch normalisation: what a step that is done again must not feel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2)
        ).double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


def noisy_trainer(memory: Memory, data: TensorDataset, size: int) -> Trainer:
    torch.manual_seed(3)
    model = Noisy()
    trainer = Trainer(
        model,
        data,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=memory,
        max_duration="2ep",
        batch_size="0sp:8 40sp:16",
        callbacks=[Count(memory)],
        stepping=Stepping(clip_norm=1.0),
    )
    trainer._loop.stepper.net = SafetyNet(model, trainer.loader.spec, trainer._ranks, size=size)
    return trainer


def state(trainer: Trainer) -> list[Tensor]:
    optimizer = trainer.optimizer.state_dict()["state"]
    return [
        *trainer.model.state_dict().values(),
        *(tensor for entry in optimizer.values() for tensor in entry.values()),
    ]


def test_a_step_that_is_taken_again_is_the_step_of_the_smaller_size(problem: Make) -> None:
    """To the last bit: weights, optimizer, what batch normalisation has seen, and all chance."""
    data = problem().data
    memory = Memory((0, 16), (4, 4))
    trainer = noisy_trainer(memory, data, 16)
    trainer.fit()
    assert trainer._loop.stepper.net.splits == 1  # type: ignore[union-attr]

    class Shrink(Callback):
        def on_batch_start(self, trainer: Any, step: Any) -> None:
            if step.timestamp.batch == 4:
                trainer._loop.stepper.net.size = 4

    free = Memory((0, 16))
    other = noisy_trainer(free, data, 16)
    other._loop.events._listeners["on_batch_start"].append(Shrink().on_batch_start)
    other.fit()
    assert memory.sizes == free.sizes
    assert {size for batch, size in memory.sizes if batch >= 4} == {4}
    for one, another in zip(state(trainer), state(other), strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_is_that_of_the_whole_batch(problem: Make, reduction: Any) -> None:
    """Weights of a run that was split are those of one that was not, to rounding."""
    runs = []
    for rooms in (((0, 8),), ((0, 8), (2, 3), (5, 1))):
        run, memory = problem(), Memory(*rooms)

        def loss(model: Any, batch: Any, memory: Memory = memory) -> Any:
            mean = memory(model, batch)
            return mean if reduction == "mean" else mean * len(batch[0])

        trainer = run.trainer(
            loss=loss, callbacks=[Count(memory)], stepping=Stepping(loss_reduction=reduction)
        )
        net = SafetyNet(run.model, trainer.loader.spec, trainer._ranks, size=8)
        trainer._loop.stepper.net = net
        trainer.fit()
        runs.append(run.weights())
    assert net.splits == 3  # 8, 4, 2, 1
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-12, atol=1e-13)


def test_it_grows_back_and_waits_longer_if_that_was_too_early(
    problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safety_net, "QUIET_STEPS", 5)
    run, memory = problem(num_samples=480), Memory((0, 8), (2, 4), (20, 8))
    trainer = run.trainer(loss=memory, callbacks=[Count(memory)], max_duration="60ba")
    net = SafetyNet(run.model, trainer.loader.spec, trainer._ranks, size=8)
    trainer._loop.stepper.net = net
    trainer.fit()
    largest: dict[int, int] = {}
    for batch, size in memory.sizes:
        largest[batch] = max(size, largest.get(batch, 0))
    changes = [batch for batch in range(1, 60) if largest[batch] != largest[batch - 1]]
    # Cut at 2; tried again, and cut, after 5 and after 10 more quiet steps; then 8 fit again.
    assert (changes, net.splits) == ([2, 37], 3)
    assert (largest[59], net.size) == (8, 8)


def test_a_sample_that_does_not_fit_is_told(problem: Make) -> None:
    run, memory = problem(), Memory((0, 8), (1, 0))
    trainer = run.trainer(loss=memory, callbacks=[Count(memory)])
    trainer._loop.stepper.net = SafetyNet(run.model, trainer.loader.spec, trainer._ranks, size=8)
    with pytest.raises(TrainingError, match=r"at 8sp: memory runs out with one sample \(CUDA out"):
        trainer.fit()


def test_other_errors_pass(problem: Make) -> None:
    run = problem()

    def loss(model: Any, batch: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    trainer = run.trainer(loss=loss)
    trainer._loop.stepper.net = SafetyNet(run.model, trainer.loader.spec, trainer._ranks, size=8)
    with pytest.raises(RuntimeError, match="device-side assert"):
        trainer.fit()


def test_its_state_goes_on(problem: Make) -> None:
    run = problem()
    ranks = run.trainer()._ranks
    spec = run.trainer().loader.spec
    net = SafetyNet(run.model, spec, ranks, size=64)
    net.size, net._quiet, net._patience, net.splits = 16, 7, 400, 2
    other = SafetyNet(run.model, spec, ranks, size=8)
    other.load_state_dict(net.state_dict())
    assert other.state_dict() == net.state_dict()
