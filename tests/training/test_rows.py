"""Training on rows of a sequence length that follows the clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.data import DataSpec, StepLoader
from stretto.errors import TrainingError
from stretto.memory.examples import example_batches
from stretto.run_folder import read_ledger
from stretto.training import Trainer

EACH = 4
LENGTHS = "0sp:4 16sp:8 32sp:16"


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of one text, and the token after each of theirs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 11, (64 * EACH + 1,), generator=generator)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.tokens[index * EACH : (index + 1) * EACH + 1]
        return window[:-1], window[1:]


class Model(nn.Module):
    """Predicts the next token from the mean of those so far, so a row differs from its samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.outside = nn.Embedding(11, 5), nn.Linear(5, 11)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.outside(self.inside(ids).cumsum(1) / places)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def trained(**changes: Any) -> tuple[Trainer, list[tuple[int, float]]]:
    """Return a trainer after its run, and the rows and the length of each of its steps."""
    model, seen = Model(), list[tuple[int, float]]()

    class Watch(stretto.training.Callback):
        def on_batch_start(self, run: Any, step: Any) -> None:
            del run
            rows = sum(micro.num_rows for micro in step)
            seen.append((rows, step.values["sequence_length"]))

    given: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "loss": loss_of,
        "max_duration": "1ep",
        "batch_size": 8,
        "sequence_length": LENGTHS,
        "callbacks": [Watch()],
    }
    trainer = Trainer(model, DataSpec(Text(), tokens_per_sample=EACH), **given | changes)
    trainer.fit()
    return trainer, seen


def test_a_trainer_trains_on_the_rows_of_a_loop(tmp_path: Any) -> None:
    trainer, seen = trained(folder=tmp_path, micro_batch_size=4)
    assert seen == [(8, 4), (8, 4), (4, 8), (4, 8), *[(2, 16)] * 4]
    assert [row.values["sequence_length"] for row in read_ledger(tmp_path)] == [
        length for _, length in seen
    ]
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = stretto.prepare(
        DataSpec(Text(), tokens_per_sample=EACH),
        8,
        max_duration="1ep",
        optimizer=optimizer,
        sequence_length=LENGTHS,
    )
    for step in run:
        for micro in step:
            (micro.weight * loss_of(model, micro.batch)).backward()
        assert run.values["sequence_length"] == micro.batch[0].shape[1]
        optimizer.step()
        optimizer.zero_grad()
        run.finish()
    for one, other in zip(model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:memory ran out")
def test_a_step_that_runs_out_of_memory_is_cut_between_rows() -> None:
    whole, _ = trained()

    def small(model: nn.Module, batch: Any) -> torch.Tensor:
        if batch[0].numel() > 2 * 16:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return loss_of(model, batch)

    parts, seen = trained(loss=small, batch_size=32, max_duration="64sp", sequence_length=16)
    assert seen == [(8, 16)] * 2
    other, _ = trained(batch_size=32, max_duration="64sp", sequence_length=16)
    for one, same in zip(parts.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=1e-12)
    with pytest.raises(TrainingError, match="memory ran out"):
        trained(loss=small, sequence_length=64)
    assert whole.timer.token == 64 * EACH


def test_a_longer_schedule_stretches_the_lengths() -> None:
    trainer, seen = trained(scale_schedule=0.5)
    assert seen == [(8, 4), (4, 8), (2, 16), (2, 16)]
    assert trainer.timer.sample == 32


def test_a_search_for_memory_tries_the_longest_rows() -> None:
    data = DataSpec(Text(), tokens_per_sample=EACH)
    loader = StepLoader(data, 8, max_duration="1ep", sequence_length=LENGTHS)
    make = example_batches(loader)
    assert [make(size)[0].shape for size in (1, 4, 11)] == [(1, 16), (1, 16), (2, 16)]
