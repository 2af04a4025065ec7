"""`stretto plan --against` a run that was resumed with other batch sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from stretto import Callback, Checkpointing, Horizon, Loading, Logging, Run, Trainer
from stretto.cli.planning import as_resumed
from stretto.data.step import Step
from stretto.planning import bind_run
from stretto.planning.plan import plan_prepared
from stretto.report.run import compare
from stretto.schedules import WSD, Constant, Schedule, StepDecay
from stretto.timing import LastBatch

DATA = TensorDataset(torch.zeros(200, 3))


class StopEarly(Callback):
    def on_batch_end(self, run: Run, step: Step) -> None:
        if run.timer.batch == 10:
            run.stop("early", is_final=False)


def trainer(
    folder: Path,
    size: int,
    schedule: Schedule,
    *callbacks: Callback,
    last_batch: LastBatch = "keep",
) -> Trainer:
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
        loading=Loading(last_batch=last_batch),
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


def test_samples_that_the_resume_skipped_are_left_out_of_both(tmp_path: Path) -> None:
    """At batch 10, 100 samples are left of the epoch, and a batch has 150."""
    trainer(tmp_path / "run", 10, Constant(), StopEarly(), last_batch="drop").fit()
    again = trainer(tmp_path / "run", 150, Constant(), last_batch="drop")
    again.fit(resume="latest")
    assert again.plan is not None
    stages = [(one.size, one.first.sample, one.skipped) for one in again.plan.sizes.stages]
    assert stages == [(10, 0, 0), (150, 200, 100)]
    run = bind_run(Horizon("2ep", dataset_num_samples=200, last_batch="drop"), 150)
    run, since = as_resumed(run, tmp_path / "run")
    comparison = compare(plan_prepared(run), tmp_path / "run", since=since)
    assert (since, comparison.batches, comparison.agrees) == (10, 11, True)
