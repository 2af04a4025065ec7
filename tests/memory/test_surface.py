"""Every size and every length from six steps."""

from __future__ import annotations

import pytest
from memory_families import ByHand, adamw, next_byte, texts
from torch import Tensor, nn

from stretto.examples.tiny_gpt import TinyGPT
from stretto.memory import TrainingStep, predict, predict_lengths


def batches(size: int, length: int) -> Tensor:
    return texts(size)[:, :length].contiguous()


@pytest.mark.parametrize("model", [TinyGPT(1, 16, context=64), ByHand()], ids=["SDPA", "by hand"])
def test_a_length_that_was_not_recorded(model: nn.Module) -> None:
    step = TrainingStep(model, adamw(model), next_byte)
    surface = predict_lengths(step, batches, [16, 32, 64])
    alone = predict(step, lambda size: batches(size, 48))
    assert [surface.peak(size, 48) for size in (2, 9, 100)] == [
        alone.peak(size) for size in (2, 9, 100)
    ]
    assert surface.num_steps == 6


def test_the_largest_of_each_length() -> None:
    model = TinyGPT(1, 16, context=64)
    step = TrainingStep(model, adamw(model), next_byte)
    limit = 10**7
    rows = predict_lengths(step, batches, [16, 32, 64]).table([24, 64], limit)
    for row in rows:
        assert row.largest is not None
        assert row.peak is not None
        alone = predict(step, lambda size, length=row.length: batches(size, length))  # type: ignore[misc]
        assert row.largest == alone.largest(limit)
        assert row.peak <= limit


def test_no_sample_fits() -> None:
    model = TinyGPT(1, 16, context=64)
    step = TrainingStep(model, adamw(model), next_byte)
    (row,) = predict_lengths(step, batches, [16, 32, 64]).table([64], 1000)
    assert (row.largest, row.peak) == (None, None)
