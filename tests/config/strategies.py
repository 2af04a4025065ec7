"""Run files as hypothesis makes them up: right ones, nearly right ones, and noise."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

TIMES = st.sampled_from(["1ep", "0.5ep", "10%", "1/3dur", "500ba", "1_000sp", "2Btok", "1h30m"])
LENGTHS = st.sampled_from(["1ep", "2ep", "1_000sp", "2Btok", "36h"])
FACTORS = st.floats(0, 10, allow_nan=False) | st.integers(0, 3)
SIZES = st.integers(1, 10_000)
# Words that YAML 1.1 or 1.2 would take for something else than the text that they are.
WORDS = st.sampled_from(
    [
        "a",
        "on",
        "no",
        "true",
        "null",
        "~",
        "1e3",
        "1_0",
        "010",
        "1:30",
        "",
        " x",
        "x: y",
        "# z",
        "é",
    ]
) | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def _made(name: str, required: Any = None, **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    """A value with a name: `{name: {argument: value}}`."""
    arguments = st.fixed_dictionaries(required or {}, optional=optional)
    return st.fixed_dictionaries({name: arguments})


_CURVES = st.one_of(
    _made("Cosine", end=FACTORS),
    _made("Linear", {"start": FACTORS, "end": FACTORS}),
    _made("StepDecay", {"every": TIMES}, gamma=FACTORS),
    _made("Constant", warmup=TIMES),
    _made("from_torch", {"factory": st.just({"target": "my.module:Decay"})}, every=TIMES),
    st.fixed_dictionaries({"target": st.just("my.module:curve")}, optional={"width": PLAIN}),
)
_PERIODS = st.builds(
    lambda first, rest, until, duration: {"Periods": [[until + duration, first], ["rest", rest]]},
    _CURVES,
    _CURVES,
    st.sampled_from(["", "until "]),
    TIMES,
) | st.builds(
    lambda first, rest, word, duration: {
        "Periods": {"a": [duration, first], "b": {"duration": "rest", word: rest}}
    },
    _CURVES,
    _CURVES,
    st.sampled_from(["schedule", "scheduler"]),
    TIMES,
)
_SEVERAL = st.lists(_CURVES, min_size=1, max_size=3)
_COMBINED = st.one_of(
    st.fixed_dictionaries({"Sum": _SEVERAL}),
    _made("Floor", {"schedule": _CURVES | _PERIODS, "least": FACTORS}),
)
SCHEDULES = st.one_of(FACTORS, _CURVES, _PERIODS, _SEVERAL, _COMBINED)
_TOKENS = st.sampled_from(["64Ktok", "1_000tok", "2e4tok", "4Mtok"])
_POLICIES = st.one_of(
    SIZES,
    _TOKENS,
    st.just("0tok:768 250Btok:1536"),
    st.just("0tok:16Ktok 2Mtok:64Ktok"),
    st.just({"0ep": "16Ktok", "10%": "64Ktok"}),
    _made("LinearRamp", {"start": _TOKENS, "end": st.just("4Mtok"), "over": TIMES}),
    _made("NoiseScale", {"start": _TOKENS, "maximum": st.just("4Mtok")}),
    _made("StagedRamp", {"sizes": st.just(["8Ktok", "64Ktok"]), "over": TIMES}),
    st.just({"0ep": 8, "10%": 16}),
    _made(
        "DoublingRamp",
        {"start": st.integers(1, 64), "end": SIZES.map(lambda n: n + 64), "over": TIMES},
    ),
    st.fixed_dictionaries({"target": st.just("my.module:grow")}, optional={"every": TIMES}),
)


def is_of_one_unit(value: object) -> bool:
    """Return whether no size is in tokens."""
    return "Ktok" not in str(value) and "000tok" not in str(value) and "4tok" not in str(value)


BATCH_SIZES = st.recursive(
    _POLICIES,
    lambda inner: st.one_of(
        _made("AtMost", {"policy": inner, "size": st.just(16_384)}).filter(is_of_one_unit),
        _made("AtMost", {"policy": _TOKENS, "size": st.just("16Ktok")}),
        _made("Monotone", {"policy": inner}),
        st.fixed_dictionaries({"PowerOfTwo": inner}),
    ),
    max_leaves=2,
)
_TARGETS = st.builds(
    lambda arguments: arguments | {"target": "my.module:make"}, st.dictionaries(WORDS, PLAIN)
)
CONFIGS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "max_duration": LENGTHS,
        "data": st.fixed_dictionaries(
            {"target": st.just("my.data:make")}, optional={"num_samples": SIZES, "path": PLAIN}
        ),
        "batch_size": BATCH_SIZES,
    },
    optional={
        "model": _TARGETS,
        "optimizer": st.fixed_dictionaries({"target": st.just("t:A")}, optional={"lr": FACTORS}),
        "schedules": st.dictionaries(st.sampled_from(["lr", "lr@head", "momentum"]), SCHEDULES),
        "micro_batch_size": st.sampled_from([1, 2, 8, 64]),
        "last_batch": st.sampled_from(["keep", "drop", "carry"]),
        "rule": st.sampled_from([{"linear": 8}, {"sqrt": 64}, {"sqrt": "4Mtok"}]),
        "evaluate": st.fixed_dictionaries({}, optional={"every": TIMES, "name": st.just("v-1")}),
        "checkpoint": st.fixed_dictionaries({}, optional={"every": TIMES, "keep": SIZES}),
        "log": st.fixed_dictionaries({}, optional={"every": TIMES, "loggers": st.just(["wandb"])}),
        "clip_norm": st.just(1.5),
        "folder": WORDS.filter(lambda text: text and "\0" not in text),
        "seed": st.integers(0, 2**63 - 1),
        "scale_schedule": st.floats(1e-3, 1e3),
    },
)
