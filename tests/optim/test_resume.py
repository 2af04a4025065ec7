"""What is bound again at a resume starts from what was first known, not from what steps set."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optim.test_from_torch import OPTIMIZERS, SCHEDULERS, groups_of, rates
from torch.optim import lr_scheduler

from stretto import Callback, Trainer, prepare
from stretto.batching import LinearRule, SquareRootRule
from stretto.optim import from_torch
from stretto.run import Run
from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Curve,
    Exponential,
    Floor,
    InverseSqrt,
    Linear,
    MultiStep,
    Periods,
    Polynomial,
    StepDecay,
)

L = lr_scheduler
STEPS = 14
OURS: dict[str, Any] = {
    "constant": Constant(0.7, warmup="3ba"),
    "linear": Linear(1, 0, warmup="10%"),
    "cosine": Cosine(end=0.1, warmup="5sp"),
    "cosine restarts": CosineRestarts("7sp", 2),
    "polynomial": Polynomial(1, 0.1, power=2.0),
    "exponential": Exponential("5sp", 0.7),
    "step decay": StepDecay("4ba", 0.3),
    "multi step": MultiStep(["3ba", "50%"], 0.3),
    "inverse square root": InverseSqrt("4ba", warmup="4ba"),
    "wsd": WSD("30%", warmup="4ba"),
    "periods": Periods([("7ba", Linear(0, 1)), ("rest", MultiStep(["2ba", "0.5dur"], 0.3))]),
    "product": Linear(0, 1, over="4ba") * StepDecay("5ba", 0.5),
    "sum and floor": Floor(Linear(0.5, 0, over="9ba") + Linear(0.5, 0), 0.2),
    "curve": Curve(lambda passed: 1 - passed**3),
    "function": lambda timer: 1 / (1 + timer.batch),
}


def begun(kind: str, schedule: Any, **more: Any) -> tuple[Run, torch.optim.Optimizer]:
    """A run with an optimizer that has not stepped."""
    optimizer = OPTIMIZERS[kind](groups_of(2))
    schedules = {"lr": schedule, **more.pop("schedules", {})}
    run = prepare(
        range(100), "0sp:1 10sp:6", max_duration=f"{STEPS}ba", optimizer=optimizer,
        schedules=schedules, loading={"shuffle": False}, **more,
    )  # fmt: skip
    return run, optimizer


CYCLES_MOMENTUM = (
    *("one cycle and momentum", "one cycle of each group"),
    *("cyclic and momentum", "sequential to a cycle"),
)


def trained(run: Run, optimizer: Any) -> Iterator[tuple[str, Any, Any]]:
    """Train; yield the state before each step, and what is set for it."""
    while not run.is_done:
        state = json.dumps(run.state_dict()), deepcopy(optimizer.state_dict())
        for step in run:
            seen = step.num_samples, dict(step.values), rates(optimizer)
            optimizer.step()
            run.finish()
            yield *state, seen
            break


def assert_resumes(make: Callable[[], tuple[Run, torch.optim.Optimizer]]) -> None:
    """Save before each step, restore into a new run, and compare all that follows, exactly."""
    each = list(trained(*make()))
    assert len({str(seen) for *_, seen in each}) > 1, "something moves, or nothing is tested"
    for number, (saved, of_optimizer, _) in enumerate(each):
        run, optimizer = make()
        optimizer.load_state_dict(of_optimizer)
        run.load_state_dict(json.loads(saved))
        found = [seen for *_, seen in trained(run, optimizer)]
        assert found == [seen for *_, seen in each[number:]], f"after a resume at step {number}"


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "sgd") for name in SCHEDULERS), *((name, "adamw") for name in CYCLES_MOMENTUM)],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_every_scheduler_of_torch_goes_on_to_the_last_bit(name: str, kind: str) -> None:
    schedule = from_torch(SCHEDULERS[name])
    more = {"momentum": schedule} if name in CYCLES_MOMENTUM else {}
    assert_resumes(lambda: begun(kind, schedule, schedules=more))


@pytest.mark.parametrize("name", OURS)
def test_every_schedule_rule_and_value_goes_on_to_the_last_bit(name: str) -> None:
    more = {
        "schedules": {"betas.0": OURS[name], "lr@1": 0.3},
        "values": {"weight": OURS[name]},
        "rule": {"lr": LinearRule(4), "lr@1": SquareRootRule(4)},
    }
    assert_resumes(lambda: begun("adamw", OURS[name], **more))


ABSOLUTE: dict[str, Callable[[Any], Any]] = {
    "cosine to a rate": lambda o: L.CosineAnnealingLR(o, T_max=9, eta_min=0.003),
    "one cycle": lambda o: L.OneCycleLR(o, max_lr=0.3, total_steps=10, cycle_momentum=False),
    "cyclic": lambda o: L.CyclicLR(o, 0.001, 0.1, step_size_up=4, cycle_momentum=False),
}


class Rates(Callback):
    """Notes the learning rate of each step, and stops after so many."""

    def __init__(self, until: int | None = None) -> None:
        self.until, self.seen = until, list[float]()

    def on_batch_end(self, run: Any, step: Any) -> None:
        self.seen.append(run.optimizers[0].param_groups[0]["lr"])
        if run.timer.batch == self.until:
            run.stop("the time of the job is over", is_final=False)


@pytest.mark.parametrize("name", ABSOLUTE)
def test_a_trainer_goes_on_to_the_last_bit(name: str, tmp_path: Path) -> None:
    def rates_of(folder: Path, until: int | None = None) -> list[float]:
        model, seen = torch.nn.Linear(3, 1), Rates(until)
        Trainer(
            model, torch.utils.data.TensorDataset(torch.ones(30, 3), torch.ones(30, 1)),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.MSELoss(),
            max_duration="9ba", batch_size=2, schedules={"lr": from_torch(ABSOLUTE[name])},
            checkpoint="1ba", folder=folder, callbacks=[seen], log={"console": False},
        ).fit(resume="auto")  # fmt: skip
        return seen.seen

    whole = rates_of(tmp_path / "whole")
    # One job for each step: each restores what the one before has saved.
    jobs = [rates_of(tmp_path / "cut", until) for until in (*range(1, 9), None)]
    assert [rate for job in jobs for rate in job] == whole
