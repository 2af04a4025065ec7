"""What is bound again at a resume starts from what was first known, not from what steps set."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optim.test_from_torch import OPTIMIZERS, SCHEDULERS, groups_of, rates
from torch.optim import lr_scheduler

from stretto import Callback, Trainer, prepare
from stretto.batching import NO_SIGNALS, LinearRule, Plateau, Signals, SquareRootRule
from stretto.optim import Hyperparameters, from_torch
from stretto.optim.hyperparameters import joined
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
from stretto.timing import Horizon, Timestamp
from stretto.training import Evaluation

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


def begun(
    kind: str, schedule: Any, state: Any = None, **more: Any
) -> tuple[Run, torch.optim.Optimizer]:
    """A run with an optimizer that has not stepped, or has a state before the run has it."""
    optimizer = OPTIMIZERS[kind](groups_of(2))
    if state is not None:
        optimizer.load_state_dict(state)
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


def assert_resumes(make: Callable[[Any], tuple[Run, torch.optim.Optimizer]]) -> None:
    """Save before each step, restore into a new run, and compare all that follows, exactly."""
    each = list(trained(*make(None)))
    assert len({str(seen) for *_, seen in each}) > 1, "something moves, or nothing is tested"
    for number, (saved, of_optimizer, _) in enumerate(each):
        is_first = number % 2 == 1
        run, optimizer = make(of_optimizer if is_first else None)
        if not is_first:
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
    assert_resumes(lambda state: begun(kind, schedule, state, schedules={**more}))


@pytest.mark.parametrize("name", OURS)
def test_every_schedule_rule_and_value_goes_on_to_the_last_bit(name: str) -> None:
    more = {
        "schedules": {"betas.0": OURS[name], "lr@1": 0.3},
        "values": {"weight": OURS[name]},
        "rule": {"lr": LinearRule(4), "lr@1": SquareRootRule(4)},
    }
    assert_resumes(lambda state: begun("adamw", OURS[name], state, **more))


def test_a_group_that_is_added_before_others_leaves_their_base_values() -> None:
    one, two = (
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, momentum=0.9)
        for lr in (0.1, 0.2)
    )
    both = joined([one, two])
    schedule = from_torch(lambda o: L.CosineAnnealingLR(o, 10, eta_min=0.05))
    run = Horizon("10ba")
    bound = Hyperparameters(both, {"lr": schedule}, run)
    bound.apply(Timestamp(batch=5))
    one.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 0.4})
    bound.follow(run, {})
    bound.apply(Timestamp(batch=5))
    found = [group["lr"] for group in both.param_groups]
    assert found == pytest.approx([0.075, 0.225, 0.125])


PLATEAUS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda o: L.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "to a rate": lambda o: L.ReduceLROnPlateau(o, "max", 0.3, 0, cooldown=1, min_lr=[1e-3, 1e-2]),
}
LOSSES = [3.0, 2.0, 2.5, 2.4, float("nan"), 2.1, 1.0, 1.5, 1.2, 1.1, 1.3, float("inf"), 0.5, 0.7]


def torch_rates(make: Callable[[Any], Any], losses: list[float]) -> list[list[float]]:
    """What the scheduler itself sets, stepped with each loss."""
    optimizer = OPTIMIZERS["sgd"](groups_of(2))
    scheduler, found = make(optimizer), []
    for loss in losses:
        found.append([group["lr"] for group in optimizer.param_groups])
        scheduler.step(loss)
    return found


@pytest.mark.parametrize("after", [False, True], ids=["with finish", "after finish"])
@pytest.mark.parametrize("name", PLATEAUS)
def test_a_rate_that_follows_a_metric_is_that_of_torch_and_goes_on(name: str, after: bool) -> None:
    """In an own loop, which measures before or after the step is finished."""
    schedule = from_torch(PLATEAUS[name], monitor="validation/loss")

    def begun_at(states: tuple[Any, Any] | None) -> Iterator[tuple[Any, Any, list[float]]]:
        optimizer = OPTIMIZERS["sgd"](groups_of(2))
        run = prepare(
            range(100), 2, max_duration=f"{STEPS}ba", optimizer=optimizer,
            schedules={"lr": schedule},
        )  # fmt: skip
        if states is not None:
            optimizer.load_state_dict(states[1])
            run.load_state_dict(json.loads(states[0]))
        while not run.is_done:
            state = json.dumps(run.state_dict()), deepcopy(optimizer.state_dict())
            step = run.begin()
            assert step is not None
            yield *state, [group["lr"] for group in optimizer.param_groups]
            optimizer.step()
            loss = LOSSES[run.timer.batch]
            run.finish(signals=NO_SIGNALS if after else Signals(metric=loss))
            if after:
                run.loader.note_metric(1e9)  # only the last one before the next step counts
                run.loader.note_metric(loss)

    each = list(begun_at(None))
    rates_of = [rate for *_, rate in each]
    torch.testing.assert_close(rates_of, torch_rates(PLATEAUS[name], LOSSES), rtol=1e-15, atol=0)
    assert len({rate[0] for rate in rates_of}) > 2
    for number, (*states, _) in enumerate(each):
        assert [rate for *_, rate in begun_at((states[0], states[1]))] == rates_of[number:]


def test_a_metric_that_nothing_measures_is_warned_of_at_the_end() -> None:
    schedule = from_torch(L.ReduceLROnPlateau, monitor="a/loss")
    run, optimizer = begun("sgd", schedule)
    with pytest.warns(RuntimeWarning, match=r"'a/loss'.*Signals\(metric="):  # noqa: PT031
        for _ in run:
            optimizer.step()
            run.finish()


def test_sizes_that_follow_what_nothing_measures_are_warned_of_too() -> None:
    def run(states: Any = None, metric: float | None = None) -> None:
        optimizer = OPTIMIZERS["sgd"](groups_of(1))
        sizes = Plateau("a/loss", start=2, maximum=16, patience=1)
        one = prepare(range(20), sizes, max_duration="1ep", optimizer=optimizer)
        if states is not None:
            one.load_state_dict(states)
        for _ in one:
            optimizer.step()
            one.finish(signals=Signals(metric=metric))
            metric = None

    with pytest.warns(RuntimeWarning, match=r"'a/loss'.*Signals\(metric="):
        run()
    run(metric=1.0)  # measured once
    optimizer = OPTIMIZERS["sgd"](groups_of(1))
    sizes = Plateau("a/loss", start=2, maximum=16, patience=1)
    first = prepare(range(20), sizes, max_duration="1ep", optimizer=optimizer)
    first.begin()
    optimizer.step()
    first.finish(signals=Signals(metric=1.0))
    run(first.state_dict())  # measured before it was resumed


def test_a_metric_that_is_measured_inside_a_step_counts_after_it() -> None:
    seen = []
    for inside in (False, True):
        optimizer = OPTIMIZERS["sgd"](groups_of(1))
        schedule = from_torch(lambda o: L.ReduceLROnPlateau(o, patience=0), monitor="a/loss")
        sizes = Plateau("a/loss", start=2, maximum=16, patience=1)
        run = prepare(
            range(100), sizes, max_duration="1ep", optimizer=optimizer, schedules={"lr": schedule}
        )
        rates = []
        for step in run:
            rates.append((step.num_samples, optimizer.param_groups[0]["lr"]))
            optimizer.step()
            if inside:
                run.loader.note_metric(1.0)
            run.finish()
            if not inside:
                run.loader.note_metric(1.0)
        seen.append(rates)
    assert seen[0] == seen[1]
    assert seen[0][2] == (4, pytest.approx(0.003))


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


DATA = torch.utils.data.TensorDataset(torch.ones(30, 3), torch.ones(30, 1))


def up_and_down(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A loss that is better and worse in turn."""
    weight = next(model.parameters()).detach()
    return weight.sum().mul(1e4).sin()


@pytest.mark.parametrize("name", [*ABSOLUTE, "metric"])
def test_a_trainer_goes_on_to_the_last_bit(name: str, tmp_path: Path) -> None:
    plateau = partial(L.ReduceLROnPlateau, patience=0, factor=0.5)
    monitored = from_torch(plateau, monitor="validation/loss")
    schedule = monitored if name == "metric" else from_torch(ABSOLUTE[name])

    def rates_of(folder: Path, until: int | None = None) -> list[float]:
        torch.manual_seed(0)
        model, seen = torch.nn.Linear(3, 1), Rates(until)
        Trainer(
            model, DATA, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=torch.nn.MSELoss(), max_duration="9ba", batch_size=2, schedules={"lr": schedule},
            checkpoint="1ba", folder=folder, callbacks=[seen], log={"console": False},
            evaluate=Evaluation(DATA, "2ba", loss=up_and_down),
        ).fit(resume="auto")  # fmt: skip
        return seen.seen

    whole = rates_of(tmp_path / "whole")
    assert len(set(whole)) > 2
    # One job for each step: each restores what the one before has saved.
    jobs = [rates_of(tmp_path / "cut", until) for until in (*range(1, 9), None)]
    assert [rate for job in jobs for rate in job] == whole
