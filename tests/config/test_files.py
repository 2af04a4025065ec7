"""Run files on the disk: read, written out whole, and whatever else may stand in a file."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stretto.config.run import RunConfig, dump_run_file, parse_run_file, read_run_file
from stretto.errors import ConfigError


def load(name: str) -> ModuleType:
    """Import a file beside this one; tests are no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


strategies = load("strategies")
GOOD = """\
max_duration: 2ep
model: {target: "my.models:Model", layers: 4}
data: {target: "my.data:make", num_samples: 1000}
optimizer:
  target: torch.optim:AdamW
  lr: 3.0e-3
schedules:
  lr:
    Periods:
      - [5%, {Linear: {start: 0.05, end: 1.0}}]
      - [rest, {Cosine: {end: 0.1}}]
batch_size: {DoublingRamp: {start: 8, end: 64, over: 40%}}
evaluate: {every: 10%}
"""


def test_reads_a_file_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    config = read_run_file(path, ["optimizer.lr=1e-4", "schedules.lr.Periods.0.0=1%"])
    assert config.optimizer is not None
    assert config.optimizer.arguments == {"lr": 1e-4}
    where = config.source.where(("batch_size", "DoublingRamp", "end"))
    assert str(where) == "batch_size.DoublingRamp.end in run.yaml, line 12"
    assert str(config.source.where(("optimizer", "lr"))) == "optimizer.lr on the command line"


@given(strategies.CONFIGS)
def test_what_is_written_out_reads_back_the_same(values: dict[str, Any]) -> None:
    config = RunConfig.parse(values)
    text = dump_run_file(config)
    assert parse_run_file(text) == config
    assert dump_run_file(parse_run_file(text)) == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot read .*run.yaml': no such file or directory"),
        (lambda path: path.mkdir(), "not a plain file"),
        (lambda path: path.write_bytes(b"a: \xff"), "utf-8"),
        (lambda path: path.write_bytes(b"x" * 100_001), "bytes"),
        (lambda path: path.write_text(""), "it is empty"),
        (lambda path: path.write_text("- a"), "keys"),
        (lambda path: path.write_text("a"), "keys"),
        (lambda path: path.write_text("null"), "keys"),
    ],
    ids=["absent", "folder", "bytes", "huge", "empty", "list", "word", "null"],
)
def test_files_that_cannot_be_read(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=message):
        read_run_file(tmp_path / "run.yaml")


def test_a_path_with_a_null_byte() -> None:
    with pytest.raises(ConfigError, match="embedded"):
        read_run_file("a\0b")


def check_refusal(text: str) -> None:
    """Only our error may come of a text, in our words."""
    said = ""
    try:
        parse_run_file(text)
    except ConfigError as error:
        said = str(error)
    assert all(line.startswith(("cannot ", "and ")) for line in said.splitlines()), said


@given(st.text())
def test_any_text_fails_only_with_our_error(text: str) -> None:
    check_refusal(text)


@given(st.randoms(use_true_random=False))
def test_damaged_files_fail_only_with_our_error(chance: random.Random) -> None:
    text = list(GOOD)
    for _ in range(chance.randint(1, 6)):
        where = chance.randrange(len(text))
        text[where : where + chance.randint(0, 4)] = chance.choice(
            ["", ":", "- ", "{", "}", "\n", "  ", "null", "1e9", "'", "é", "\t", "[]", "true", "-1"]
        )
    check_refusal("".join(text))


def names(kind: type) -> list[str]:
    return [one.name for one in dataclasses.fields(kind)]


NEARLY = st.one_of(strategies.PLAIN, strategies.BATCH_SIZES, strategies.SCHEDULES)
KEYS = st.sampled_from([*names(RunConfig), "target", "every", "Periods", "Cosine", "x"])


@given(strategies.CONFIGS, st.dictionaries(KEYS, NEARLY | st.dictionaries(KEYS, NEARLY)))
def test_values_in_the_wrong_place_fail_only_with_our_error(
    values: dict[str, Any], others: dict[str, Any]
) -> None:
    check_refusal(yaml.safe_dump(values | others))


NAMES = st.sampled_from(
    [
        "Cosine",
        "Periods",
        "Product",
        "MultiStep",
        "DoublingRamp",
        "AtMost",
        "NoiseScale",
        "Seesaw",
        "PeriodSizes",
        "PiecewiseConstant",
        "PowerOfTwo",
        "IncreaseFunction",
        "LinearRule",
        "target",
    ]
)
ARGUMENTS = st.sampled_from(
    [
        "start",
        "end",
        "over",
        "warmup",
        "policy",
        "size",
        "decay",
        "periods",
        "function",
        "maximum",
        "milestones",
        "target",
        "arguments",
        "schedules",
        "steps",
        "groups",
        "every",
        "name",
    ]
)
NAMED = st.recursive(
    NEARLY | strategies.TIMES | st.just("a:b"),
    lambda inner: (
        st.dictionaries(NAMES, inner, max_size=1)
        | st.dictionaries(ARGUMENTS, inner, max_size=4)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(names(RunConfig)), NAMED, max_size=6))
def test_names_with_any_arguments_fail_only_with_our_error(values: dict[str, Any]) -> None:
    least = {"max_duration": "2ep", "data": {"target": "a:b"}, "batch_size": 8}
    check_refusal(yaml.safe_dump(least | values))
