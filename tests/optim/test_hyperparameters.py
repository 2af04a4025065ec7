from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stretto.batching import LinearRule, SquareRootRule
from stretto.errors import ConversionError, ScheduleError
from stretto.optim import Hyperparameters
from stretto.schedules import Constant, Cosine, Linear, Periods
from stretto.timing import Horizon, Timestamp

HORIZON = Horizon("10ba")


def groups() -> list[dict[str, Any]]:
    return [
        {"params": [nn.Parameter(torch.zeros(1))], "name": "body", "lr": 0.5},
        {"params": [nn.Parameter(torch.zeros(1))], "name": "head", "lr": 0.25},
    ]


def adamw(**settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(), betas=(0.8, 0.9), weight_decay=0.1, **settings)


def at(batch: int) -> Timestamp:
    return Timestamp(batch=batch)


def test_every_group_keeps_its_own_base() -> None:
    optimizer = adamw()
    settings = Hyperparameters(optimizer, {"lr": Linear(1, 0)}, HORIZON)
    settings.apply(at(5))
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]
    settings.apply(at(0))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


def test_a_groups_own_schedule_multiplies_the_one_for_all() -> None:
    optimizer = adamw()
    settings = Hyperparameters(optimizer, {"lr": Linear(1, 0), "lr@head": Constant(0.1)}, HORIZON)
    settings.apply(at(5))
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125 * 0.1]
    assert settings.values()["lr@head"] == 0.125 * 0.1


def test_a_group_without_a_name_is_known_by_its_number() -> None:
    parameters = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=1.0, weight_decay=0.1)
    Hyperparameters(optimizer, {"weight_decay@1": Constant(0.5)}, HORIZON).apply(at(0))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.05]


def test_several_schedules_multiply() -> None:
    optimizer = adamw()
    Hyperparameters(optimizer, {"lr": [Linear(1, 0), 0.5]}, HORIZON).apply(at(5))
    assert optimizer.param_groups[0]["lr"] == 0.5 * (0.5 * 0.5)


def test_betas_are_set_each() -> None:
    optimizer = adamw()
    Hyperparameters(optimizer, {"betas": Constant(0.5)}, HORIZON).apply(at(0))
    assert optimizer.param_groups[0]["betas"] == (0.4, 0.45)


def test_a_tensor_learning_rate_is_written_in_place() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    tensor = optimizer.param_groups[0]["lr"]
    Hyperparameters(optimizer, {"lr": Linear(1, 0)}, HORIZON).apply(at(5))
    assert optimizer.param_groups[0]["lr"] is tensor
    assert tensor.item() == 0.25


def test_groups_that_were_given_one_tensor_have_rates_of_their_own() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.5))
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    Hyperparameters(optimizer, {"lr@0": 1.0, "lr@1": 0.5}, HORIZON).apply(at(5))
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.5, 0.25]


def test_the_rule_follows_the_size_and_not_its_history() -> None:
    optimizer = adamw()
    settings = Hyperparameters(optimizer, {"lr": Linear(1, 0)}, HORIZON, rule=SquareRootRule(16))
    for size in (64, 16, 64):
        settings.apply(at(5), size)
    assert optimizer.param_groups[0]["lr"] == 0.25 * 2
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_rule_alone_is_enough() -> None:
    optimizer = adamw()
    settings = Hyperparameters(optimizer, {}, HORIZON, rule=LinearRule(8))
    settings.apply(at(0), 32)
    assert settings.values() == {"lr": 2.0}


def test_a_rule_may_be_written_as_in_a_run_file() -> None:
    assert Hyperparameters(adamw(), {}, HORIZON, rule={"sqrt": 8}).rules == {
        "lr": SquareRootRule(8)
    }


def test_a_rule_needs_the_size() -> None:
    settings = Hyperparameters(adamw(), {}, HORIZON, rule=LinearRule(8))
    with pytest.raises(ScheduleError, match="batch"):
        settings.apply(at(0))


def test_the_base_survives_a_loaded_state() -> None:
    optimizer = adamw()
    settings = Hyperparameters(optimizer, {"lr": Cosine()}, HORIZON)
    settings.apply(at(7))
    optimizer.load_state_dict(optimizer.state_dict())
    settings.apply(at(0))
    assert optimizer.param_groups[0]["lr"] == 0.5
    settings.apply(at(10))
    assert optimizer.param_groups[0]["lr"] == settings.values()["lr"] == 0.0
    assert settings.base == {"lr": 0.5}


RAMP = {"lr": Linear(0, 1), "weight_decay": Linear(0, 1), "betas.0": Linear(0, 1)}


def test_after_a_warm_up_from_0_the_base_is_what_the_optimizer_was_built_with() -> None:
    optimizer = adamw()
    for batch in (0, 3, 0):
        settings = Hyperparameters(optimizer, RAMP, HORIZON)
        settings.apply(at(batch))
        assert settings.base == {"lr": 0.5, "weight_decay": 0.1, "betas.0": 0.8}
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    settings = Hyperparameters(optimizer, RAMP, HORIZON)
    settings.apply(at(10))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)


def test_what_is_no_longer_scheduled_is_what_it_was_built_with() -> None:
    optimizer = adamw()
    Hyperparameters(optimizer, RAMP, HORIZON).apply(at(0))
    Hyperparameters(optimizer, {}, HORIZON)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.5, 0.1, (0.8, 0.9))


