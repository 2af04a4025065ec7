"""An answer as a table and as a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from stretto.errors import ConfigError, FitError
from stretto.memory import Answer, find_batch_size
from stretto.memory.finding.result import Cost
from stretto.memory.measuring.limits import MemoryLimit
from stretto.report.memory import draw_memory, memory_areas, memory_table
from stretto.runtime import SupervisedStep


class FakePeak(NamedTuple):
    by_category: dict[str, int]


class FakeEstimator:
    def guess(self, limit: int) -> None:
        """Any size costs nothing."""

    def peak(self, size: int) -> int:
        return 1000 + 10 * size

    def at(self, size: int) -> FakePeak:
        return FakePeak({"parameters": 600, "buffers": 400, "activations": 10 * size})


def answer(
    *, estimator: Any = None, peak: int | None = 2000, size: int = 100, extra: int = 0
) -> Answer:
    return Answer(
        size=size,
        certainty="exact" if estimator else "tried",
        too_large=size + 1,
        limit=MemoryLimit(2050, "as stated"),
        reserve=50,
        peak=peak,
        cost=Cost(),
        peaks={} if peak is None else {1: 1010, size: peak, size + 1: 2010},
        estimator=estimator,
        needs=None if estimator is None else lambda size: int(estimator.peak(size)) + extra,
    )


def test_the_areas_add_up_to_the_peak() -> None:
    estimator = FakeEstimator()
    sizes, areas = memory_areas(answer(estimator=estimator))
    assert set(areas) == {"parameters", "activations"}
    assert 100 in sizes
    assert sizes[-1] == 125
    assert [sum(column) for column in zip(*areas.values(), strict=True)] == [
        estimator.peak(size) for size in sizes
    ]


def test_the_picture_has_the_totals_of_the_table() -> None:
    """What the allocator reserves, or was measured beyond tensors, is an area of its own."""
    sizes, areas = memory_areas(answer(estimator=FakeEstimator(), extra=200))
    assert areas["beyond tensors"] == [200 for _ in sizes]


def test_the_picture_of_a_prediction_for_cuda_has_what_the_allocator_reserves() -> None:
    model = nn.Linear(64, 64)
    step = SupervisedStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).mean())
    found = find_batch_size(
        step, torch.ones(2, 64), device_memory="128MiB", device="cuda", context=0
    )
    sizes, areas = memory_areas(found)
    totals = dict(zip(sizes, map(sum, zip(*areas.values(), strict=True)), strict=True))
    rows = {row.size: row.peak for row in found.rows() if row.size in totals}
    assert found.size in rows
    assert rows == {size: totals[size] for size in rows}


def test_where_all_there_are_fit_that_is_said() -> None:
    found = replace(answer(), too_large=None, peaks={100: 2000})
    assert "100 samples (tried), all there are; more would fit" in str(found)
    assert "the largest" not in str(found)
    assert memory_table(found).endswith("  all there are; more would fit")


@pytest.mark.parametrize("size", [1, 2, 100_000])
def test_sizes_that_are_drawn(size: int) -> None:
    sizes, _ = memory_areas(answer(estimator=FakeEstimator(), size=size))
    assert size in sizes
    assert sizes[-1] > size
    assert len(sizes) <= 100


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.png", "b.png"):
        draw_memory(answer(estimator=FakeEstimator()), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    draw_memory(answer(estimator=FakeEstimator(), size=1), tmp_path / "one.svg")
    assert (tmp_path / "one.svg").stat().st_size > 1_000


def test_trials_have_no_picture_and_no_table(tmp_path: Path) -> None:
    with pytest.raises(FitError, match="trials"):
        draw_memory(answer(peak=None), tmp_path / "a.png")
    with pytest.raises(ConfigError, match="picture"):
        draw_memory(answer(estimator=FakeEstimator()), tmp_path / "a.doc")
    assert memory_table(answer(peak=None)) == ""
