"""The exception tree: drawn in its docstring, each leaf also a builtin."""

from __future__ import annotations

import re

import pytest

from stretto import errors
from stretto.errors import StrettoError, cannot, shown

LEAVES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, StrettoError) and value is not StrettoError
]


@pytest.mark.parametrize("error", LEAVES)
def test_each_leaf_is_drawn_with_its_builtin(error: type[StrettoError]) -> None:
    assert error.__bases__[0] is StrettoError
    builtin = error.__bases__[1].__name__
    assert re.search(rf"── {error.__name__} +\({builtin}\)", errors.__doc__ or "")


def test_nothing_else_is_drawn() -> None:
    drawn = re.findall(r"── (\w+)", errors.__doc__ or "")
    assert drawn == [error.__name__ for error in LEAVES]


def test_a_message_has_one_form() -> None:
    said = cannot("read 'x'", why="it is odd", instead="write 'y'")
    assert said == "cannot read 'x': it is odd; write 'y'"
    assert cannot("read 'x'", why="a", instead="b", where="run.yaml").endswith("; b (run.yaml)")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("3epoch", "'3epoch'"),
        (None, "None"),
        ([1, 2], "[1, 2]"),
        (10**5000, "a very large int"),
        ("x" * 10**6, "'" + "x" * 76 + "..."),
        (list(range(1000)), str(list(range(1000)))[:77] + "..."),
    ],
    ids=["text", "none", "list", "huge", "long text", "long list"],
)
def test_values_in_messages_are_short(value: object, text: str) -> None:
    assert shown(value) == text
    assert len(shown(value)) <= 80
