"""Each way to write a batch size, and the policy it becomes."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.batching import (
    AtLeast,
    AtMost,
    BatchSizePolicy,
    DoublingRamp,
    Fixed,
    Hysteresis,
    LinearRamp,
    Monotone,
    MultipleOf,
    NoiseScale,
    NormTest,
    PeriodSizes,
    PiecewiseConstant,
    Plateau,
    PowerOfTwo,
    SizeFunction,
    StagedRamp,
)
from stretto.config.forms import imported
from stretto.config.run import RunConfig
from stretto.config.yaml import Source
from stretto.errors import ConfigError
from stretto.timing import Timestamp

RUN = {"max_duration": "2ep", "data": {"target": "a:b"}}
NOISY = {"noise_scale": 0.3, "start": 8, "maximum": 100}


def policy(value: Any, world_size: int = 1, micro: int | None = None) -> BatchSizePolicy:
    keys = {"batch_size": value, "world_size": world_size, "micro_batch_size": micro}
    read = RunConfig.parse(RUN | keys).batch_size.value
    assert isinstance(read, BatchSizePolicy)
    return imported(read, Source(), ("batch_size",))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (64, Fixed(64)),
        ("64", Fixed(64)),
        ("0tok:768 250Btok:1536", PiecewiseConstant("0tok:768 250Btok:1536")),
        ({"0ep": 8, "10%": 16}, PiecewiseConstant("0ep:8 10%:16")),
        ({"size": 8, "at_most": 4}, AtMost(Fixed(8), 4)),
        ({"steps": {"0ep": 8, "1ep": 16}}, PiecewiseConstant("0ep:8 1ep:16")),
        ({"steps": "0ep:8 1ep:16"}, PiecewiseConstant("0ep:8 1ep:16")),
        ({"ramp": "double", "start": 8, "end": 64, "over": "40%"}, DoublingRamp(8, 64, "40%")),
        (
            {"ramp": "linear", "start": 8, "end": 64, "over": "1ep", "increment": 8},
            LinearRamp(8, 64, "1ep", increment=8),
        ),
        (
            {"ramp": "stages", "sizes": [8, 24, 64], "over": "1Mtok"},
            StagedRamp([8, 24, 64], "1Mtok"),
        ),
        (
            {"ramp": "linear", "start": 8, "end": 64, "over": "1ep", "equal": "batches"},
            LinearRamp(8, 64, "1ep", equal="batches"),
        ),
        (
            {"ramp": "double", "start": 8, "end": 64, "over": "1ep", "equal": "batches"},
            DoublingRamp(8, 64, "1ep", equal="batches"),
        ),
        (
            {"ramp": "stages", "sizes": [8, 64], "over": "1ep", "equal": "batches"},
            StagedRamp([8, 64], "1ep", equal="batches"),
        ),
        (
            {
                "periods": [
                    {"duration": "10%", "size": 8},
                    {"duration": "rest", "ramp": "double", "start": 8, "end": 32, "over": "50%"},
                ]
            },
            PeriodSizes([("10%", 8), ("rest", DoublingRamp(8, 32, "50%"))]),
        ),
        (
            {"size": 100, "power_of_two": "down", "monotone": True, "at_least": 32},
            AtLeast(Monotone(PowerOfTwo(Fixed(100))), 32),
        ),
        (
            {"noise_scale": 0.3, "start": 8, "maximum": 64, "power_of_two": "down"},
            PowerOfTwo(NoiseScale(8, 64, c=0.3)),
        ),
        (
            {"noise_scale": 3, "power": 0.5, "start": 8, "maximum": 64},
            NoiseScale(8, 64, c=3, power=0.5),
        ),
        (
            {"norm_test": 0.5, "start": 8, "maximum": 64, "window": 10},
            NormTest(8, 64, eta=0.5, window=10),
        ),
        (
            {"plateau": "test/loss", "start": 8, "maximum": 64, "mode": "max", "patience": 4},
            Plateau("test/loss", start=8, maximum=64, mode="max", patience=4),
        ),
        ({"size": 100, "hysteresis": 1.5}, Hysteresis(Fixed(100), 1.5)),
        ({"size": 100, "multiple_of": 16}, MultipleOf(Fixed(100), 16)),
    ],
)
def test_ways_to_write_it(value: Any, expected: BatchSizePolicy) -> None:
    assert policy(value) == expected


@pytest.mark.parametrize(
    "words", [{"start": 8, "end": 64}, {"power": 0.5, "start": 8, "maximum": 64}]
)
def test_words_of_a_way_without_the_one_that_names_it(words: dict[str, Any]) -> None:
    """The word 'start' is near to 'target', and nobody has meant that."""
    with pytest.raises(ConfigError, match="example"):
        policy(words)


def test_what_is_even_may_be_beyond_the_maximum_of_what_is_measured() -> None:
    with pytest.raises(ConfigError, match="maximum"):
        policy(NOISY | {"even": True}, 32, 4)
    policy(NOISY | {"even": True}, 16, 4)


def test_what_is_even_may_be_beyond_the_minimum_of_what_is_measured() -> None:
    with pytest.raises(ConfigError, match="start"):
        policy(NOISY | {"even": True}, 2, 3)
    policy(NOISY | {"even": True, "at_least": 12}, 2, 3)
    policy(NOISY | {"even": True}, 4, 3)  # which lifts it to 12


def test_even_goes_by_ranks_and_micro_batches() -> None:
    assert policy({"size": 100, "even": True}, 4, 3) == MultipleOf(Fixed(100), 12)


def test_a_rampup_starts_from_the_lowest_size_possible_or_from_the_one_stated() -> None:
    value = {"rampup": 96, "over": "10%"}
    assert policy(value, 4, 3) == DoublingRamp(12, 96, "10%")
    stated = value | {"initial_global_train_batch_size": 24}
    assert policy(stated, 4, 3) == DoublingRamp(24, 96, "10%")
    with pytest.raises(ConfigError, match="multiple"):
        policy(value, 2, 5)
    with pytest.raises(ConfigError, match="micro_batch_size"):
        policy(value, 2)


def test_even_and_a_multiple_are_both_kept() -> None:
    both = policy({"size": 100, "even": True, "multiple_of": 6}, 1, 4)
    assert both == MultipleOf(Fixed(100), 12)


def test_functions(project: str) -> None:
    plain = policy({"target": f"{project}:grow", "every": "1ep", "planned": False})
    assert repr(plain) == "SizeFunction(grow, every='1ep', planned=False)"
    partly = policy({"target": f"{project}:grow", "step": 2})
    assert isinstance(partly, SizeFunction)
    assert partly.function(Timestamp(), 10) == 12
    increase = {"increase": {"target": f"{project}:grow_each_epoch"}, "start": 4}
    capped = policy(increase | {"max_batch_size": 64})
    assert repr(capped) == "IncreaseFunction(grow_each_epoch, 4, 64)"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([8, 16], "example"),
        (True, "example"),
        (8.0, "example"),
        ({}, "example"),
        ({"at_most": 8}, "example"),
        ("8 16", "steps"),
        ("0ep:8 1ep:0", "0"),
        ({"1ep": 8}, "first"),
        ({"0ep": 8, "1": 16}, "unit"),
        ({"0ep": 8, "1ep": True}, "integer"),
        ({"ramp": "duble", "start": 8, "end": 64, "over": "1ep"}, "double"),
        ({"ramp": "cubic", "start": 8, "end": 64, "over": "1ep"}, "stages"),
        ({"ramp": ["double"], "start": 8, "end": 64, "over": "1ep"}, "'double'"),
        ({"ramps": "double", "start": 8, "end": 64, "over": "1ep"}, "'ramp'"),
        ({"ramp": "double", "start": 8, "over": "1ep"}, "'end'"),
        ({"ramp": "double", "start": True, "end": 8, "over": "1ep"}, "integer"),
        ({"ramp": "double", "start": 8, "end": 64, "over": "1ep", "ende": 8}, "'end'"),
        ({"ramp": "double", "start": 8, "end": 64, "over": "1ep", "increment": 8}, "increment"),
        ({"ramp": "double", "start": 64, "end": 8, "over": "1ep"}, "shrink"),
        ({"ramp": "linear", "start": 8, "end": 64, "over": 3}, "unit"),
        ({"size": 8, "duration": "1ep"}, "duration"),
        ({"periods": []}, "least"),
        ({"periods": [{"size": 8}]}, "duration"),
        ({"periods": [8]}, "duration"),
        ({"periods": 8}, "list"),
        ({"periods": [{"duration": "1ep"}]}, "example"),
        ({"periods": [{"duration": "10%", "size": True}]}, "integer"),
        ({"periods": [{"duration": "-1ep", "size": 8}]}, "longer"),
        ({"size": 64, "multiple_of": 16, "at_most": 40}, "write 32"),
        ({"size": 64, "power_of_two": "up", "at_least": 3}, "write 4"),
        (
            {"size": 64, "power_of_two": "up", "multiple_of": 6},
            "power",
        ),
        ({"size": 64, "at_least": 9, "at_most": 8}, "9"),
        ({"size": 64, "even": "yes"}, "boolean"),
        (NOISY | {"multiple_of": 128}, "128"),
        (NOISY | {"at_least": 200}, "200"),
        (NOISY | {"power_of_two": "up"}, "128"),
        (NOISY | {"minimum": 1}, "minimum"),
        (NOISY | {"minimum": 3, "power_of_two": "down"}, "from 2"),
        (NOISY | {"minimum": 6, "multiple_of": 4}, "from 4"),
        (
            {"norm_test": 0.5, "start": 9, "maximum": 64, "multiple_of": 8},
            "from 8",
        ),
        (NOISY | {"norm_test": 0.5}, "norm_test"),
        ({"steps": 8}, "dictionary"),
        ({"seesaw": 8, "increase_instead_of_decay": 8}, "increase_instead_of_decay"),
        ({"size": 8, "sise": 8}, "'size'"),
        ({"size": 8, "monotone": 1}, "boolean"),
        ({"size": 8, "power_of_two": True}, "power_of_two"),
        ({"size": 8, "hysteresis": 0.0}, "hysteresis"),
        ({"size": 8, "wrong": 8}, "at_most"),
        ({"noise_scale": 0.3, "start": 8}, "maximum"),
        ({"target": "no_colon"}, "it is not of the form 'package.module:attribute'"),
        ({"increase": {"target": "a:b"}, "start": 8, "max_batch_size": 4}, "above max_batch_size"),
    ],
)
def test_what_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(value)
