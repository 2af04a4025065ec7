"""Runs that follow a measured price, on a clock with jitter and stalls: repeated, and killed."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from stretto import Callback, NoiseScale, Run, Trainer
from stretto.data import Step

pytestmark = pytest.mark.long  # test_step_cost.py shows the same with few runs


class Clock:
    """Nanoseconds of a machine on which a step of B samples takes about `ratio + B` ms."""

    def __init__(self, ratio: float, seed: int) -> None:
        self.now, self.ratio, self.chance = 0, ratio, random.Random(seed)

    def __call__(self) -> int:
        return self.now

    def spend(self, milliseconds: float) -> None:
        factor = math.exp(0.05 * self.chance.gauss(0, 1))
        self.now += round(milliseconds * factor * (10 if self.chance.random() < 0.01 else 1) * 1e6)


class Killed(Callback):
    """Ends the process after a batch, without a chance to write anything."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_batch_end(self, run: Run, step: Step) -> None:
        if run.timer.batch == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def made(folder: Path, c: Any, seed: int, *callbacks: Callback, **given: Any) -> Trainer:
    """A run of a linear model whose settings and clock follow from a seed."""
    chance = random.Random(seed)
    start, ratio = chance.choice((4, 8, 16)), 2.0 ** chance.uniform(1, 11)
    torch.manual_seed(seed)
    x = torch.randn(4000, 20)
    y = x @ torch.randn(20, 1) + chance.choice((1, 3, 9)) * torch.randn(4000, 1)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    clock = Clock(ratio, seed)
    model.register_forward_pre_hook(lambda _, inputs: clock.spend(len(inputs[0])))
    optimizer.register_step_post_hook(lambda *_: clock.spend(ratio))
    return Trainer(
        model,
        TensorDataset(x, y),
        optimizer=optimizer,
        loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        batch_size=NoiseScale(start, 256, c=c, power=0.5, minimum=4, window=20),
        rule={"sqrt": 8},
        max_duration="90ba",
        log="10ba",
        folder=folder,
        callbacks=callbacks,
        clock=clock,
        **given,
    )


def sizes(folder: Path) -> list[str]:
    return [row.split(",")[4] for row in (folder / "ledger.csv").read_text().splitlines()[1:]]


def weight(trainer: Trainer) -> torch.Tensor:
    return trainer.model.get_parameter("weight").detach().clone()


def test_a_hundred_runs_with_their_logged_c_are_the_same_runs(tmp_path: Path) -> None:
    moved = 0
    for seed in range(100):
        first, again = (tmp_path / f"{seed}-{name}" for name in "ab")
        measured = made(first, "time", seed)
        measured.fit()
        c = json.loads((first / "metrics.jsonl").read_text().splitlines()[0])["c"]
        repeated = made(again, c, seed)
        repeated.fit()
        assert sizes(first) == sizes(again), seed
        assert torch.equal(weight(measured), weight(repeated)), seed
        moved += len(set(sizes(first))) > 1
    assert moved >= 90


def test_twenty_runs_that_are_killed_end_the_same(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", "time", 1)
    whole.fit()
    assert len(set(sizes(tmp_path / "whole"))) > 2
    for at in range(6, 86, 4):
        folder, often = tmp_path / str(at), {"every": "5ba", "keep": 2}
        child = os.fork()
        if not child:
            try:
                made(folder, "time", 1, Killed(at), checkpoint=often).fit()
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        resumed = made(folder, "time", 1, checkpoint=often)
        resumed.fit(resume="auto")
        assert sizes(folder) == sizes(tmp_path / "whole"), at
        assert torch.equal(weight(resumed), weight(whole)), at