def test_a_tensor_learning_rate_keeps_its_base_too() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    tensor = optimizer.param_groups[0]["lr"]
    for batch in (0, 3, 7):
        settings = Hyperparameters(optimizer, {"lr": Linear(0, 1)}, HORIZON)
        assert settings.base == {"lr": pytest.approx(0.1)}
        settings.apply(at(batch))
    assert optimizer.param_groups[0]["lr"] is tensor


def test_the_base_is_changed_by_its_key() -> None:
    optimizer = adamw()
    Hyperparameters(optimizer, RAMP, HORIZON).apply(at(3))
    optimizer.param_groups[0]["initial_lr"] = 0.01
    base = Hyperparameters(optimizer, RAMP, HORIZON).base
    assert base == {"lr": 0.01, "weight_decay": 0.1, "betas.0": 0.8}
    assert optimizer.param_groups[1]["lr"] == 0.25


class Prepared(torch.optim.Optimizer):
    """As Accelerate wraps an optimizer: a subclass that torch's constructor never saw."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


class Foreign:
    """What has parameter groups, and is not an optimizer of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups


@pytest.mark.parametrize("wrap", [Prepared, Foreign])
def test_an_optimizer_in_a_wrapper_keeps_its_base_too(wrap: Any) -> None:
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    outer = wrap(inner)
    for _ in range(2):
        hyperparameters = Hyperparameters(outer, {"lr": Linear(0, 1)}, Horizon("10ba"))
        hyperparameters.apply(Timestamp(batch=5))
        assert inner.param_groups[0]["lr"] == 0.25
        hyperparameters.apply(Timestamp())
    if wrap is Prepared:
        outer.load_state_dict(inner.state_dict())
        again = Hyperparameters(Prepared(inner), {}, Horizon("10ba"))
        assert again.base == {"lr": 0.5}


def test_the_base_is_saved_with_the_optimizer() -> None:
    optimizer, other = adamw(), adamw(lr=7.0)
    Hyperparameters(optimizer, RAMP, HORIZON).apply(at(3))
    other.load_state_dict(optimizer.state_dict())
    assert Hyperparameters(other, RAMP, HORIZON).base["lr"] == 0.5


def test_one_beta_can_be_scheduled_alone() -> None:
    optimizer = adamw()
    settings = Hyperparameters(optimizer, {"betas.1": Constant(0.5), "betas": 0.5}, HORIZON)
    settings.apply(at(0))
    assert [group["betas"] for group in optimizer.param_groups] == [(0.4, 0.225)] * 2
    assert settings.values() == {"lr": 0.5, "betas.1": 0.225, "betas": 0.4}


def test_one_beta_of_one_group_can_be_scheduled_alone() -> None:
    optimizer = adamw()
    Hyperparameters(optimizer, {"betas.0@head": Constant(0.5)}, HORIZON).apply(at(0))
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.9), (0.4, 0.9)]


def test_betas_that_are_tensors_are_written_in_place() -> None:
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    optimizer = torch.optim.AdamW(
        [nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1), betas=betas, capturable=True
    )
    Hyperparameters(optimizer, {"betas.0": Constant(0.5)}, HORIZON).apply(at(0))
    assert optimizer.param_groups[0]["betas"][0] is betas[0]
    assert [one.item() for one in betas] == [0.25, 0.75]


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_momentum_is_the_first_beta_of_adam_as_in_torchs_one_cycle() -> None:
    def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1.0, total_steps=10, base_momentum=0.85, max_momentum=0.95
        )

    theirs = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], betas=(0.8, 0.9))
    scheduler = one_cycle(theirs)
    ours = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], betas=(0.95, 0.9))
    low = 0.85 / 0.95
    cycle = Periods(
        [
            ("2ba", Cosine(1, low)),
            ("rest", Cosine(low, 1, over="7ba")),
        ]
    )
    settings = Hyperparameters(ours, {"momentum": cycle}, HORIZON)
    for batch in range(10):
        settings.apply(at(batch))
        expected = theirs.param_groups[0]["betas"]
        assert ours.param_groups[0]["betas"] == pytest.approx(expected, rel=1e-12)
        if batch < 9:
            scheduler.step()


def test_momentum_is_momentum_where_there_is_one() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
    Hyperparameters(optimizer, {"momentum": Constant(0.5)}, HORIZON).apply(at(0))
    assert optimizer.param_groups[0]["momentum"] == 0.45


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("betas.2", r"has 2 values of 'betas'; write 'betas.1'"),
        ("lr.0", r"write 'lr'"),
        ("betas[0]", r"'betas.0'"),
        ("learning_rate", r"cannot schedule 'learning_rate': .*; write 'lr'"),
        ("weight_decy", r"write 'weight_decay'"),
        ("amsgrad", r"no such number"),
        ("lr@tail", r"no such parameter group \(it has body, head\); write 'lr@body'"),
    ],
)
def test_a_wrong_name_is_refused_with_the_right_one(name: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Hyperparameters(adamw(), {name: Linear(1, 0)}, HORIZON)


def test_a_schedule_that_does_not_fit_the_run_is_refused_at_once() -> None:
    with pytest.raises(ConversionError):
        Hyperparameters(adamw(), {"lr": Linear(1, 0, over="0.5ep")}, HORIZON)


def test_a_rate_that_nothing_moves_is_the_one_the_optimizer_was_built_with() -> None:
    saved, optimizer = adamw(), adamw()
    saved.param_groups[0]["lr"] = 0.01
    settings = Hyperparameters(optimizer, {}, HORIZON)
    optimizer.load_state_dict(saved.state_dict())
    settings.apply(at(3))
    assert settings.values() == {"lr": 0.5}
