"""Messages about wrong values: in our own words, at places that the file has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from stretto.config.run import RunConfig, parse_run_file
from stretto.errors import ConfigError, StrettoError

FILES = yaml.safe_load_all("""
max_duration: 2ep
data: {target: "a:b", num_samples: 100}
optimizer: {target: "a:b", lr: 0.1, groups: {g: {parameters: "x", lr: 0.2}}}
schedules:
  lr: {periods: [{duration: 5%, linear: {start: 0, end: 1}}, {duration: rest, cosine: {end: 0.1}}]}
  weight_decay: [0.5, {multi_step: {milestones: [50%, 75%], gamma: 0.1}}]
  momentum: {wsd: {warmup: 5%, decay: 20%, shape: cosine}}
  betas: {target: "a:b"}
batch_size: {ramp: double, start: 8, end: 64, over: 40%, at_most: 32, hysteresis: 1.5}
micro_batch_size: auto
rule: {sqrt: 64}
clip_norm: 1.0
precision: bf16
stepping: {measure_noise: 10}
loading: {num_workers: 2, shuffle: true}
evaluate: [{every: 10%, name: validation, metrics: {m: {target: "a:b"}}}]
checkpoint: {every: 1ep, keep: 2, monitor: validation/loss, mode: min}
log: {every: 512sp, flush: 10s, loggers: [tensorboard]}
callbacks: [{target: "a:b"}]
---
max_duration: 2ep
data: {target: "a:b"}
batch_size: {periods: [{duration: 10%, size: 8}, {duration: rest, steps: {0ep: 8, 1ep: 16}}]}
---
max_duration: 2ep
data: {target: "a:b"}
schedules: {lr: {cosine: {}}}
batch_size: {seesaw: {ramp: linear, start: 8, end: 64, over: 10%}, factor: continuous}
---
max_duration: 2ep
data: {target: "a:b"}
batch_size: {noise_scale: 0.3, start: 8, maximum: 64, minimum: 4, power_of_two: down}
""")
DOCUMENTS = list(FILES)
WRONG: tuple[Any, ...] = (-1, 1.5, True, "x", "-1ep", "rest", [], [[1]], {}, {"x": 1})
LEAK = re.compile(
    r"pydantic|function-|\w\[|none_required|[A-Z]\w+(Sizes|Curve|Section)\b"
    r"|<(?!time|size)\w+>|\b(int|str|float|bool|NoneType)\b",
    re.IGNORECASE,
)
"""What pydantic says, and how it calls the ways in which a value may be written."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path in a document."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The document with another value at a path."""
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = replaced(value[path[0]], path[1:], new)
    return copied


@pytest.mark.parametrize("document", DOCUMENTS, ids=["schedules", "periods", "seesaw", "noise"])
def test_no_message_has_the_words_of_the_validation_library(document: dict[str, Any]) -> None:
    RunConfig.parse(document)
    refused = 0
    found: list[Any] = []
    for path in places(document):
        for wrong in WRONG:
            try:
                RunConfig.parse(replaced(document, path, wrong))
            except StrettoError as error:
                refused += 1
                found += [(path, wrong, str(error))] if LEAK.search(str(error)) else []
    assert refused > 80
    assert found == []


def test_a_duration_of_minus_one_is_told_to_be_the_rest() -> None:
    text = (
        "max_duration: 2ep\ndata: {target: 'a:b'}\nbatch_size: {periods: [{duration: -1, size: 8}]}"
    )
    with pytest.raises(ConfigError, match="duration"):
        parse_run_file(text)
