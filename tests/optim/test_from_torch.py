from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from stretto import Seesaw, plan, prepare
from stretto.errors import ScheduleError
from stretto.optim import Hyperparameters, from_torch
from stretto.report import plan_table
from stretto.timing import Horizon, Timestamp

L = lr_scheduler
STEPS = 24
OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.03, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.03, betas=(0.85, 0.99)),
}


def decayed(n: int, step: int) -> float:
    """A factor that differs between parameter groups."""
    return 1 / (n + step)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: L.LambdaLR(o, lambda step: 1 / (1 + step)),
    "lambdas": lambda o: L.LambdaLR(
        o, [partial(decayed, n) for n in range(1, 1 + len(o.param_groups))]
    ),
    "multiplicative": lambda o: L.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: L.StepLR(o, 5),
    "multi step": lambda o: L.MultiStepLR(o, [3, 9]),
    "constant": lambda o: L.ConstantLR(o, 0.3, 4),
    "linear": lambda o: L.LinearLR(o, 0.1, total_iters=7),
    "exponential": lambda o: L.ExponentialLR(o, 0.9),
    "polynomial": lambda o: L.PolynomialLR(o, STEPS, power=2.0),
    "cosine": lambda o: L.CosineAnnealingLR(o, STEPS),
    "cosine to a rate": lambda o: L.CosineAnnealingLR(o, STEPS, eta_min=1e-3),
    "restarts to a rate": lambda o: L.CosineAnnealingWarmRestarts(o, 5, 2, eta_min=1e-3),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.005, anneal_epochs=4),
    "swa linear": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 6, "linear"),
    "one cycle": lambda o: L.OneCycleLR(o, 0.01, STEPS + 1, cycle_momentum=False),
    "one cycle and momentum": lambda o: L.OneCycleLR(o, 0.01, STEPS + 1, three_phase=True),
    "one cycle of each group": lambda o: L.OneCycleLR(
        o, [0.01 * (1 + n) for n in range(len(o.param_groups))], total_steps=STEPS + 1
    ),
    "cyclic": lambda o: L.CyclicLR(o, 1e-3, 1e-2, 4, cycle_momentum=False),
    "cyclic and momentum": lambda o: L.CyclicLR(o, 1e-3, 1e-2, 4, mode="triangular2"),
    "sequential": lambda o: L.SequentialLR(
        o, [L.LinearLR(o, 0.1), L.CosineAnnealingLR(o, 9, eta_min=1e-4)], milestones=[10]
    ),
    "sequential to a cycle": lambda o: L.SequentialLR(
        o, [L.ConstantLR(o, 0.1), L.OneCycleLR(o, 0.01, STEPS)], milestones=[4]
    ),
    "chained": lambda o: L.ChainedScheduler([L.LinearLR(o, 0.1), L.ExponentialLR(o, 0.9)]),
    "chained to a rate": lambda o: L.ChainedScheduler(
        [L.ExponentialLR(o, 0.9), L.CosineAnnealingLR(o, STEPS, eta_min=1e-3)]
    ),
}


def groups_of(many: int) -> list[Any]:
    """Parameter groups, each with a learning rate of its own but for the first."""
    own: list[dict[str, Any]] = [{}, {"lr": 0.2, "weight_decay": 0.1}, {"lr": 1e-4}]
    return [{"params": [torch.zeros(1, requires_grad=True)], **one} for one in own[:many]]


def rates(optimizer: Optimizer) -> list[tuple[float, float, float]]:
    """The learning rate, momentum and weight decay of each group."""
    return [
        (one["lr"], one.get("momentum", one.get("betas", [0])[0]), one["weight_decay"])
        for one in optimizer.param_groups
    ]


