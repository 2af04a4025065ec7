"""Ranks agree, and none waits for another that has failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import FitError
from stretto.memory.finding.agreement import Agreement


def test_one_rank() -> None:
    assert Agreement().minimum(lambda: 5) == 5
    assert Agreement().all(lambda: True)
    with pytest.raises(ValueError, match="invalid"):
        Agreement().minimum(lambda: int("x"))


def test_the_least_of_all(on_ranks: Any) -> None:
    assert on_ranks([lambda t: t.minimum(lambda: 7), lambda t: t.minimum(lambda: 5)]) == [5, 5]
    assert on_ranks([lambda t: t.all(lambda: True), lambda t: t.all(lambda: False)]) == [False] * 2


def test_an_error_on_one_rank_ends_all(on_ranks: Any) -> None:
    def fail() -> int:
        raise ValueError("a mistake in the model")

    first, second = on_ranks([lambda t: t.minimum(lambda: 7), lambda t: t.minimum(fail)])
    assert isinstance(first, FitError)
    assert "another rank has failed" in str(first)
    assert isinstance(second, ValueError)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_processes_with_different_memory_find_one_answer(
    tmp_path: Path, launch_ranks: Callable[..., Any]
) -> None:
    launch_ranks(Path(__file__).with_name("distributed_find.py"), tmp_path, ranks=3)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for one in seen:
        assert one == {"try": [11, 12], "halve": [8, 16], "same": True, "weights": one["weights"]}
    assert seen[0]["weights"] == seen[1]["weights"] == seen[2]["weights"]
