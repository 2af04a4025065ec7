"""The schema of run files: what editors accept, and that it agrees with the reader."""

from __future__ import annotations

import copy
import json
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.config.run import RunConfig, run_file_schema
from stretto.config.yaml import parse_yaml
from stretto.timing import Time

SCHEMA = run_file_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
LEAST: dict[str, Any] = {"max_duration": "2ep", "data": {"target": "a:b"}, "batch_size": 8}


def packaged(name: str) -> Any:
    text = (files("stretto.examples") / name).read_text("utf-8")
    return parse_yaml(text, name)[0]


def test_is_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


@pytest.mark.parametrize("name", ["default.yaml", "digits.yaml"])
def test_accepts_the_packaged_files(name: str) -> None:
    VALIDATOR.validate(packaged(name))
    RunConfig.parse(packaged(name))


@pytest.mark.parametrize(
    "change",
    [
        {"evaluate": [{"name": "a"}, {"name": "b", "data": {"target": "c:d"}}]},
        {"optimizer": {"target": "a:b", "groups": {"g": {"parameters": "x", "lr": 1}}}},
        {"evaluate": {"metrics": {"m": {"target": "a:b", "k": 1}}}},
        {"loading": {"collate_fn": {"target": "a:b"}}, "stepping": {"rank_timeout": "10m"}},
        {"batch_size": "64Ktok", "rule": {"sqrt": "4Mtok"}},
        {"batch_size": {"0ep": "16Ktok", "1ep": "64Ktok"}},
        {"batch_size": {"AtMost": {"policy": "64Ktok", "size": "32Ktok"}}},
        {"batch_size": {"StagedRamp": {"sizes": ["16Ktok", "64Ktok"], "over": "10%"}}},
        {"mesh": {"dp": 2}, "log": {"loggers": ["wandb", {"target": "a:b"}]}, "callbacks": []},
    ],
)
def test_accepts_what_the_reader_does(change: dict[str, Any]) -> None:
    RunConfig.parse(LEAST | change)
    VALIDATOR.validate(LEAST | change)


@pytest.mark.parametrize(
    "change",
    [
        {"max_duration": 90},
        {"max_duration": "90 epochs"},
        {"max_duration": None},
        {"data": {"target": 3}},
        {"data": {"target": "a.b"}},
        {"batch_size": 0},
        {"batch_size": {"DoublingRamp": {"start": 8}}},
        {"batch_size": {"DoublingRamp": {"start": "8Kba", "end": "64Ktok", "over": "1ep"}}},
        {"batch_size": {"CubicRamp": {"start": 8, "end": 64, "over": "1ep"}}},
        {"batch_size": {"tomorrow": 8}},
        {"schedules": {"lr": {"Cosin": {}}}},
        {"schedules": {"lr": {"Cosine": {}, "Linear": {}}}},
        {"schedules": {"lr": {"Cosine": {"warmup": 5}}}},
        {"optimiser": {}},
        {"last_batch": "kep"},
        {"precision": "int4"},
        {"log": {"loggers": ["tensorbord"]}},
    ],
)
def test_rejects_what_is_wrong(change: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid({**LEAST, **change})


@given(st.from_regex(r"[0-9]{1,3}(\.[0-9])?(e[0-9])?([KMBT]?(ep|ba|sp|tok|dur|sec)|%|[dhms])"))
def test_the_pattern_of_times_lets_times_through(text: str) -> None:
    try:
        Time(text)
    except ValueError:
        return
    VALIDATOR.validate(LEAST | {"log": {"every": text}} | {"max_duration": "1ep"})


def test_every_key_is_described() -> None:
    def undescribed(part: dict[str, Any], name: str) -> list[str]:
        properties = part.get("properties", {})
        plain = (
            "policy",
            "size",
            "factor",
            "rounding",
        )  # of a wrapper, whose description says what they are
        return [
            f"{name}.{key}"
            for key, value in properties.items()
            if "description" not in value and key not in plain
        ]

    missing = undescribed(SCHEMA, "run")
    for name, part in SCHEMA["$defs"].items():
        missing += undescribed(part, name)
    assert missing == []


def test_has_no_noise_for_editors() -> None:
    text = json.dumps(copy.deepcopy(SCHEMA))
    assert '"null"' not in text
    assert '"title"' not in text.replace('"title": "stretto run file"', "")
