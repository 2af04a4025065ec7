"""Micro-batches that shrink where memory runs out and grow again; the batch stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import squared_error
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.data import DataSpec
from stretto.errors import DataError, TrainingError
from stretto.run_folder import read_ledger
from stretto.training import Callback, Checkpointing, Loading, Stepping, Trainer
from stretto.training.stepper import Retry

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

    def on_batch_start(self, run: Any, step: Any) -> None:
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


def noisy_trainer(memory: Memory, data: TensorDataset, size: int | None) -> Trainer:
    torch.manual_seed(3)
    model = Noisy()
    return Trainer(
        model,
        data,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=memory,
        max_duration="2ep",
        batch_size="0sp:8 40sp:16",
        micro_batch_size=size,
        callbacks=[Count(memory)],
        clip_norm=1.0,
    )


def state(trainer: Trainer) -> list[Tensor]:
    optimizer = trainer.optimizer.state_dict()["state"]
    return [
        *trainer.model.state_dict().values(),
        *(tensor for entry in optimizer.values() for tensor in entry.values()),
    ]


@pytest.mark.parametrize("given", [16, None])
def test_a_step_that_is_taken_again_is_the_step_of_the_smaller_size(
    problem: Make, given: int | None
) -> None:
    """To the last bit: weights, optimizer, what batch normalisation has seen, and all chance."""
    data = problem().data
    memory = Memory((0, 16), (4, 4))
    trainer = noisy_trainer(memory, data, given)
    trainer.fit()
    assert trainer._loop.stepper.retry.splits == 1

    class Shrink(Callback):
        def on_batch_start(self, run: Any, step: Any) -> None:
            if step.timestamp.batch == 4:
                other._loop.stepper.retry.size = 4

    free = Memory((0, 16))
    other = noisy_trainer(free, data, given)
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
        retry = Retry(run.model, trainer.run.loader.spec, trainer._ranks, size=8)
        trainer._loop.stepper.retry = retry
        trainer.fit()
        runs.append(run.weights())
    assert retry.splits == 3  # 8, 4, 2, 1
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("micro_batch_size", [None, 8, 5])
def test_the_ledger_says_how_many_micro_batches_there_were(
    problem: Make, tmp_path: Path, micro_batch_size: int | None
) -> None:
    run, memory = problem(), Memory((0, 8), (3, 2))
    trainer = run.trainer(
        loss=memory,
        callbacks=[Count(memory)],
        max_duration="5ba",
        micro_batch_size=micro_batch_size,
        folder=tmp_path,
    )
    trainer.fit()
    rows = [row.counts for row in read_ledger(tmp_path)]
    before = 2 if micro_batch_size == 5 else 1
    assert [row["micro_batches"] for row in rows] == [before] * 3 + [4, 4]
    assert {row["size"] for row in rows} == {8}


def test_a_batch_that_cannot_be_cut_is_an_error_that_says_why(problem: Make) -> None:
    class Packed:
        """Collated to one row, as packed sequences are."""

        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> Tensor:
            return torch.ones(5).double()

    run = problem()
    run.data = DataSpec(Packed(), get_num_samples_in_batch=lambda batch: int(batch[0, 0]))
    memory = Memory((0, 0))

    def loss(model: Any, batch: Any) -> Any:
        return memory(model, (batch, torch.zeros(1, 2).double()))

    trainer = run.trainer(
        loss=loss,
        max_duration="2ba",
        loading=Loading(collate_fn=lambda samples: torch.stack(samples).sum(dim=0, keepdim=True)),
    )
    with pytest.raises(DataError, match="samples") as caught:
        trainer.fit()
    assert "memory ran out" in caught.value.__notes__[0]


def test_a_run_goes_on_with_the_size_it_came_to(problem: Make, tmp_path: Path) -> None:
    """Unless another one is given."""
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("2ba")}
    memory = Memory((0, 8), (1, 2))
    problem().trainer(loss=memory, callbacks=[Count(memory)], max_duration="4ba", **settings).fit()
    sizes = []
    for given in (None, 4):
        again = problem().trainer(micro_batch_size=given, max_duration="8ba", **settings)
        again.resume()
        sizes.append(again._loop.stepper.retry.size)
        assert again.run.loader.micro_batch_size == given
    assert sizes == [2, 4]


def test_memory_that_runs_out_in_the_update_is_not_tried_again(problem: Make) -> None:
    """Some weights may have moved: it ends with what to do about it."""

    class Short(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            if self.steps == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().step(closure)

    run = problem()
    run.optimizer = Short(run.model.parameters(), lr=0.1)
    trainer = run.trainer(optimizer=run.optimizer)
    with pytest.raises(TrainingError, match="weights"):
        trainer.fit()
    assert run.optimizer.steps == 3


def test_a_sample_that_does_not_fit_is_told(problem: Make) -> None:
    run, memory = problem(), Memory((0, 8), (1, 0))
    trainer = run.trainer(loss=memory, callbacks=[Count(memory)])
    trainer._loop.stepper.retry = Retry(run.model, trainer.run.loader.spec, trainer._ranks, size=8)
    with pytest.raises(TrainingError, match="CUDA"):
        trainer.fit()


def test_other_errors_pass(problem: Make) -> None:
    run = problem()

    def loss(model: Any, batch: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    trainer = run.trainer(loss=loss)
    trainer._loop.stepper.retry = Retry(run.model, trainer.run.loader.spec, trainer._ranks, size=8)
    with pytest.raises(RuntimeError, match="device"):
        trainer.fit()


def test_its_state_goes_on(problem: Make) -> None:
    run = problem()
    ranks = run.trainer()._ranks
    spec = run.trainer().run.loader.spec
    retry = Retry(run.model, spec, ranks, size=64, is_found=True)
    retry.size, retry.splits = 16, 2
    other = Retry(run.model, spec, ranks, size=8, is_found=True)
    other.load_state_dict(retry.state_dict())
    assert other.state_dict() == retry.state_dict()


@pytest.mark.parametrize("size", [8, None])
def test_a_size_that_was_given_anew_counts(problem: Make, size: int | None) -> None:
    run = problem()
    spec, ranks = run.trainer().run.loader.spec, run.trainer()._ranks
    retry = Retry(run.model, spec, ranks, size=64)
    retry.size, retry.splits = 16, 2
    other = Retry(run.model, spec, ranks, size=size)
    other.load_state_dict(retry.state_dict())
    assert (other.largest, other.size, other.splits) == (size, size, 2)
    again = Retry(run.model, spec, ranks, size=64)
    again.load_state_dict(retry.state_dict())
    assert (again.largest, again.size, again.splits) == (64, 16, 2)
