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

from stretto.config.run import RunConfig
from stretto.config.schema import field_texts, run_file_schema
from stretto.config.yaml import parse_yaml
from stretto.timing import Time

SCHEMA = run_file_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
LEAST: dict[str, Any] = {"max_duration": "2ep", "data": {"target": "a:b"}, "batch_size": 8}


def packaged(name: str) -> Any:
    text = (files("stretto.examples") / name).read_text("utf-8")
    return parse_yaml(text, name).value


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
        {"batch_size": "0tok:768 250Btok:1536"},
        {"batch_size": {"0ep": 8, "10%": 16}},
        {"batch_size": {"ramp": "linear", "start": 8, "end": 64, "over": "1h30m"}},
        {"batch_size": {"ramp": "double", "start": 8, "end": 64, "over": "1/3dur", "at_most": 32}},
        {"batch_size": {"ramp": "stages", "sizes": [8, 16], "over": "1.5e3tok"}},
        {
            "batch_size": {
                "periods": [{"duration": "10%", "size": 8}, {"duration": "rest", "size": 9}]
            }
        },
        {"batch_size": {"target": "a.b:c", "width": 3}},
        {"batch_size": {"increase": {"target": "a:b"}, "start": 8, "max_batch_size": 64}},
        {"schedules": {"lr": 0.5, "lr@head": [0.5, {"cosine": {"warmup": "5%"}}]}},
        {"schedules": {"lr": {"periods": [{"duration": "rest", "wsd": {"decay": "20%"}}]}}},
        {"schedules": {"lr": {"target": "a:b", "width": 3}}},
        {"evaluate": [{"name": "a"}, {"name": "b", "data": {"target": "c:d"}}]},
        {"optimizer": {"target": "a:b", "groups": {"g": {"parameters": "x", "lr": 1}}}},
        {"rule": {"sqrt": 64}},
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
        {"data": {}},
        {"data": {"target": "a.b"}},
        {"batch_size": 0},
        {"batch_size": {"ramp": "double", "start": 8}},
        {"batch_size": {"ramp": "cubic", "start": 8, "end": 64, "over": "1ep"}},
        {"batch_size": {"size": 8, "sizes": 9}},
        {"batch_size": {"tomorrow": 8}},
        {"schedules": {"lr": {"cosin": {}}}},
        {"schedules": {"lr": {"cosine": {}, "linear": {}}}},
        {"schedules": {"lr": {"cosine": {"warmup": 5}}}},
        {"optimiser": {}},
        {"last_batch": "kep"},
        {"precision": "int4"},
        {"log": {"loggers": ["tensorbord"]}},
        {"seed": -1},
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
        return [f"{name}.{key}" for key, value in properties.items() if "description" not in value]

    missing = undescribed(SCHEMA, "run")
    for name, part in SCHEMA["$defs"].items():
        if not name.startswith("Schedule"):  # what a schedule is called says what its key means
            missing += undescribed(part, name)
    assert missing == []


def test_texts_come_from_under_the_fields() -> None:
    assert field_texts(RunConfig)["max_duration"] == "The length of the run, in any unit but `dur`."


def test_has_no_noise_for_editors() -> None:
    text = json.dumps(copy.deepcopy(SCHEMA))
    assert '"null"' not in text
    assert '"title"' not in text.replace('"title": "stretto run file"', "")
