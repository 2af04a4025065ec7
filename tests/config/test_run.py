"""What a whole run file may say."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from stretto.batching import Fixed
from stretto.config.plans import build_plan
from stretto.config.run import RunConfig, parse_run_file
from stretto.errors import ConfigError, PlanError
from stretto.timing import Time

LEAST: dict[str, Any] = {"max_duration": "2ep", "data": {"target": "a:b"}, "batch_size": 8}


def test_three_keys_are_enough() -> None:
    config = RunConfig.parse(LEAST)
    assert config.max_duration == Time("2ep")
    assert config.data.target == "a:b"
    assert config.batch_size == Fixed(8)
    assert (config.seed, config.last_batch, config.micro_batch_size) == (0, None, None)
    assert config.loading.num_workers is None
    assert config.precision == "fp32"
    assert config.evaluate == []
    assert config.checkpoint is None
    assert config.log.every == Time("10ba")
    assert config.log.loggers is None


def test_targets_keep_their_arguments() -> None:
    data = {
        "target": "a:b",
        "num_samples": 5,
        "tokens_per_sample": 2,
        "path": "x",
        "deep": {"y": 1},
    }
    config = RunConfig.parse(LEAST | {"data": data, "model": {"target": "m:M", "layers": None}})
    assert config.data.arguments == {"path": "x", "deep": {"y": 1}}
    assert (config.data.num_samples, config.data.num_tokens) == (5, None)
    assert config.model is not None
    assert config.model.arguments == {"layers": None}


@pytest.mark.parametrize(
    "key",
    ["seed", "schedules", "loading", "stepping", "evaluate", "checkpoint", "log", "folder"],
)
def test_null_is_the_same_as_nothing(key: str) -> None:
    assert RunConfig.parse(LEAST | {key: None}) == RunConfig.parse(LEAST)


def test_a_null_schedule_is_none() -> None:
    assert RunConfig.parse(LEAST | {"schedules": {"lr": None}}).schedules == {}


def test_one_evaluation_or_several() -> None:
    one = RunConfig.parse(LEAST | {"evaluate": {"every": "10%"}})
    several = [{"name": "a", "data": {"target": "c:d"}}, {"name": "b", "every": "1h"}]
    config = RunConfig.parse(LEAST | {"evaluate": several})
    assert [evaluation.name for evaluation in one.evaluate] == ["validation"]
    assert [evaluation.name for evaluation in config.evaluate] == ["a", "b"]
    assert config.evaluate[1].every == Time("1h")


def test_two_evaluations_have_two_names() -> None:
    with pytest.raises(ConfigError, match="validation"):
        RunConfig.parse(LEAST | {"evaluate": [{}, {}]})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"mesh": {"dp": 2, "tp": 2}}, "parallel"),
        ({"mesh": {"dp": 2, "tp": 2}, "parallel": "fsdp"}, "parallel"),
        ({"mesh": {"dp_replicate": 2, "dp_shard": 2}}, "fsdp"),
        ({"mesh": {"tp": 2}, "parallel": {"target": "my.models:spread"}}, "dp"),
        ({"mesh": {"dp": 4}, "world_size": 8}, "world_size"),
        ({"parallel": "fspd"}, "fsdp"),
    ],
    ids=["no function", "only blocks", "no shards", "no data", "other ranks", "a slip"],
)
def test_a_mesh_that_the_file_contradicts(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse(LEAST | changes)
    assert word in caught.value.message.instead


def test_a_plan_is_for_the_ranks_that_share_out_the_samples() -> None:
    mesh = {"mesh": {"dp": 4, "tp": 8}, "parallel": {"target": "my.models:spread"}}
    sizes = {"data": {"target": "my.data:make", "num_samples": 100}, "batch_size": 3}
    config = RunConfig.parse(LEAST | mesh | sizes | {"idle_ranks": True})
    assert build_plan(config).stages[0].world_size == 4
    with pytest.raises(PlanError):
        build_plan(replace(config, idle_ranks=False))


def test_a_config_cannot_be_changed() -> None:
    config = RunConfig.parse(LEAST)
    with pytest.raises(FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]


def test_every_mistake_is_listed_with_its_line() -> None:
    text = (
        "max_duration: 2\n"
        "data: {target: a.b}\n"
        "batch_size: 0\n"
        "seed: x\n"
        "last_batch: kep\n"
        "optimiser: {}\n"
        "stepping:\n"
        "  shifts_labels: 1\n"
        "clip_norm: -1\n"
    )
    with pytest.raises(ConfigError) as caught:
        parse_run_file(text, "run.yaml")
    lines = str(caught.value).splitlines()
    assert all(line.startswith("cannot ") for line in lines)
    assert [line.rpartition("(")[2] for line in lines] == [
        "optimiser in run.yaml, line 6)",
        "max_duration in run.yaml, line 1)",
        "data.target in run.yaml, line 2)",
        "batch_size in run.yaml, line 3)",
        "last_batch in run.yaml, line 5)",
        "clip_norm in run.yaml, line 9)",
        "stepping.shifts_labels in run.yaml, line 8)",
        "seed in run.yaml, line 4)",
    ]


def test_thousands_of_mistakes_are_counted() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse(LEAST | {"log": {"loggers": ["x"] * 500}})
    assert len(caught.value.messages) == 20
    assert caught.value.__notes__ == ["and 480 more"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_duration", "10%", "it is a fraction of itself"),
        ("max_duration", "0ep", "not positive"),
        ("max_duration", True, "begin with a number"),
        ("max_duration", ["2ep"], r"cannot use \['2ep'\].*a time such as 90ep"),
        ("micro_batch_size", "all", "or 'auto'"),
        ("micro_batch_size", 0, "at least 1"),
        ("batch_size", True, "example"),
        ("batch_size", 8.0, "example"),
        ("schedules", {"l r": 1}, "not the name of a hyper-parameter"),
        ("schedules", {"lr@": 1}, "not the name of a hyper-parameter"),
        ("schedules", [1], "mapping"),
        ("scale_schedule", 0, "above 0"),
        ("scale_schedule", "2", "number"),
        ("seed", -1, "from 0"),
        ("seed", 2**63, "from 0"),
        ("evaluate", {"name": "a/b"}, "name"),
        (
            "optimizer",
            {"target": "a:b", "groups": {"g": {"parameters": "("}}},
            "regular expression",
        ),
        ("optimizer", {"target": "a:b", "groups": {"g": {"lr": 1}}}, "parameters"),
        ("loading", {"shuffle": "off"}, "true or false"),
        ("loading", {"shuffle": 1}, "true or false"),
        ("precision", "bf61", "did you mean 'bf16'?"),
        ("stepping", {"loss_weight": "token"}, "did you mean 'tokens'?"),
        ("stepping", {"loss_weight": {"targt": "a:b"}}, "omit 'target'"),
        ("precision", "int4", "write 'fp32' or 'bf16' or 'fp16'"),
        ("log", {"loggers": "wandb"}, "list"),
        ("log", {"every": None, "evry": "1ep"}, "did you mean 'every'?"),
        ("folder", 3, "a text"),
        ("world_size", 0, "at least 1"),
    ],
)
def test_what_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.parse(LEAST | {key: value})
