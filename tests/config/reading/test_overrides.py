"""`key=value` on the command line."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.config.yaml import Path, Source, apply_overrides, parse_override
from stretto.errors import ConfigError

VALUES: dict[str, Any] = {
    "max_duration": "2ep",
    "optimizer": {"target": "a:b", "lr": 0.1},
    "schedules": {"lr": [{"Cosine": {"end": 0.1}}, {"Linear": {}}]},
    "batch_size": 32,
}


def overridden(*overrides: str) -> Any:
    return apply_overrides(VALUES, Source(), overrides)[0]


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("max_duration=1ep", ("max_duration",), "1ep"),
        ("optimizer.lr=1e-3", ("optimizer", "lr"), 1e-3),
        ("a.0.b=[1, x]", ("a", 0, "b"), [1, "x"]),
        ("a={b: on}", ("a",), {"b": "on"}),
        ("a=b=c", ("a",), "b=c"),
        ("schedules.lr@head=0.5", ("schedules", "lr@head"), 0.5),
        ("a=''", ("a",), ""),
    ],
)
def test_parses(override: str, path: tuple[str | int, ...], value: object) -> None:
    assert parse_override(override) == (path, value)


def test_sets_a_value_without_touching_the_argument() -> None:
    assert overridden("optimizer.lr=1e-3")["optimizer"] == {"target": "a:b", "lr": 1e-3}
    assert VALUES["optimizer"]["lr"] == 0.1


def test_sets_an_item_of_a_list() -> None:
    assert overridden("schedules.lr.0.Cosine.end=0")["schedules"]["lr"][0] == {"Cosine": {"end": 0}}


def test_makes_the_mappings_on_the_way() -> None:
    assert overridden("evaluate.metrics.a.target=x:y")["evaluate"] == {
        "metrics": {"a": {"target": "x:y"}}
    }


@pytest.mark.parametrize("key", ["betas.0", "lr@a.b", "betas.1@a"])
def test_a_key_may_have_a_dot(key: str) -> None:
    assert overridden(f"schedules.{key}=1")["schedules"].get(key) == (None if "a.b" in key else 1)
    there, source = apply_overrides({"schedules": {key: {"Cosine": {}}}}, Source(), [
        f"schedules.{key}.Cosine.end=0.1"])  # fmt: skip
    assert there == {"schedules": {key: {"Cosine": {"end": 0.1}}}}
    assert "command line" in str(source.where(("schedules", key, "Cosine", "end")))
    assert apply_overrides(there, Source(), [f"schedules.{key}=null"])[0] == {"schedules": {}}


def test_null_takes_a_key_away() -> None:
    assert "lr" not in overridden("optimizer.lr=null")["optimizer"]
    assert overridden("seed=null") == VALUES


def test_the_last_one_counts() -> None:
    assert overridden("batch_size=1", "batch_size=2")["batch_size"] == 2


def test_says_where_a_value_came_from() -> None:
    lines: dict[Path, int] = {("optimizer",): 3, ("optimizer", "lr"): 3, ("batch_size",): 5}
    _, source = apply_overrides(VALUES, Source("run.yaml", lines), ["optimizer.lr=2"])
    assert str(source.where(("optimizer", "lr"))) == "optimizer.lr on the command line"
    assert str(source.where(("batch_size", "x"))) == "batch_size.x in run.yaml, line 5"
    assert str(source.where(("seed",))) == "seed in run.yaml"
    assert str(source.where(())) == "run.yaml"


def test_a_replaced_mapping_forgets_its_lines() -> None:
    lines: dict[Path, int] = {("optimizer",): 3, ("optimizer", "lr"): 4}
    _, source = apply_overrides(VALUES, Source("run.yaml", lines), ["optimizer={target: c:d}"])
    assert str(source.where(("optimizer", "lr"))) == "optimizer.lr on the command line"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch_size", "key=value"),
        ("=1", "key=value"),
        ("a..b=1", "key=value"),
        ("lr =1", "key=value"),
        ("batch_size=", "key=value"),
        ("batch_size.at_most=3", "batch_size has no keys"),
        ("schedules.lr.2.Cosine={}", "schedules.lr is a list of 2"),
        ("schedules.lr.end=1", "schedules.lr is a list of 2"),
        ("batch_size=[1", "expected"),
    ],
)
def test_what_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        overridden(override)
