"""Batch sizes, schedules and rules are written in a run file as in Python."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from stretto import batching, schedules
from stretto._foreign import arguments_of
from stretto.batching import (
    AtLeast,
    AtMost,
    DoublingRamp,
    Fixed,
    HalfLifeRule,
    IncreaseFunction,
    LinearRamp,
    LinearRule,
    Monotone,
    MultipleOf,
    NoiseScale,
    NormTest,
    PeriodSizes,
    PiecewiseConstant,
    Plateau,
    PowerOfTwo,
    Seesaw,
    SizeFunction,
    SquareRootRule,
    StagedRamp,
)
from stretto.config.plans import build_plan, imported
from stretto.config.run import RunConfig, dump_run_file, parse_run_file, run_file_schema
from stretto.errors import ConfigError
from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    Floor,
    Linear,
    MultiStep,
    Periods,
    Product,
    StepDecay,
    Sum,
)
from stretto.timing import Horizon, Timestamp

RUN: dict[str, Any] = {"max_duration": "2ep", "data": {"target": "a:b"}, "batch_size": 8}
VALIDATOR = jsonschema.Draft202012Validator(run_file_schema())
RAMP = {"start": 8, "end": 64, "over": "40%"}
NOISE = {"start": 8, "maximum": 64}

SIZES: list[tuple[Any, Any]] = [
    (64, Fixed(64)),
    ("64", Fixed(64)),
    ("0tok:768 250Btok:1536", PiecewiseConstant("0tok:768 250Btok:1536")),
    ({"0ep": 8, "10%": 16}, PiecewiseConstant("0ep:8 10%:16")),
    ({"Fixed": 8}, Fixed(8)),
    ({"PiecewiseConstant": "0ep:8 1ep:16"}, PiecewiseConstant("0ep:8 1ep:16")),
    ({"DoublingRamp": RAMP}, DoublingRamp(8, 64, "40%")),
    ({"DoublingRamp": {**RAMP, "equal": "batches"}}, DoublingRamp(8, 64, "40%", equal="batches")),
    ({"StagedRamp": {"sizes": [8, 24], "over": "1Mtok"}}, StagedRamp([8, 24], "1Mtok")),
    (
        {"PeriodSizes": [["10%", 8], ["rest", {"DoublingRamp": RAMP}]]},
        PeriodSizes([("10%", 8), ("rest", DoublingRamp(8, 64, "40%"))]),
    ),
    ({"AtMost": {"policy": {"NoiseScale": NOISE}, "size": 32}}, AtMost(NoiseScale(8, 64), 32)),
    (
        {"Monotone": {"PowerOfTwo": {"AtLeast": {"policy": 100, "size": 32}}}},
        Monotone(PowerOfTwo(AtLeast(Fixed(100), 32))),
    ),
    ({"NoiseScale": {**NOISE, "c": 3, "power": 0.5}}, NoiseScale(8, 64, c=3, power=0.5)),
    ({"NormTest": {**NOISE, "eta": 0.5}}, NormTest(8, 64, eta=0.5)),
    (
        {"Plateau": {"metric": "test/loss", **NOISE, "mode": "max"}},
        Plateau("test/loss", start=8, maximum=64, mode="max"),
    ),
    (
        {"Seesaw": {"decay": {"Cosine": {}}, "size": {"DoublingRamp": RAMP}, "maximum": 256}},
        Seesaw(Cosine(), DoublingRamp(8, 64, "40%"), maximum=256),
    ),
    (
        {"Seesaw": {"decay": {"Cosine": {}}, "size": 8, "factor": "continuous"}},
        Seesaw(Cosine(), 8, factor="continuous"),
    ),
    (
        {"rampup": {"final": 96, "over": "10%", "world_size": 4, "micro_batch_size": 3}},
        DoublingRamp(12, 96, "10%"),
    ),
    ({"from_megatron": "0:768 250B:1536"}, PiecewiseConstant("0sp:768 250Bsp:1536")),
    (
        {"from_megatron": {"ramp": "0:768 250B:1536", "seq_length": 4096}},
        PiecewiseConstant("0sp:768 61035156sp:1536"),
    ),
    (
        {"from_megatron": {"ramp": [8, 8, 160], "global_batch_size": 16}},
        LinearRamp(8, 16, "160sp", increment=8),
    ),
]
SCHEDULES: list[tuple[Any, Any]] = [
    (0.5, Constant(0.5)),
    (2, Constant(2.0)),
    ({"Constant": {"value": 0.3, "warmup": "5%"}}, Constant(0.3, warmup="5%")),
    ({"Cosine": {"end": 0.1, "warmup": "5%"}}, Cosine(end=0.1, warmup="5%")),
    ({"StepDecay": "30ep"}, StepDecay("30ep")),
    ({"MultiStep": ["50%", "75%"]}, MultiStep(["50%", "75%"])),
    ({"WSD": {"decay": "20%", "shape": "1-sqrt"}}, WSD("20%", shape="1-sqrt")),
    ([0.5, {"Cosine": {}}], Product(0.5, Cosine())),
    ({"Product": [0.5, {"Cosine": {}}]}, Product(0.5, Cosine())),
    ({"Sum": [0.5, {"Cosine": {}}]}, Sum(0.5, Cosine())),
    ({"Floor": {"schedule": {"Cosine": {}}, "least": 0.1}}, Floor(Cosine(), 0.1)),
    (
        {"Periods": [["until 10%", 1], ["rest", {"Periods": [["until 1ep", 1], ["rest", 0.5]]}]]},
        Periods([("until 10%", 1), ("rest", Periods([("until 1ep", 1), ("rest", 0.5)]))]),
    ),
    (
        {"Periods": [["5%", {"Linear": {"start": 0.05, "end": 1}}], ["rest", {"Cosine": {}}]]},
        Periods([("5%", Linear(0.05, 1)), ("rest", Cosine())]),
    ),
]
RULES: list[tuple[Any, Any]] = [
    ({"sqrt": 256}, SquareRootRule(256)),
    ({"linear": 256}, LinearRule(256)),
    ({"SquareRootRule": 256}, SquareRootRule(256)),
    ({"LinearRule": {"reference": 256}}, LinearRule(256)),
    (
        {"lr": {"SquareRootRule": 256}, "betas.1": {"half_life": 256}, "lr@a b": {"linear": 8}},
        {"lr": SquareRootRule(256), "betas.1": HalfLifeRule(256), "lr@a b": LinearRule(8)},
    ),
]
WAYS = [
    *(({"batch_size": value}, "batch_size", expected) for value, expected in SIZES),
    *(
        ({"schedules": {"lr": value}}, "schedules", {"lr": expected})
        for value, expected in SCHEDULES
    ),
    *(({"rule": value}, "rule", expected) for value, expected in RULES),
]  # fmt: skip


@pytest.mark.parametrize(("change", "key", "expected"), WAYS)
def test_ways_to_write_it(change: dict[str, Any], key: str, expected: Any) -> None:
    config = RunConfig.parse(RUN | change)
    assert getattr(config, key) == expected
    VALIDATOR.validate(RUN | change)
    assert parse_run_file(dump_run_file(config)) == config


@pytest.mark.parametrize("module", [batching, schedules], ids=lambda module: module.__name__)
def test_every_public_class_of_sizes_and_schedules_has_its_name(module: Any) -> None:
    parts = run_file_schema()["$defs"]
    known = {name for part in parts["BatchSize"]["anyOf"] + parts["Schedule"]["anyOf"]
             for name in part.get("properties", {})}  # fmt: skip
    kinds = {
        name
        for name in module.__all__
        if isinstance(kind := getattr(module, name), type)
        and issubclass(kind, (batching.BatchSizePolicy, batching.Pair, schedules.Schedule))
    }
    assert kinds - known == (
        {"BatchSizePolicy", "Pair"} if module is batching else {"Schedule", "Custom"}
    )
    for name in kinds & known:
        assert list(parts[name]["properties"]) == list(arguments_of(getattr(module, name)))


def test_functions_of_yours(project: str) -> None:
    def made(**change: Any) -> Any:
        config = RunConfig.parse(RUN | change)
        [key] = change
        return imported(config, getattr(config, key), key)

    plain = made(batch_size={"target": f"{project}:grow", "step": 2})
    assert isinstance(plain, SizeFunction)
    assert plain.function(Timestamp(), 10) == 12
    function = {"function": {"target": f"{project}:grow"}, "every": "1ep", "planned": False}
    asked = made(batch_size={"SizeFunction": function})
    assert repr(asked) == "SizeFunction(grow, every='1ep', planned=False)"
    function = {"function": {"target": f"{project}:grow_each_epoch"}, "start": 4}
    inner = {"IncreaseFunction": {**function, "max_batch_size": 64}}
    grown = made(batch_size={"AtMost": {"policy": inner, "size": 32}})
    assert isinstance(grown.policy, IncreaseFunction)
    assert grown.policy.function.__name__ == "grow_each_epoch"
    factor = made(schedules={"lr": {"target": f"{project}:halve_each_epoch", "base": 0.25}})["lr"]
    assert factor.bind(Horizon("2ep"))(Timestamp(epoch=1)) == 0.25
    own = made(
        batch_size={
            "MultipleOf": {"policy": {"target": "stretto.batching:Fixed", "size": 9}, "factor": 2}
        }
    )
    assert own == MultipleOf(Fixed(9), 2)
    own = made(schedules={"lr": [0.5, {"target": "stretto.schedules:Constant", "value": 0.5}]})
    assert own["lr"] == Product(0.5, Constant(0.5))


def test_the_keys_of_the_adaptive_batching_of_torchtune_work() -> None:
    grow = {"target": "a:b"}
    config = RunConfig.parse(
        RUN | {"use_maximum_batch_size": True, "batch_increase_function": grow}
    )
    assert config.micro_batch_size == "auto"
    assert isinstance(config.batch_size, IncreaseFunction)
    assert (config.batch_size.start, config.batch_size.max_batch_size) == (8, "auto")
    with pytest.raises(ConfigError, match="IncreaseFunction"):
        RunConfig.parse(RUN | {"batch_size": "0ep:8 1ep:16", "batch_increase_function": grow})
    with pytest.raises(ConfigError, match="batch_size: auto"):
        RunConfig.parse(RUN | {"micro_batch_size": 4, "use_maximum_batch_size": True})


OLD: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": {"ramp": "double", **RAMP}}, "{DoublingRamp: {start: 8, end: 64, over: 40%}}"),
    ({"batch_size": {"noise_scale": 0.5, **NOISE}}, "{NoiseScale: {start: ..., maximum: ...}}"),
    ({"batch_size": {"size": 100, "even": True}}, "{MultipleOf: "),
    ({"batch_size": {"size": 100, "power_of_two": "down"}}, "{PowerOfTwo: "),
    ({"batch_size": {"seesaw": 16}}, "{Seesaw: {decay: ..., size: ...}}"),
    ({"batch_size": {"periods": []}}, "PeriodSizes"),
    ({"schedules": {"lr": {"cosine": {"end": 0.1}}}}, "write {Cosine: {end: 0.1}}"),
    ({"schedules": {"lr": {"multi_step": {}}}}, "{MultiStep: {milestones: ...}}"),
    ({"schedules": {"lr": {"periods": [{"duration": "rest"}]}}}, "{Periods: [[15%, "),
]


@pytest.mark.parametrize(("change", "write"), OLD)
def test_old_words_are_answered_with_what_to_write(change: dict[str, Any], write: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse(RUN | change)
    assert write in str(caught.value)


WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"batch_size": value}, word) for value, word in [
        ([8, 16], "example"), (True, "example"), (8.0, "example"), ({}, "example"),
        ("8 16", "steps"), ("0ep:8 1ep:0", "0"), ({"1ep": 8}, "first"),
        ({"0ep": 8, "1": 16}, "unit"),
        ({"0ep": 8, "1ep": True}, "integer"), ({"DoublngRamp": RAMP}, "{DoublingRamp: "),
        ({"Sine": {}}, "example"), ({"Fixed": 8, "PowerOfTwo": 8}, "Fixed"),
        ({"DoublingRamp": {"start": 8, "over": "1ep"}}, "'end'"),
        ({"DoublingRamp": {**RAMP, "start": True}}, "whole number"),
        ({"DoublingRamp": {**RAMP, "ende": 8}}, "'end'"),
        ({"DoublingRamp": {**RAMP, "start": 100}}, "shrink"),
        ({"DoublingRamp": {**RAMP, "over": 3}}, "unit"),
        ({"DoublingRamp": {**RAMP, "equal": "steps"}}, "batches"),
        ({"PeriodSizes": []}, "one"), ({"PeriodSizes": [8]}, "a time"),
        ({"PeriodSizes": [[-1, 8]]}, "write 'rest'"), ({"PeriodSizes": [["1ep"]]}, "a time"),
        ({"PeriodSizes": [["rest", {"Seesaw": {"decay": 1, "size": 8}}]]}, "pair"),
        ({"AtMost": {"policy": 8}}, "'size'"),
        ({"PowerOfTwo": {"policy": 8, "rounding": "u"}}, "up"),
        ({"Seesaw": {"decay": {"Cosine": {}}, "size": 16, "factor": 1}}, "1.01"),
        ({"target": "no_colon"}, "not of the form 'package.module:attribute'"),
        ({"IncreaseFunction":
          {"function": {"target": "a:b"}, "start": 8, "max_batch_size": 4}}, "above"),
    ]),
    *(({"schedules": {"lr": value}}, word) for value, word in [
        ("cosine", "example"), (True, "example"), ({}, "example"), ({"Cosin": {}}, "{Cosine: "),
        ({"Cosine": {"ends": 0.1}}, "'end'"), ({"Cosine": {"end": -0.1}}, "at least 0"),
        ({"Cosine": {"end": True}}, "number"), ({"Cosine": {"warmup": "5"}}, "unit"),
        ({"Cosine": {"T_max": 5}}, "over"), ({"Exponential": {"every": "1ep"}}, "'gamma'"),
        ({"CosineRestarts": {"t_0": "1ep", "multiplier": 1.5}}, "whole"),
        ({"WSD": {"decay": "20%", "shape": "cosin"}}, "'cosine'"), ([], "at least one"),
        ({"MultiStep": "50%"}, "list"), ([["x"]], "example"),
        ({"Periods": [["5%", "x"]]}, "example"),
    ]),
    *(({"rule": value}, word) for value, word in [
        ({}, "sqrt"), ({"linear": 8, "sqrt": 8}, "sqrt"), ("sqrt", "{sqrt: 256}"),
        ({"sqrt": 0}, "at least 1"), ({"LinearRule": {}}, "'reference'"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "word"), WRONG)
def test_what_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse(RUN | change)
    assert word in str(caught.value)


@pytest.mark.parametrize("other", [{"rule": {"sqrt": 8}}, {"schedules": {"lr": 0.5}}], ids=str)
def test_a_pair_has_the_rule_and_the_rate(other: dict[str, Any]) -> None:
    data = {"target": "a:b", "num_samples": 3000}
    pair = {"Seesaw": {"decay": {"Cosine": {"warmup": "5%"}}, "size": 16, "maximum": 64}}
    config = RunConfig.parse(RUN | {"data": data, "batch_size": pair})
    shown = [(one.size, round(one.values["lr"].first, 4)) for one in build_plan(config).stages]
    assert shown == [(16, 0.0), (16, 1.0), (32, 0.7071), (64, 0.5)]
    with pytest.raises(ConfigError, match=r"the pair has its own.*\(batch_size"):
        build_plan(RunConfig.parse(RUN | {"data": data, "batch_size": pair} | other))
