"""The terms of one step: unbiased on problems with known truth, which the naive ones are not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.noise.truths import TRUTHS, Truth

from stretto.batching import NO_SIGNALS, Signals
from stretto.errors import TrainingError
from stretto.noise import NoiseSums

TRIALS = 3000
EVEN, UNEVEN = (8, 8, 8, 8), (8, 8, 8, 2)
Estimator = Callable[[Sequence[float], Sequence[int], float], Signals]


def noise_terms(squares: Sequence[float], sizes: Sequence[float], whole: float) -> Signals:
    """What a step of one rank measures."""
    return NoiseSums.of(squares, sizes, whole).signals()


def naive(squares: Sequence[float], sizes: Sequence[int], whole: float) -> Signals:
    """What is often done: the last, smaller micro-batch is taken to be as large as the others."""
    return noise_terms(squares, [sizes[0]] * len(sizes), whole)


def standard_errors(
    truth: Truth, sizes: Sequence[int], estimator: Estimator
) -> tuple[float, float]:
    """How many standard errors the means over many trials are away from the truth."""
    chance = torch.Generator().manual_seed(1)
    found = []
    for squares, whole in truth.steps(TRIALS, sizes, chance):
        measured = estimator(squares, sizes, whole)
        found.append((measured.noise_numerator, measured.noise_denominator))
    away = []
    for values, true in zip(zip(*found, strict=True), (truth.variance, truth.square), strict=True):
        error = statistics.stdev(values) / math.sqrt(TRIALS)
        away.append((statistics.fmean(values) - true) / error)
    return away[0], away[1]


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, (1, 30), (5, 1, 1)], ids=str)
@pytest.mark.parametrize("problem", TRUTHS)
def test_the_terms_are_unbiased(problem: str, sizes: Sequence[int]) -> None:
    numerator, denominator = standard_errors(TRUTHS[problem], sizes, noise_terms)
    assert abs(numerator) < 2
    assert abs(denominator) < 2


@pytest.mark.parametrize("problem", TRUTHS)
def test_taking_uneven_groups_for_even_ones_fails_the_same_test(problem: str) -> None:
    numerator, denominator = standard_errors(TRUTHS[problem], UNEVEN, naive)
    assert numerator > 10
    assert denominator < -2


def test_the_naive_terms_are_right_for_even_groups() -> None:
    numerator, denominator = standard_errors(TRUTHS["quadratic"], EVEN, naive)
    assert abs(numerator) < 2
    assert abs(denominator) < 2


def test_sums_of_ranks_give_the_terms_of_all_their_groups() -> None:
    squares, sizes, whole = [3.0, 5.0, 4.0, 7.0], [8, 8, 4, 2], 2.0
    together = NoiseSums.of(squares, sizes=sizes, whole=whole)
    first = NoiseSums.of(squares[:2], sizes=sizes[:2], whole=0.0)
    second = NoiseSums.of(squares[2:], sizes=sizes[2:], whole=0.0)
    whole_square = NoiseSums(0.0, 0.0, 0.0, 22.0**2 * whole)
    added = NoiseSums(*map(sum, zip(first, second, whole_square, strict=True)))
    assert added == together
    assert together.signals(22) == noise_terms(squares, sizes, whole)


def test_units_may_be_parts_of_a_sample() -> None:
    by_sample = NoiseSums.of([8.0, 4.0], sizes=[2, 2], whole=5.0).signals(4)
    by_token = NoiseSums.of([8.0, 4.0], sizes=[20, 20], whole=5.0).signals(4)
    assert by_sample == by_token


def told_by_tokens(counts: torch.Tensor) -> tuple[float, float]:
    """tr(Sigma) as told over the true one: the mean of many steps, and its standard error.

    Each sample is a group of its own. All tokens of one have the same gradient, so that it is
    weighed by how many they are. `counts` is of shape `[steps, samples]`.
    """
    truth, (steps, samples) = TRUTHS["quadratic"], counts.shape
    drawn = truth.draw(steps * samples, torch.Generator().manual_seed(1)).unflatten(0, counts.shape)
    wholes = (counts[..., None] * drawn).sum(1) / counts.sum(1, keepdim=True)
    # The samples times the variance of the step's gradient, which is what a noise scale is about.
    part = samples * float((counts.square().sum(1) / counts.sum(1).square()).mean())
    told = []
    for gradients, sizes, whole in zip(drawn, counts, wholes, strict=True):
        squares = gradients.square().sum(1).tolist()
        square = float(whole.square().sum())
        measured = NoiseSums.of(squares, sizes.tolist(), square).signals(samples)
        assert measured.noise_numerator is not None
        told.append(measured.noise_numerator / (part * truth.variance))
    return statistics.fmean(told), statistics.stdev(told) / math.sqrt(steps)


def test_by_tokens_samples_of_equal_length_are_unbiased_however_alike_their_tokens() -> None:
    mean, error = told_by_tokens(torch.full((TRIALS, 8), 17.0, dtype=torch.float64))
    assert mean == pytest.approx(1, abs=2 * error)


def test_by_tokens_it_tells_too_little_where_lengths_differ_and_tokens_are_alike() -> None:
    """Not what is wanted, but what docs/guides/noise.md says."""
    chance = torch.Generator().manual_seed(2)
    counts = 1 + torch.empty(TRIALS, 16, dtype=torch.float64).geometric_(1 / 16, generator=chance)
    mean, error = told_by_tokens(counts)
    assert mean == pytest.approx(0.56, abs=0.02 + 2 * error)


def test_groups_without_units_do_not_count() -> None:
    assert noise_terms([8.0, 4.0, 9.0], [2, 2, 0], 5.0) == noise_terms([8.0, 4.0], [2, 2], 5.0)
    assert noise_terms([8.0, 9.0], [2, 0], 5.0) == NO_SIGNALS


@given(
    st.lists(st.floats(), min_size=0, max_size=5),
    st.floats(),
    st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
def test_terms_are_finite_or_none(squares: list[float], whole: float, sizes: list[int]) -> None:
    found = noise_terms(squares, sizes[: len(squares)], whole)
    numerator, denominator = found.noise_numerator, found.noise_denominator
    assert (numerator is None) == (denominator is None)
    assert all(math.isfinite(value) for value in (numerator, denominator) if value is not None)


def test_what_is_beyond_a_float_gives_no_terms() -> None:
    assert noise_terms([1.7e308, 1.7e308], [1, 1], 1.0) == NO_SIGNALS
    assert noise_terms([math.inf, -math.inf], [1, 1], 1.0) == NO_SIGNALS
    assert noise_terms([10**400, 1], [1, 1], 10**400) == NO_SIGNALS


def test_a_tensor_of_one_element_is_a_number() -> None:
    squares = [torch.tensor(8.0), torch.tensor(4.0)]
    found = noise_terms(squares, [2, 2], torch.tensor(5.0))  # type: ignore[arg-type]
    assert (found.noise_numerator, found.noise_denominator) == (4.0, 4.0)


@pytest.mark.parametrize(
    "given",
    [(["a", 2], [1, 3], 1.0), ([1, 2], [1, None], 1.0), ([1, 2], [1, 3], torch.ones(2))],
    ids=["square", "size", "whole"],
)
def test_what_is_not_a_number_is_refused(given: Any) -> None:
    with pytest.raises(TrainingError, match="squared"):
        noise_terms(*given)


def test_each_group_has_a_size() -> None:
    with pytest.raises(TrainingError, match="sizes"):
        noise_terms([1.0, 2.0], [3], 1.0)
