"""What a run file says of the optimizer's values, before there is an optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stretto.config.checking import check_targets
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
    assert base_values(chosen) == {"lr": 0.1, "lr@head": 0.4, "lr@rest": 0.1}
    values = build_plan(chosen).values_at(0)
    assert values["lr"] == pytest.approx(0.05)
    assert values["lr@head"] == pytest.approx(0.1), "the group's factor times that for all"


def test_values_that_are_not_stated_have_factors() -> None:
    adam = config(optimizer={"target": "torch.optim:AdamW"}, schedules={"betas": 1.0})
    assert base_values(adam) == {}
    assert build_plan(adam).values_at(0) == {"lr": 1.0, "betas": 1.0}
    stated = config(optimizer={"target": "no.such:Adam", "lr": 1, "betas": [0.8, 0.9]})
    assert base_values(stated) == {"lr": 1.0}


def test_a_plan_has_a_column_for_each_beta_and_momentum_is_the_first_of_adam() -> None:
    optimizer = {**ADAM, "betas": [0.8, 0.9]}
    schedules = {"betas": 0.5, "betas.1": 0.5, "momentum": {"Linear": {}}}
    plan = build_plan(config(optimizer=optimizer, schedules=schedules))
    assert plan.values_at(10) == {
        "lr": 0.1,
        "betas": pytest.approx(0.2),
        "betas.1": pytest.approx(0.225),
        "momentum": pytest.approx(0.2),
    }


@pytest.mark.parametrize("lr", ["abc", math.nan, -1, {}], ids=str)
def test_a_learning_rate_that_is_none_is_refused_by_a_plan(lr: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        list(check_targets(config(optimizer={**ADAM, "lr": lr})))
    assert "optimizer" in str(caught.value)


def test_a_group_that_the_file_does_not_have_is_refused_by_a_plan() -> None:
    optimizer = {**ADAM, "groups": {"head": {"parameters": "head"}}}
    list(check_targets(config(optimizer=optimizer, schedules={"lr@head": 0.5, "lr@rest": 0.5})))
    with pytest.raises(ConfigError) as caught:
        list(check_targets(config(optimizer=optimizer, schedules={"lr@tail": 0.5})))
    assert "group" in str(caught.value)


def test_another_optimizer_may_make_of_its_settings_what_it_likes() -> None:
    optimizer = {"target": "my.optim:make", "lr": "auto", "momentum": {"body": 0.9}}
    plan = build_plan(config(optimizer=optimizer, schedules={"lr@body": 0.5, "momentum": 0.5}))
    assert plan.values_at(0)["lr@body"] == 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": {"Plateau": {"metric": "validation/los", "start": 4, "maximum": 8}}},
        {"checkpoint": {"monitor": "validation/los"}},
    ],
    ids=["plateau", "monitor"],
)
def test_a_metric_that_no_evaluation_measures_is_refused_by_a_plan(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="evaluation"):
        build_plan(config(**changes, evaluate={"metrics": {"accuracy": {"target": "a:b"}}}))
