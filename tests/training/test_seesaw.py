"""A run whose batch takes over the decay of its learning rate follows its plan, resumed or not."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from stretto.batching import DoublingRamp, Seesaw
from stretto.data import Step
from stretto.schedules import Cosine
from stretto.training import Callback, Checkpointing, Run, Trainer

PAIR = Seesaw(Cosine(warmup="10%"), DoublingRamp(2, 4, "20%"), maximum=16)


class Record(Callback):
    """Notes each batch: where it begins, its size, its learning rate."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.rows: list[tuple[int, int, float]] = []
        self.stop_at = stop_at

    def on_batch_end(self, run: Run, step: Step) -> None:
        """Note it."""
        rate = run.optimizers[0].param_groups[0]["lr"]
        self.rows.append((step.timestamp.sample, step.num_samples, rate))
        if step.timestamp.batch == self.stop_at:
            run.stop("for the test", is_final=False)


def trainer(folder: Path, record: Record) -> Trainer:
    torch.manual_seed(0)
    inputs = torch.randn(60, 3, dtype=torch.float64)
    model = torch.nn.Linear(3, 1).double()
    return Trainer(
        model,
        TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.5),
        loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        max_duration="3ep",
        batch_size=PAIR,
        checkpoint=Checkpointing("1ep"),
        callbacks=[record],
        folder=folder,
    )


def test_a_run_follows_its_plan_and_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = Record()
    run = trainer(tmp_path / "whole", whole)
    run.fit()
    assert run.plan is not None
    planned = [(b.timestamp.sample, b.size, b.values["lr"]) for b in run.plan.batches()]
    assert whole.rows == planned
    assert len({size for _, size, _ in planned}) > 3
    first, second = Record(stop_at=30), Record()
    trainer(tmp_path / "cut", first).fit()
    rest = trainer(tmp_path / "cut", second)
    rest.resume("latest")
    assert rest.changes == ()
    rest.fit()
    assert first.rows + second.rows == planned
    weights = [torch.cat([p.flatten() for p in one.model.parameters()]) for one in (run, rest)]
    assert torch.equal(*weights)