@pytest.mark.parametrize("many", [1, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_every_scheduler_of_torch_sets_what_it_sets_in_torch(
    name: str, kind: str, many: int
) -> None:
    theirs = OPTIMIZERS[kind](groups_of(many))
    scheduler, expected = SCHEDULERS[name](theirs), []
    for _ in range(STEPS):
        expected.append(rates(theirs))
        scheduler.step()
    ours = OPTIMIZERS[kind](groups_of(many))
    schedule, run = from_torch(SCHEDULERS[name]), Horizon(f"{STEPS}ba")
    schedules = {"lr": schedule}
    if len({momentum for each in expected for _, momentum, _ in each}) > 1:
        with pytest.raises(ScheduleError, match="'momentum': schedule"):
            Hyperparameters(ours, schedules, run)
        schedules["momentum"] = schedule
    hyperparameters = Hyperparameters(ours, schedules, run)
    batches = list(range(STEPS))
    random.Random(0).shuffle(batches)
    for batch in batches:
        hyperparameters.apply(Timestamp(batch=batch))
        for own, wanted in zip(rates(ours), expected[batch], strict=True):
            assert own == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_its_learning_rate_stands_for_any_other_value() -> None:
    optimizer = OPTIMIZERS["adamw"]([{"params": [torch.zeros(1)], "weight_decay": 0.1}])
    schedule = from_torch(lambda o: L.CosineAnnealingLR(o, 10, eta_min=0.02))
    hyperparameters = Hyperparameters(optimizer, {"weight_decay": schedule}, Horizon("10ba"))
    hyperparameters.apply(Timestamp(batch=5))
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.06)
    assert optimizer.param_groups[0]["lr"] == 0.03


def test_a_plan_with_base_values_is_the_run() -> None:
    schedule = from_torch(lambda o: L.OneCycleLR(o, 0.01, 17))
    optimizer = OPTIMIZERS["sgd"](groups_of(1))
    both = {"lr": schedule, "momentum": schedule}
    run = prepare(range(16), 1, max_duration="1ep", optimizer=optimizer, schedules=both)
    base = {"lr": 0.03, "momentum": 0.9}
    planned = plan(Horizon("16ba"), 1, schedules=both, base=base)
    assert run.plan is not None
    for step in run:
        values = planned.values_at(step.timestamp.batch)
        assert values == pytest.approx(run.plan.values_at(step.timestamp.batch))
        assert list(values.values()) == pytest.approx(rates(optimizer)[0][:2])
        optimizer.step()
        run.finish()


def test_a_plan_without_them_refuses_what_they_decide() -> None:
    alone = {"lr": from_torch(lambda o: L.OneCycleLR(o, 1.0, 17))}
    with pytest.raises(ScheduleError, match="base="):
        plan(Horizon("16ba"), 1, schedules=alone)
    with pytest.raises(ScheduleError, match="momentum"):
        plan(Horizon("16ba"), 1, schedules=alone, base={"lr": 0.1})


def test_a_pair_refuses_a_decay_that_the_optimizer_decides() -> None:
    absolute = from_torch(lambda o: L.CosineAnnealingLR(o, 100, eta_min=1e-3), every="1sp")
    with pytest.raises(ScheduleError, match=r"Seesaw, write Cosine"):
        plan(Horizon("100sp"), Seesaw(absolute, 4).policy)


def test_a_value_of_zero_is_refused_unless_it_stays() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    still = from_torch(lambda o: L.StepLR(o, 2))
    Hyperparameters(optimizer, {"lr": still}, Horizon("9ba")).apply(Timestamp(batch=2))
    assert optimizer.param_groups[0]["lr"] == 0.0
    for absolute in (
        from_torch(lambda o: L.OneCycleLR(o, 0.01, 9, cycle_momentum=False)),
        from_torch(lambda o: L.CosineAnnealingLR(o, 9, eta_min=0.01)),
    ):
        with pytest.raises(ScheduleError, match="lr=0"):
            Hyperparameters(optimizer, {"lr": absolute}, Horizon("9ba"))


def test_a_value_of_zero_is_refused_by_its_own_name() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    to_a_rate = from_torch(lambda o: L.CosineAnnealingLR(o, 9, eta_min=0.01))
    with pytest.raises(ScheduleError, match="another weight_decay"):
        Hyperparameters(optimizer, {"weight_decay": to_a_rate}, Horizon("9ba"))


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    optimizer = OPTIMIZERS["sgd"](groups_of(1))
    made = L.StepLR(optimizer, 2)
    with pytest.raises(ScheduleError, match="another optimizer"):
        Hyperparameters(optimizer, {"lr": from_torch(lambda o: made)}, Horizon("9ba"))


class LateDecay(L.LRScheduler):
    """Sets the weight decay from its third step on."""

    def get_lr(self) -> list[float | torch.Tensor]:
        if self.last_epoch > 2:
            self.optimizer.param_groups[0]["weight_decay"] = 0.5
        return [group["lr"] for group in self.optimizer.param_groups]


def test_a_scheduler_that_later_sets_something_else_is_refused_then() -> None:
    optimizer = OPTIMIZERS["sgd"](groups_of(1))
    one = Hyperparameters(optimizer, {"lr": from_torch(LateDecay)}, Horizon("9ba"))
    one.apply(Timestamp(batch=2))
    with pytest.raises(ScheduleError, match="weight_decay"):
        one.apply(Timestamp(batch=3))


def test_a_plan_steps_the_scheduler_once_for_each_batch() -> None:
    calls = 0

    def decay(step: int) -> float:
        nonlocal calls
        calls += 1
        return 1 / (1 + step)

    schedule = from_torch(lambda o: L.LambdaLR(o, decay))
    plan_table(plan(Horizon("3000ba"), 1, schedules={"lr": schedule}, base={"lr": 0.1}))
    assert calls < 3_100


def test_the_interval_is_a_time() -> None:
    schedule = from_torch(lambda o: lr_scheduler.ExponentialLR(o, 0.5), every="0.5ep")
    factor = schedule.bind(Horizon("3ep", dataset_num_samples=10))
    assert [factor(Timestamp(sample=s)) for s in (0, 4, 5, 9, 10, 29)] == [
        1,
        1,
        0.5,
        0.5,
        0.25,
        1 / 32,
    ]


def test_it_can_go_back_further_than_it_remembers() -> None:
    factor = from_torch(lambda o: lr_scheduler.StepLR(o, 5000, 0.5)).bind(Horizon("20000ba"))
    assert [factor(Timestamp(batch=b)) for b in (19_999, 0, 12_000, 4_999)] == [0.125, 1, 0.25, 1]


def test_it_drives_an_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    schedule = from_torch(lambda o: lr_scheduler.StepLR(o, 2, 0.5))
    Hyperparameters(optimizer, {"lr": schedule}, Horizon("9ba")).apply(Timestamp(batch=2))
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_a_scheduler_itself_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(ScheduleError, match="optimizer"):
        from_torch(lr_scheduler.StepLR(optimizer, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("every", ["0ba", "-1ba"])
def test_an_interval_that_is_not_positive_is_refused(every: str) -> None:
    with pytest.raises(ScheduleError, match="not longer than 0"):
        from_torch(lambda o: lr_scheduler.StepLR(o, 2), every=every)


def test_a_factory_that_fails_is_found_when_it_is_bound() -> None:
    broken = from_torch(lambda o: None)
    with pytest.raises(ScheduleError, match="scheduler"):
        Hyperparameters(OPTIMIZERS["sgd"](groups_of(1)), {"lr": broken}, Horizon("9ba"))


def test_a_scheduler_that_ends_too_early_says_so() -> None:
    schedule = from_torch(lambda o: L.OneCycleLR(o, 1.0, total_steps=5, cycle_momentum=False))
    optimizer = OPTIMIZERS["sgd"](groups_of(1))
    hyperparameters = Hyperparameters(optimizer, {"lr": schedule}, Horizon("9ba"))
    with pytest.raises(ScheduleError, match="intervals"):
        hyperparameters.apply(Timestamp(batch=8))


def test_a_scheduler_that_needs_a_metric_is_refused_with_what_can_follow_one() -> None:
    plateau = from_torch(lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ScheduleError, match="metric"):
        Hyperparameters(OPTIMIZERS["sgd"](groups_of(1)), {"lr": plateau}, Horizon("9ba"))
