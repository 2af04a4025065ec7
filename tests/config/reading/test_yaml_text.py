"""YAML as run files use it: what each word says, and that any text ends quickly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.config.yaml import MAX_BYTES, parse_yaml
from stretto.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1_000", 1000),
        ("-7", -7),
        ("1e3", 1000.0),
        ("3.0e-4", 3e-4),
        (".5", 0.5),
        ("5.", 5.0),
        ("1:30", "1:30"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("2026-01-01", "2026-01-01"),
        (".inf", ".inf"),
        ("nan", "nan"),
        ("1e999", "1e999"),
        ("1__0", "1__0"),
        ("9" * 101, 10**101 - 1),
    ],
)
def test_plain_words(word: str, value: object) -> None:
    (found,) = parse_yaml(f"a: {word}", "f")[0].values()  # type: ignore[union-attr]
    assert found == value
    assert type(found) is type(value)


def test_quoted_words_are_texts() -> None:
    assert parse_yaml("a: '5'\nb: \"true\"\nc: |\n  7\n", "f")[0] == {
        "a": "5",
        "b": "true",
        "c": "7\n",
    }


def test_keys_are_texts_whatever_they_look_like() -> None:
    assert parse_yaml("on: 1\n5: 2\n0ep: 3\nnull: 4\n", "f")[0] == {
        "on": 1,
        "5": 2,
        "0ep": 3,
        "null": 4,
    }


def test_lines_of_keys_and_items() -> None:
    value, source = parse_yaml("a: 1\nb:\n  - x\n  - c: 2\n", "f")
    assert value == {"a": 1, "b": ["x", {"c": 2}]}
    assert source.lines == {("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "c"): 4}


def test_an_alias_is_a_copy() -> None:
    value = parse_yaml("a: &x {k: [1]}\nb: *x\n", "f")[0]
    assert isinstance(value, dict)
    assert value["a"] == value["b"]
    assert value["a"]["k"] is not value["b"]["k"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "twice"),
        ("a: 1\na: 2", "line 2, column 1"),
        ("a: !!python/object:os.system x", "object"),
        ("a: *x", "alias"),
        ("a: &x [*x]", "deeper"),
        ("? [a]\n: 1", "key"),
        ("a: 1\n---\nb: 2", "document"),
        ("", "empty"),
        ("a: b: c", "line 1, column 5"),
        ("a: [1", "line 1"),
        ("a: [", "line 1"),
        ("a: {0ep:8}", "'0ep: 8'"),
        ("a: {target:b.c:d}", "'target: b.c:d'"),
        ('a: "\\p"', "escape"),
        ("a: 1\n...\nb: 2", "document"),
        ("a: 'x", "line 1"),
        ("\ta: 1", "token"),
        ("a: \x00", "character"),
        ('a: "\\ud800"', "surrogate"),
        ("a:\n  b: 1\n c: 2", "line 3"),
        ("*", "alphabetic"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "f")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{key}: &{key} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, key in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "10000"),
        ("[" * MAX_BYTES, "deeper"),
        ("- " * (MAX_BYTES // 2), "deeper"),
        ("[a, " * (MAX_BYTES // 4), "deeper"),
        ("- a\n" * (MAX_BYTES // 4), "10000"),
        ("x" * (MAX_BYTES + 1), "bytes"),
    ],
    ids=["billion laughs", "brackets", "dashes", "nested lists", "long list", "long file"],
)
def test_hostile_texts_are_bounded(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "f")


# Letters that mean something to YAML, so that random texts get further than the first word.
YAML_TEXT = st.text(st.sampled_from("ab:1-[]{}&*!|>'\"%@#?,<~ \n\t\\.e_0\ud800é\x85\ufeff"))


@given(st.one_of(st.text(), YAML_TEXT))
def test_any_text_is_read_or_refused(text: str) -> None:
    said = "cannot read f: "
    try:
        parse_yaml(text, "f")
    except ConfigError as error:
        said = str(error)
    assert said.startswith("cannot read f: ")
