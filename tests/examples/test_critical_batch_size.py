from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from examples import critical_batch_size as example
from examples.critical_batch_size import Row, bounds, compare, crossing, weights

SCRIPT = Path(example.__file__)


def rows(*excess: tuple[float, float]) -> list[Row]:
    return [Row(8 * 2**n, (), one, reach) for n, (one, reach) in enumerate(excess)]


def test_the_crossing_is_interpolated_in_the_logarithm_of_the_size() -> None:
    found = rows((0.0, 0.0), (0.0, 0.001), (0.005, 0.001), (0.025, 0.001))
    assert crossing(found, 0.01) == pytest.approx(32 * 2**0.25)
    assert bounds(found, 0.01) == (32, 64)
    assert crossing(found[:3], 0.01) is None
    assert crossing(rows((0.0, 0.0), (math.inf, math.inf)), 0.01) == 8


def test_a_single_order_decides_nothing() -> None:
    assert bounds(rows((0.0, 0.0), (0.5, math.inf)), 0.01) == (8, None)


def test_branches_start_equal_and_differ_by_size_only(monkeypatch: pytest.MonkeyPatch) -> None:
    start, seen = weights(None, 16), list[tuple[int, int, float]]()

    def train(size: int, samples: int, seed: int, start: Any, *, factor: float) -> float:
        seen.append((size, seed, factor))
        return 2.0 + 0.01 * seed + 0.001 * size

    monkeypatch.setattr(example, "train", train)
    found = compare([8, 32], 128, 2, start)
    assert seen == [(8, 0, 1.0), (8, 1, 1.0), (32, 0, 2.0), (32, 1, 2.0)]
    assert found[1].excess == pytest.approx(0.024)
    assert found[1].reach == pytest.approx(0, abs=1e-9)
    for sizes, samples in (([8], 128), ([32, 8], 128), ([8, 64], 128)):
        with pytest.raises(ValueError, match=r"sizes|samples"):
            compare(sizes, samples, 1, start)


def test_it_runs_as_a_script(run_python: Callable[..., Any]) -> None:
    few = ("--sizes", "8,16", "--samples", "64", "--warmup", "64", "--seeds", "2")
    done = run_python(str(SCRIPT), *few)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["8", "16"]
    assert lines[-1].startswith("critical batch size: ")
