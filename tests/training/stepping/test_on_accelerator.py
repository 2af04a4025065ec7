"""Steps that really run out of an accelerator's memory: the run goes on, and nothing is lost."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.accelerator import DEVICE, MIB, leave, warm_up
from tests.training.numbered import BATCH_SIZE, EACH, NUM_SAMPLES, ROOM, NumberedRun
from torch import nn
from torch.utils.data import TensorDataset

from stretto.errors import TrainingError
from stretto.run_folder import read_ledger
from stretto.training import Callback, Checkpointing, Trainer

pytestmark = pytest.mark.phantom


@pytest.fixture(autouse=True)
def _no_limit() -> Iterator[None]:
    torch.cuda.empty_cache()
    warm_up()
    yield
    leave(None)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("given", [None, BATCH_SIZE], ids=["whole", "given"])
def test_a_step_that_runs_out_of_memory_is_repeated_in_halves(
    where: Literal["forward", "backward"], given: int | None, tmp_path: Path
) -> None:
    calm = NumberedRun(micro_batch_size=given)
    calm.trainer.fit()
    run = NumberedRun(where, rooms={2: ROOM}, micro_batch_size=given, folder=tmp_path)
    with pytest.warns(RuntimeWarning, match="memory") as warned:
        run.trainer.fit()
    said = [str(one.message) for one in warned]
    assert [text[: text.index(";")] for text in said] == [
        "memory ran out in the step at 32sp with micro-batches of 16",
        "memory ran out in the step at 32sp with micro-batches of 8",
    ]
    assert run.splits == 2
    assert run.sizes == [16, 16] + [4] * 4 * 6
    assert run.samples == calm.samples
    assert sorted(run.samples[:NUM_SAMPLES]) == list(range(NUM_SAMPLES))
    counts = ("epoch", "batch", "sample", "sample_in_epoch")
    for name in counts:
        assert getattr(run.trainer.timer, name) == getattr(calm.trainer.timer, name)
    rows = [row.counts for row in read_ledger(tmp_path)]
    assert [row["size"] for row in rows] == [BATCH_SIZE] * 8
    assert [row["micro_batches"] for row in rows] == [1, 1] + [4] * 6


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), torch.cuda.get_rng_state().tolist()]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_repeated_step_draws_what_it_drew_before(where: Literal["forward", "backward"]) -> None:
    """Dropout asks the device's generator, whose place in its sequence is known to the host."""
    smaller = NumberedRun(micro_batch_size=4)
    smaller.trainer.fit()
    expected = generators()
    repeated = NumberedRun(where, rooms={0: ROOM})
    with pytest.warns(RuntimeWarning, match="memory"):
        repeated.trainer.fit()
    assert repeated.passes == smaller.passes
    assert generators() == expected


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_of_a_failed_step_stays_on_the_device(
    where: Literal["forward", "backward"],
) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    calm = NumberedRun(micro_batch_size=4)
    calm.trainer.fit()
    expected = torch.cuda.memory_allocated() - before
    del calm
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    run = NumberedRun(where, rooms={2: ROOM})
    with pytest.warns(RuntimeWarning, match="memory"):
        run.trainer.fit()
    assert torch.cuda.memory_allocated() - before == expected


def test_a_resumed_run_keeps_the_size_that_it_came_to(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "where": "forward",
        "folder": tmp_path,
        "checkpoint": Checkpointing(every="2ba"),
    }
    first = NumberedRun(rooms={1: ROOM}, max_duration="4ba", **settings)
    with pytest.warns(RuntimeWarning, match="memory"):
        first.trainer.fit()
    again = NumberedRun(rooms={4: ROOM}, **settings)
    again.trainer.resume()
    assert (again.splits, again.size) == (2, 4)
    again.trainer.fit()  # a warning would be an error
    assert again.sizes == [4] * 4 * 4


def test_one_sample_that_does_not_fit_ends_the_run() -> None:
    run = NumberedRun("forward", rooms={1: EACH // 2})
    with (
        pytest.warns(RuntimeWarning, match="memory"),
        pytest.raises(TrainingError, match="memory"),
    ):
        run.trainer.fit()
    assert run.trainer.timer.sample == BATCH_SIZE
    assert run.splits == 4


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_size_that_is_found_fits_and_leaves_no_trace(
    where: Literal["forward", "backward"],
) -> None:
    given = NumberedRun(micro_batch_size=4)
    given.trainer.fit()
    expected = generators()
    leave(ROOM)
    run = NumberedRun(where, micro_batch_size="auto")
    assert run.trainer.fitting is not None
    assert run.trainer.fitting.size == 4
    run.trainer.fit()
    assert run.passes == given.passes
    assert generators() == expected
    assert run.splits == 0


def test_a_size_that_no_longer_fits_shrinks() -> None:
    leave(2 * ROOM)
    run = NumberedRun("forward", micro_batch_size="auto", rooms={3: ROOM})
    with pytest.warns(RuntimeWarning, match="memory") as warned:
        run.trainer.fit()
    assert len(warned) == run.splits == 1
    assert run.sizes == [8] * 2 * 3 + [4] * 4 * 5


class Tight(Callback):
    """Leaves so many bytes free from a batch on."""

    def __init__(self, batch: int, room: int) -> None:
        self.batch, self.room = batch, room

    def on_batch_start(self, run: Any, step: Any) -> None:
        if step.timestamp.batch == self.batch:
            leave(self.room)


WEIGHT = 16 * MIB


def large_run(folder: Path, tight: Tight, *, foreach: bool | None = None) -> Trainer:
    """Return a run with four weights; with foreach, an update takes as much again."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    return Trainer(
        model,
        TensorDataset(torch.ones(64, 2048)),
        optimizer=torch.optim.AdamW(model.parameters(), foreach=foreach),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        max_duration="6ba",
        batch_size=4,
        device=DEVICE,
        folder=folder,
        checkpoint=Checkpointing(every="2ba"),
        callbacks=[tight],
    )


def test_an_update_without_memory_ends_the_run_and_what_it_advises_helps(tmp_path: Path) -> None:
    room = 4 * WEIGHT + 3 * WEIGHT  # gradients, and less than foreach takes
    first = large_run(tmp_path, Tight(3, room))
    with pytest.raises(TrainingError, match="AdamW") as caught:
        first.fit()
    assert "foreach=False" in str(caught.value)
    assert first.timer.batch == 3
    del first, caught
    leave(None)
    again = large_run(tmp_path, Tight(2, room), foreach=False)
    assert again.resume() == tmp_path / "checkpoints" / "checkpoint-000000000008"
    assert again.optimizer.param_groups[0]["foreach"] is False
    again.fit()
    assert again.timer.sample == 24


def test_gradients_that_do_not_fit_end_the_run_in_its_first_step(tmp_path: Path) -> None:
    run = large_run(tmp_path, Tight(0, WEIGHT))
    with (
        pytest.warns(RuntimeWarning, match="memory"),  # smaller micro-batches are tried, in vain
        pytest.raises(TrainingError, match="allocate"),
    ):
        run.fit()
    assert run.timer.batch == 0
