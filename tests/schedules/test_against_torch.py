"""Every schedule against torch's scheduler of that kind, over all steps, to 1e-12."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.schedules.strategies import by_batch, values
from torch.optim import lr_scheduler as theirs

from stretto.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    Linear,
    MultiStep,
    Periods,
    Polynomial,
    Schedule,
    StepDecay,
    as_schedule,
)
from stretto.timing import Horizon

STEPS = 240
Factory = Callable[[torch.optim.Optimizer], theirs.LRScheduler]


def rates_of(factory: Factory, steps: int) -> list[float]:
    """Return torch's learning rate before each step, for a base of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = factory(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def sequence(cut: int, first: Factory, second: Factory) -> Factory:
    """Return torch's way of one scheduler after another."""
    return lambda optimizer: theirs.SequentialLR(
        optimizer, [first(optimizer), second(optimizer)], [cut]
    )


CASES: dict[str, tuple[Schedule, Factory]] = {
    "constant": (
        Periods([("50ba", 0.3), ("rest", 1.0)]),
        lambda o: theirs.ConstantLR(o, 0.3, total_iters=50),
    ),
    "linear": (
        Linear(0.25, 0.75, over="70ba"),
        lambda o: theirs.LinearLR(o, 0.25, 0.75, total_iters=70),
    ),
    "linear-to-zero": (
        Linear(1, 0, over="239ba"),
        lambda o: theirs.LinearLR(o, 1.0, 0.0, total_iters=239),
    ),
    "cosine": (Cosine(1, 0.1), lambda o: theirs.CosineAnnealingLR(o, STEPS, eta_min=0.1)),
    "cosine-to-zero": (Cosine(), lambda o: theirs.CosineAnnealingLR(o, STEPS)),
    "polynomial": (
        Polynomial(power=2.5, over="100ba"),
        lambda o: theirs.PolynomialLR(o, total_iters=100, power=2.5),
    ),
    "polynomial-of-power-one": (
        Polynomial(over="100ba"),
        lambda o: theirs.PolynomialLR(o, total_iters=100),
    ),
    "exponential": (Exponential("1ba", 0.97), lambda o: theirs.ExponentialLR(o, 0.97)),
    "exponential-growth": (Exponential("1ba", 1.01), lambda o: theirs.ExponentialLR(o, 1.01)),
    "step": (StepDecay("30ba", 0.3), lambda o: theirs.StepLR(o, 30, gamma=0.3)),
    "step-by-default": (StepDecay("30ba"), lambda o: theirs.StepLR(o, 30)),
    "multi-step": (
        MultiStep(["20ba", "21ba", "100ba"], 0.5),
        lambda o: theirs.MultiStepLR(o, [20, 21, 100], gamma=0.5),
    ),
    "restarts": (
        CosineRestarts("17ba", end=0.2),
        lambda o: theirs.CosineAnnealingWarmRestarts(o, 17, eta_min=0.2),
    ),
    "restarts-that-double": (
        CosineRestarts("7ba", 2),
        lambda o: theirs.CosineAnnealingWarmRestarts(o, 7, T_mult=2),
    ),
    "restarts-that-triple": (
        CosineRestarts("1ba", 3),
        lambda o: theirs.CosineAnnealingWarmRestarts(o, 1, T_mult=3),
    ),
    "lambda": (
        as_schedule(lambda timer: 0.99**timer.batch),
        lambda o: theirs.LambdaLR(o, lambda step: 0.99**step),
    ),
    "warm-up-then-cosine": (
        Cosine(warmup="24ba", warmup_start=0.1),
        sequence(
            24,
            lambda o: theirs.LinearLR(o, 0.1, 1.0, total_iters=24),
            lambda o: theirs.CosineAnnealingLR(o, STEPS - 24),
        ),
    ),
    "warm-up-then-exponential": (
        Exponential("1ba", 0.95, warmup="24ba", warmup_start=0.1),
        sequence(
            24,
            lambda o: theirs.LinearLR(o, 0.1, 1.0, total_iters=24),
            lambda o: theirs.ExponentialLR(o, 0.95),
        ),
    ),
    "warm-up-then-steps": (
        MultiStep(["0.5dur", "0.75dur"], warmup="24ba", warmup_start=0.1),
        sequence(
            24,
            lambda o: theirs.LinearLR(o, 0.1, 1.0, total_iters=24),
            lambda o: theirs.MultiStepLR(o, [108, 162]),
        ),
    ),
    "product": (
        Linear(0.1, 1, over="24ba") * MultiStep(["120ba", "180ba"]),
        lambda o: theirs.ChainedScheduler(
            [
                theirs.LinearLR(o, 0.1, 1.0, total_iters=24),
                theirs.MultiStepLR(o, [120, 180]),
            ]
        ),
    ),
    "constant-throughout": (Constant(), lambda o: theirs.ConstantLR(o, 1.0)),
}


@pytest.mark.parametrize(("ours", "factory"), CASES.values(), ids=CASES)
def test_the_factor_before_each_step_is_that_of_torch(ours: Schedule, factory: Factory) -> None:
    expected = rates_of(factory, STEPS)
    found = values(ours, Horizon(f"{STEPS}ba"), by_batch(STEPS))
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_one_cycle_is_two_cosines() -> None:
    # OneCycleLR reaches its last value at the last step, so its curve is one step shorter.
    steps, peak, floor = 101, 30, 1 / 25 / 1e4
    ours = Periods([(f"{peak - 1}ba", Cosine(1 / 25, 1)), ("rest", Cosine(1, floor))])
    expected = rates_of(
        lambda o: theirs.OneCycleLR(
            o, max_lr=1.0, total_steps=steps, pct_start=peak / steps, cycle_momentum=False
        ),
        steps - 1,
    )
    found = values(ours, Horizon(f"{steps - 1}ba"), by_batch(steps - 1))
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_where_torch_rises_again_after_its_end_ours_holds() -> None:
    after = by_batch(STEPS + 100)[STEPS:]
    assert set(values(Cosine(1, 0.1), Horizon(f"{STEPS}ba"), after)) == {0.1}


def test_a_scheduler_stepped_once_an_epoch_is_a_schedule_in_epochs() -> None:
    per_epoch = rates_of(lambda o: theirs.StepLR(o, 3, gamma=0.5), 9)
    bound = StepDecay("3ep", 0.5).bind(Horizon("9ep", dataset_num_samples=4))
    samples = [stamp._replace(epoch=stamp.sample // 4) for stamp in by_batch(36)]
    assert [bound(stamp) for stamp in samples] == pytest.approx(
        [per_epoch[stamp.epoch] for stamp in samples]
    )
