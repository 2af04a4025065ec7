from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from stretto.errors import ScheduleError
from stretto.optim import Hyperparameters, from_torch
from stretto.timing import Horizon, Timestamp

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=40),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 40),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=1.0, step_size_up=7),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[10]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_it_is_the_scheduler_at_any_time_in_any_order(name: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    expected = []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        if len(expected) < 40:
            scheduler.step()
    factor = from_torch(SCHEDULERS[name]).bind(Horizon("40ba"))
    batches = list(range(40))
    random.Random(0).shuffle(batches)
    for batch in batches:
        assert factor(Timestamp(batch=batch)) == expected[batch]


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
    with pytest.raises(ScheduleError, match="positive"):
        from_torch(lambda o: lr_scheduler.StepLR(o, 2), every=every)


def test_a_factory_that_fails_is_found_when_it_is_bound() -> None:
    broken = from_torch(lambda o: None)
    with pytest.raises(ScheduleError, match="scheduler"):
        broken.bind(Horizon("9ba"))


def test_a_scheduler_that_ends_too_early_says_so() -> None:
    schedule = from_torch(lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=5))
    factor = schedule.bind(Horizon("9ba"))
    with pytest.raises(ScheduleError, match="intervals"):
        factor(Timestamp(batch=8))


def test_a_scheduler_that_needs_a_metric_is_refused_with_what_can_follow_one() -> None:
    plateau = from_torch(lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ScheduleError, match="metric"):
        plateau.bind(Horizon("9ba"))
