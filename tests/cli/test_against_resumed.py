"""`stretto plan --against` a run that was resumed with other batch sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from stretto import Callback, Checkpointing, Horizon, Logging, Run, Trainer
from stretto.cli.planning import as_resumed
from stretto.data.step import Step
from stretto.planning import bind_run
from stretto.planning.plan import plan_prepared
from stretto.report.run import compare
from stretto.schedules import WSD, Constant, Schedule, StepDecay

DATA = TensorDataset(torch.zeros(200, 3))


class StopEarly(Callback):
    def on_batch_end(self, run: Run, step: Step) -> None:
        if run.timer.batch == 10:
            run.stop("early", is_final=False)


def trainer(folder: Path, size: int, schedule: Schedule, *callbacks: Callback) -> Trainer:
    model = torch.nn.Linear(3, 1)
    return Trainer(
        model,
        DATA,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        max_duration="2ep",
        batch_size=size,
        schedules={"lr": schedule},
        folder=folder,
        checkpoint=Checkpointing(every="5ba"),
        log=Logging(console=False),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("schedule", [StepDecay("4ba", 0.5), WSD("10ba"), Constant(warmup="9ba")])
def test_it_and_the_plan_of_the_trainer_say_the_same(schedule: Schedule, tmp_path: Path) -> None:
    trainer(tmp_path / "run", 10, schedule, StopEarly()).fit()
    again = trainer(tmp_path / "run", 50, schedule)
    again.fit(resume="latest")
    assert again.plan is not None
    assert [(one.size, one.batches) for one in again.plan.sizes.stages] == [(10, 10), (50, 6)]
    run = bind_run(Horizon("2ep", dataset_num_samples=200), 50, schedules={"lr": schedule})
    run, since = as_resumed(run, tmp_path / "run")
    comparison = compare(plan_prepared(run, base={"lr": 0.01}), tmp_path / "run", since=since)
    assert (since, comparison.batches, comparison.agrees) == (10, 16, True)
