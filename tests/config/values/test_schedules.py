"""Each way to write a schedule, and the schedule it becomes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from stretto import schedules as all_schedules
from stretto.config.forms import CURVES, imported
from stretto.config.run import RunConfig
from stretto.config.schema import run_file_schema
from stretto.errors import ConfigError
from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Curve,
    Custom,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    Periods,
    Polynomial,
    Product,
    Schedule,
    StepDecay,
)
from stretto.timing import Horizon, Timestamp

RUN = {"max_duration": "2ep", "data": {"target": "a:b"}, "batch_size": 8}


def schedule(value: Any) -> Schedule:
    config = RunConfig.parse(RUN | {"schedules": {"lr": value}})
    return imported(config.schedules["lr"].value, config.source, ("schedules", "lr"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, Constant(0.5)),
        (2, Constant(2.0)),
        ({"constant": {}}, Constant()),
        ({"constant": {"value": 0.3, "warmup": "5%"}}, Constant(0.3, warmup="5%")),
        ({"linear": {"start": 0, "end": 1.0}}, Linear(0, 1)),
        ({"cosine": {"end": 0.1, "warmup": "5%"}}, Cosine(end=0.1, warmup="5%")),
        (
            {"cosine_restarts": {"t_0": "1ep", "multiplier": 2}},
            CosineRestarts("1ep", 2),
        ),
        ({"polynomial": {"power": 2, "over": "1ep"}}, Polynomial(power=2, over="1ep")),
        ({"exponential": {"every": "1ep", "gamma": 0.9}}, Exponential("1ep", 0.9)),
        ({"step": {"every": "30ep"}}, StepDecay("30ep")),
        ({"multi_step": {"milestones": ["50%", "75%"]}}, MultiStep(["50%", "75%"])),
        ({"inverse_sqrt": {"warmup": "100ba"}}, InverseSqrt(warmup="100ba")),
        ({"wsd": {"decay": "20%", "shape": "1-sqrt"}}, WSD("20%", shape="1-sqrt")),
        ([0.5, {"cosine": {}}], Product(Constant(0.5), Cosine())),
        ([{"cosine": {}}], Cosine()),
        (
            {
                "periods": [
                    {"duration": "5%", "linear": {"start": 0.05, "end": 1.0}},
                    {"duration": "rest", "cosine": {"end": 0.1}},
                ]
            },
            Periods([("5%", Linear(0.05, 1.0)), ("rest", Cosine(end=0.1))]),
        ),
    ],
)
def test_ways_to_write_it(value: Any, expected: Schedule) -> None:
    assert schedule(value) == expected


def test_every_schedule_can_be_written() -> None:
    kinds = {
        value
        for value in vars(all_schedules).values()
        if inspect.isclass(value) and issubclass(value, Schedule) and value is not Schedule
    }
    # Curve and Custom hold a function, which a target names; periods and products hold schedules.
    assert kinds - set(CURVES.values()) == {Curve, Custom, Periods, Product}


@pytest.mark.parametrize("name", CURVES)
def test_the_keys_of_the_schema_are_the_arguments(name: str) -> None:
    section = run_file_schema()["$defs"][CURVES[name].__name__]
    parameters = inspect.signature(CURVES[name]).parameters
    assert list(section["properties"]) == list(parameters)
    for key, found in section["properties"].items():
        default = parameters[key].default
        assert (key in section.get("required", ())) == (default is inspect.Parameter.empty)
        assert found["description"], f"{name}.{key} is described in its class"


def test_a_target_may_be_a_schedule() -> None:
    config = RunConfig.parse(
        RUN | {"schedules": {"lr": [0.5, {"target": "stretto.schedules:Cosine", "end": 0.1}]}}
    )
    built = imported(config.schedules["lr"].value, config.source, ("schedules", "lr"))
    assert built == Product(Constant(0.5), Cosine(end=0.1))


def test_functions(project: str) -> None:
    config = RunConfig.parse(
        RUN | {"schedules": {"lr": {"target": f"{project}:halve_each_epoch", "base": 0.25}}}
    )
    built = imported(config.schedules["lr"].value, config.source, ("schedules", "lr"))
    factor = built.bind(Horizon("2ep"))
    assert factor(Timestamp(epoch=1)) == 0.25


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cosine", "example"),
        (True, "example"),
        ({}, "example"),
        ({"cosine": None}, "cosine"),
        ({"cosin": {}}, "'cosine'"),
        ({"cosine": {"ends": 0.1}}, "'end'"),
        ({"cosine": {}, "linear": {}}, "linear"),
        ({"cosine": {"end": -0.1}}, "greater"),
        ({"cosine": {"end": True}}, "number"),
        ({"cosine": {"warmup": "5"}}, "unit"),
        ({"cosine": 0.1}, "mapping"),
        ({"constant": 0.1}, "warmup_start"),
        ({"exponential": {"every": "1ep"}}, "'gamma'"),
        ({"cosine_restarts": {"t_0": "1ep", "multiplier": 1.5}}, "integer"),
        ({"wsd": {"decay": "20%", "shape": "cosin"}}, "cosine"),
        ({"multi_step": {"milestones": "50%"}}, "list"),
        ({"cosine": {}, "duration": "5%"}, "duration"),
        ({"periods": [{"cosine": {}}]}, "duration"),
        ({"periods": [{"duration": "5%"}]}, "example"),
        ({"periods": []}, "least"),
        ({"periods": [0.5]}, "duration"),
        ([], "least"),
        ([["x"]], "example"),
        ({"target": "a.b"}, "'a:b'"),
    ],
)
def test_what_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule(value)
