"""What a run file says of the optimizer's values, before there is an optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stretto.config.plans import base_values, build_plan
from stretto.config.run import RunConfig
from stretto.errors import ConfigError

RUN: dict[str, Any] = {
    "max_duration": "2ep",
    "data": {"target": "my.data:make", "num_samples": 100},
    "batch_size": 10,
}
ADAM: dict[str, Any] = {"target": "torch.optim:AdamW", "lr": 0.1}


def config(**changes: Any) -> RunConfig:
    return RunConfig.parse(RUN | changes)


def test_values_are_those_of_the_optimizer() -> None:
    optimizer = {
        "target": "torch.optim:SGD",
        "lr": 0.1,
        "groups": {"head": {"parameters": "head", "lr": 0.4}},
    }
    schedules = {"lr": 0.5, "lr@head": 0.5, "momentum": 2.0, "lr@rest": 1.0}
    chosen = config(optimizer=optimizer, schedules=schedules)
    assert base_values(chosen) == {"lr": 0.1, "lr@head": 0.4, "momentum": 0.0, "lr@rest": 0.1}
    values = build_plan(chosen).values_at(0)
    assert values["lr"] == pytest.approx(0.05)
    assert values["lr@head"] == pytest.approx(0.1), "the group's factor times that for all"


def test_defaults_of_the_optimizer_are_looked_up() -> None:
    adam = config(optimizer={"target": "torch.optim:AdamW"}, schedules={"betas": 1.0})
    assert base_values(adam) == {"lr": 1e-3, "betas": 0.9}
    stated = config(optimizer={"target": "no.such:Adam", "lr": 1, "betas": [0.8, 0.9]})
    assert base_values(stated) == {"lr": 1.0}


def test_a_plan_has_a_column_for_each_beta_and_momentum_is_the_first_of_adam() -> None:
    optimizer = {**ADAM, "betas": [0.8, 0.9]}
    schedules = {"betas": 0.5, "betas.1": 0.5, "momentum": {"linear": {}}}
    plan = build_plan(config(optimizer=optimizer, schedules=schedules))
    assert plan.values_at(10) == {
        "lr": 0.1,
        "betas": pytest.approx(0.2),
        "betas.1": pytest.approx(0.225),
        "momentum": pytest.approx(0.2),
    }


@pytest.mark.parametrize(
    ("lr", "said"),
    [
        ("abc", "'abc'"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-1, "-1"),
        (True, "True"),
        ([0.1, 0.2], r"\[0.1, 0.2\]"),
    ],
)
def test_a_learning_rate_that_is_none_is_refused_by_a_plan(lr: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_plan(config(optimizer={**ADAM, "lr": lr}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_decay": "abc"},
        {"weight_decay": [0.1]},
        {"momentum": math.nan},
        {"betas": [0.9, "a"]},
    ],
    ids=str,
)
def test_a_plan_checks_the_usual_numbers_of_torchs_optimizers_without_a_schedule(
    wrong: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match="optimizer"):
        build_plan(config(optimizer={**ADAM, **wrong}))
    build_plan(config(optimizer={**ADAM, **wrong, "target": "my.optim:make"} | {"momentum": 0.9}))


def test_a_groups_own_value_is_looked_at_too() -> None:
    groups = {"head": {"parameters": "head", "weight_decay": math.nan}}
    with pytest.raises(ConfigError, match="weight_decay"):
        build_plan(
            config(optimizer={**ADAM, "groups": groups}, schedules={"weight_decay@head": 0.5})
        )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lrr", "no such number .*; write 'lr'"),
        ("momentun", "no such number"),
        ("amsgrad", "no such number"),
        ("betas.2", "has 2 values of 'betas'; write 'betas.1'"),
        ("lr.0", "write 'lr'"),
        ("lr@head", r"no such parameter group \(it has 0\)"),
        ("betas[0]", "not the name of a hyper-parameter"),
    ],
)
def test_a_schedule_of_what_torchs_optimizer_does_not_have_is_refused_by_a_plan(
    name: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        build_plan(config(optimizer=ADAM, schedules={name: 0.5}))


def test_a_group_that_the_file_does_not_have_is_refused_by_a_plan() -> None:
    optimizer = {**ADAM, "target": "my.optim:Lion", "groups": {"head": {"parameters": "head"}}}
    build_plan(config(optimizer=optimizer, schedules={"lr@head": 0.5, "lr@rest": 0.5}))
    with pytest.raises(ConfigError, match="parameter"):
        build_plan(config(optimizer=optimizer, schedules={"lr@tail": 0.5}))


def test_another_optimizer_may_make_of_its_settings_what_it_likes() -> None:
    optimizer = {"target": "my.optim:make", "lr": "auto", "momentum": {"body": 0.9}}
    plan = build_plan(config(optimizer=optimizer, schedules={"lr@body": 0.5, "momentum": 0.5}))
    assert plan.values_at(0)["lr@body"] == 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": {"plateau": "validation/los", "start": 4, "maximum": 8}},
        {"checkpoint": {"monitor": "validation/los"}},
    ],
    ids=["plateau", "monitor"],
)
def test_a_metric_that_no_evaluation_measures_is_refused_by_a_plan(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="evaluation"):
        build_plan(config(**changes, evaluate={"metrics": {"accuracy": {"target": "a:b"}}}))
