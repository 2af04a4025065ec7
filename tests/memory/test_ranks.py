"""Ranks agree, and none waits for another that has failed."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.errors import FitError
from stretto.memory.ranks import Together


def test_one_rank() -> None:
    assert Together().least(lambda: 5) == 5
    assert Together().all(lambda: True)
    with pytest.raises(ValueError, match="invalid literal"):
        Together().least(lambda: int("x"))


def test_the_least_of_all(on_ranks: Any) -> None:
    assert on_ranks([lambda t: t.least(lambda: 7), lambda t: t.least(lambda: 5)]) == [5, 5]
    assert on_ranks([lambda t: t.all(lambda: True), lambda t: t.all(lambda: False)]) == [False] * 2


def test_an_error_on_one_rank_ends_all(on_ranks: Any) -> None:
    def fail() -> int:
        raise ValueError("a mistake in the model")

    first, second = on_ranks([lambda t: t.least(lambda: 7), lambda t: t.least(fail)])
    assert isinstance(first, FitError)
    assert "another rank has failed" in str(first)
    assert isinstance(second, ValueError)
