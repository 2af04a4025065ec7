from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stretto.runtime.losses import only_looking, reduction_of, tolerance_for

LOSSES = st.floats(1e-3, 1e3)
PARTS = st.lists(st.tuples(LOSSES, st.integers(1, 64)), min_size=2, max_size=4)


@given(PARTS)
def test_means_and_sums_of_unequal_parts_are_told_apart(parts: list[tuple[float, int]]) -> None:
    losses, counts = [one for one, _ in parts], [count for _, count in parts]
    mean = sum(one * count for one, count in parts) / sum(counts)
    assert reduction_of(mean, losses, counts) == "mean"
    assert reduction_of(sum(losses), losses, counts) == "sum"
    assert reduction_of(3 * sum(losses), losses, counts) == "other"


@pytest.mark.parametrize(
    ("whole", "parts", "counts"),
    [
        (0.0, [0.0, 0.0], [4, 4]),
        (math.nan, [1.0, 2.0], [4, 4]),
        (1.0, [1.0, math.inf], [4, 4]),
        (1.0, [1.0, 0.0], [4, 4]),  # a mean over targets that only the first part has
        (1.0, [1.0, 1.0], [4, 0]),
    ],
)
def test_losses_that_cannot_tell_are_no_verdict(
    whole: float, parts: list[float], counts: list[int]
) -> None:
    assert reduction_of(whole, parts, counts) is None


def test_half_precision_is_read_with_its_own_rounding() -> None:
    half = [torch.zeros(1, dtype=torch.bfloat16)]
    assert reduction_of(2.001, [1.0, 3.0], [1, 1], tolerance=tolerance_for(half)) == "mean"
    assert reduction_of(2.001, [1.0, 3.0], [1, 1]) == "other"


def test_looking_restores_modes_and_random_state_and_calls_no_method_of_the_model() -> None:
    class Loud(nn.Sequential):
        def train(self, mode: bool = True) -> Loud:
            raise AssertionError("called")

    model = Loud(nn.Dropout(), nn.BatchNorm1d(2))
    model[1].training = False
    state = torch.get_rng_state()
    with only_looking(model) as random:
        assert not any(one.training for one in model.modules())
        first = torch.rand(3)
        random.restore()
        assert torch.equal(first, torch.rand(3))
        assert not model(torch.ones(2, 2)).requires_grad
    assert [one.training for one in model.modules()] == [True, True, False]
    assert torch.equal(state, torch.get_rng_state())
