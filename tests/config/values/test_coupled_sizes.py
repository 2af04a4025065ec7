"""Batch sizes that take over the decay of the learning rate, as a run file says it."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from stretto.batching import DoublingRamp, IncreaseInsteadOfDecay, Pair, Seesaw
from stretto.config import build_plan, dump_run_file, parse_run_file
from stretto.config.plans import build_run
from stretto.config.run import RunConfig
from stretto.config.schema import run_file_schema
from stretto.errors import ConfigError
from stretto.schedules import Cosine

RUN: dict[str, Any] = {
    "max_duration": "2ep",
    "data": {"target": "a:b", "num_samples": 3000},
    "schedules": {"lr": {"cosine": {"warmup": "5%"}}},
}
COSINE = Cosine(warmup="5%")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"seesaw": 16}, Seesaw(COSINE, 16)),
        ({"seesaw": "0ep:8 10%:16"}, Seesaw(COSINE, "0ep:8 10%:16")),
        ({"seesaw": {"0ep": 8, "10%": 16}}, Seesaw(COSINE, "0ep:8 10%:16")),
        ({"seesaw": {"steps": "0ep:8 10%:16"}}, Seesaw(COSINE, "0ep:8 10%:16")),
        (
            {
                "seesaw": {"ramp": "double", "start": 8, "end": 32, "over": "20%"},
                "maximum": 256,
                "reference": 16,
            },
            Seesaw(COSINE, DoublingRamp(8, 32, "20%"), maximum=256, reference=16),
        ),
        (
            {"seesaw": 12, "factor": 4, "smooth": True, "multiple_of": 4, "even": True},
            Seesaw(COSINE, 12, factor=4, smooth=True, multiple_of=12),
        ),
        (
            {"increase_instead_of_decay": 16, "factor": "continuous"},
            IncreaseInsteadOfDecay(COSINE, 16, factor="continuous"),
        ),
    ],
)
def test_ways_to_write_it(value: dict[str, Any], expected: Pair) -> None:
    config = RunConfig.parse({**RUN, "batch_size": value, "micro_batch_size": 6})
    run = build_run(config)
    assert run.policy == expected.policy
    assert run.schedules == {"lr": expected.schedule}
    assert run.rule == expected.rule
    jsonschema.Draft202012Validator(run_file_schema()).validate({**RUN, "batch_size": value})


def test_a_plan_shows_both_sizes_and_learning_rate() -> None:
    got = build_plan(RunConfig.parse({**RUN, "batch_size": {"seesaw": 16, "maximum": 64}}))
    shown = [(stage.size, round(stage.values["lr"].first, 4)) for stage in got.stages]
    assert shown == [(16, 0.0), (32, 0.7071), (64, 0.5)]


def test_other_schedules_multiply_as_ever() -> None:
    schedules = {**RUN["schedules"], "lr@head": 0.5, "weight_decay": {"linear": {}}}
    config = RunConfig.parse({**RUN, "schedules": schedules, "batch_size": {"seesaw": 16}})
    values = build_plan(config).stages[1].values
    assert values["lr@head"].first == pytest.approx(values["lr"].first / 2)
    assert 0 < values["weight_decay"].first < 1


def test_a_stretched_run_stretches_the_pair() -> None:
    value = {"seesaw": {"ramp": "double", "start": 8, "end": 16, "over": "1ep"}}
    config = RunConfig.parse({**RUN, "batch_size": value, "scale_schedule": 2.0})
    pair = Seesaw(COSINE, DoublingRamp(8, 16, "2ep"))
    run = build_run(config)
    assert (run.policy, run.schedules["lr"]) == (pair.policy, pair.schedule)


def test_it_is_written_as_it_was_read() -> None:
    config = RunConfig.parse({**RUN, "batch_size": {"seesaw": 16, "factor": "continuous"}})
    assert parse_run_file(dump_run_file(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedules": {}}, "there is no 'schedules.lr'"),
        ({"rule": {"sqrt": 16}}, "cannot follow the batch size by a 'rule"),
        ({"batch_size": {"seesaw": 0}}, "greater"),
        ({"batch_size": {"sesaw": 16}}, "did you mean 'seesaw'?"),
        ({"batch_size": {"seesaw": 16, "factor": 1}}, "1.01"),
        ({"batch_size": {"seesaw": 16, "factor": "smooth"}}, "continuous"),
        ({"batch_size": {"seesaw": 16, "hysteresis": 2}}, "there is no such key"),
        ({"batch_size": {"seesaw": 16, "maximum": 8}}, "maximum"),
        (
            {"batch_size": {"periods": [{"duration": "rest", "seesaw": 16}]}},
            "pair",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.parse({**RUN, "batch_size": {"seesaw": 16}, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_duration": "100ba"}, "follows batches"),
        ({"schedules": {"lr": {"cosine_restarts": {"t_0": "10%"}}}}, "rises again"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_where_it_stands(
    change: dict[str, Any], message: str
) -> None:
    config = RunConfig.parse({**RUN, "batch_size": {"seesaw": 16}, **change})
    with pytest.raises(ConfigError, match=message):
        build_plan(config)
