"""Every value that a run file can have is written out as what it is, by generation from its schema.

The schema is made from the signatures, so a new class or argument is tested without a line here.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from stretto.batching import NO_SIGNALS, BatchSizePolicy, Pair
from stretto.config.plans import imported
from stretto.config.run import RunConfig, dump_run_file, parse_run_file, run_file_schema
from stretto.config.targets import TARGET_PATTERN
from stretto.errors import StrettoError
from stretto.schedules import Schedule
from stretto.timing import Horizon, Timestamp, advance

SCHEMA = run_file_schema()
PARTS: dict[str, Any] = SCHEMA["$defs"]
LEAST: dict[str, Any] = {"max_duration": "2ep", "data": {"num_samples": 100}, "batch_size": 8}
TIMES = ["5%", "1ep", "0.5ep", "6ba", "40sp", "25%", "2_000tok"]
TEXTS = [
    "8",
    "64tok",
    "0ep:8 1ep:16",
    "0:8 100:16",
    "0sp:16tok 40sp:64tok",
    "validation/loss",
    "rest",
    "1e3",
]
RUN = Horizon("2ep", dataset_num_samples=100, tokens_per_sample=2, batch_sizes=8)


def told(*given: Any, **arguments: Any) -> float:
    """Stand in for any function of a user: a small number that depends on what it is given."""
    sizes = [one for one in given if isinstance(one, (int, float)) and one > 1]
    return 1 + len(arguments) + (3 if len(given) > 1 else sum(sizes) if sizes else 0)


@st.composite
def values(draw: st.DrawFn, schema: dict[str, Any], depth: int = 3) -> Any:  # noqa: C901, PLR0912  kinds
    """Draw a value that a schema describes; what is in it is shallow."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name == "Time":
            return draw(st.sampled_from(TIMES))
        if name in ("Target", "Function"):
            arguments = st.dictionaries(st.sampled_from(["a", "on"]), st.integers(0, 3), max_size=1)
            return {"target": f"{__name__}:told", **draw(arguments)}
        return draw(values(PARTS[name], depth - 1))
    if "anyOf" in schema:
        forms = [one for one in schema["anyOf"] if depth > 0 or "properties" not in one]
        return draw(values(draw(st.sampled_from(forms or schema["anyOf"])), depth))
    if "enum" in schema or "const" in schema:
        return draw(st.sampled_from(schema.get("enum") or [schema["const"]]))
    kind = schema.get("type")
    if schema.get("pattern") == TARGET_PATTERN:
        return f"{__name__}:told"
    if kind == "object" and schema.get("maxProperties") == 1:
        name = draw(st.sampled_from([*schema["properties"]]))
        return {name: draw(values(schema["properties"][name], depth))}
    if kind == "object" and "properties" in schema:
        required, found = schema.get("required", []), {}
        for name, one in schema["properties"].items():
            if name in required or draw(st.integers(0, 2)) == 0:
                found[name] = draw(values(one, depth))
        return found
    if kind == "object":
        keys = ["lr", "momentum", "a"] if "propertyNames" not in schema else ["0ep", "10%", "1ep"]
        count = draw(st.integers(1, len(keys)))
        return {key: draw(values(schema["additionalProperties"], depth)) for key in keys[:count]}
    if kind == "array" and "prefixItems" in schema:
        return [draw(values(one, depth)) for one in schema["prefixItems"]]
    if kind == "array":
        return [draw(values(schema["items"], depth)) for _ in range(draw(st.integers(1, 3)))]
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        "boolean": st.booleans(),
        "integer": st.sampled_from([one for one in (0, 1, 2, 4, 8, 32) if one >= least]),
        "number": st.sampled_from([0.5, 0.1, 2, 1.5, 0]),
        "string": st.sampled_from(schema.get("examples", TEXTS)),
    }
    return draw(plain.get(kind, st.sampled_from([4, "a"])))


def evaluated(value: Any) -> object:
    """Return what a value does on a run, or how it refuses that."""
    try:
        if isinstance(value, dict):
            return {name: evaluated(one) for name, one in value.items()}
        if isinstance(value, Pair):
            return evaluated(value.policy), evaluated(value.schedule)
        if isinstance(value, Schedule):
            factor = value.bind(RUN)
            return [factor(Timestamp(0, at, 8 * at, 16 * at, at, 8 * at)) for at in range(12)]
        if isinstance(value, BatchSizePolicy):
            bound, now = value.bind(RUN.with_batch_sizes(None)), Timestamp()
            state, found = bound.start, []
            for _ in range(12):
                size, state = bound.decide(now, state, NO_SIGNALS)
                found.append(size)
                now = advance(RUN, now, 8)
            return found
        return value(24) if callable(value) else None
    except StrettoError as error:
        return str(error)


CLASSES = [
    (part, name)
    for part in ("Schedule", "BatchSize", "Rule")
    for form in PARTS[part]["anyOf"]
    for name in form.get("properties", ())
]
KEYS = {"Schedule": "schedules", "BatchSize": "batch_size", "Rule": "rule"}


def check(change: dict[str, Any]) -> RunConfig:
    """Write out a run file and read it again, as it is and with its functions imported."""
    try:
        config = RunConfig.parse(LEAST | change)
    except StrettoError:  # numbers that do not fit each other
        reject()
    again = parse_run_file(dump_run_file(config))
    assert again == config
    [key] = change
    try:
        first, second = (imported(one, getattr(one, key), key) for one in (config, again))
    except StrettoError:  # a maximum that only memory decides
        return config
    assert evaluated(first) == evaluated(second)
    return config


@pytest.mark.parametrize(("part", "name"), CLASSES, ids=str)
@settings(max_examples=6, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_every_class_is_written_as_itself(part: str, name: str, data: st.DataObject) -> None:
    forms = next(
        form["properties"][name]
        for form in PARTS[part]["anyOf"]
        if name in form.get("properties", ())
    )
    value = {name: data.draw(values(forms))}
    check({KEYS[part]: {"lr": value} if part == "Schedule" else value})


# A mesh is that of `world_size` and `parallel`, so one alone is refused.
@pytest.mark.parametrize("key", [key for key in SCHEMA["properties"] if key != "mesh"])
@settings(max_examples=6, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_every_setting_is_written_as_it_was_read(key: str, data: st.DataObject) -> None:
    check({key: data.draw(values(SCHEMA["properties"][key]))})
