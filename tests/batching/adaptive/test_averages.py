"""Means in which steps count by their samples, and the distribution that intervals go by."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import Signals
from stretto.batching.noise_scale import GradientNoise, student
from stretto.errors import BatchSizeError

# Two-sided, from the usual tables.
TABLE = {
    1: {0.8: 3.078, 0.9: 6.314, 0.95: 12.706, 0.99: 63.657, 0.999: 636.62},
    2: {0.8: 1.886, 0.9: 2.920, 0.95: 4.303, 0.99: 9.925, 0.999: 31.599},
    3: {0.8: 1.638, 0.9: 2.353, 0.95: 3.182, 0.99: 5.841, 0.999: 12.924},
    4: {0.8: 1.533, 0.9: 2.132, 0.95: 2.776, 0.99: 4.604, 0.999: 8.610},
    5: {0.8: 1.476, 0.9: 2.015, 0.95: 2.571, 0.99: 4.032, 0.999: 6.869},
    10: {0.8: 1.372, 0.9: 1.812, 0.95: 2.228, 0.99: 3.169, 0.999: 4.587},
    15: {0.8: 1.341, 0.9: 1.753, 0.95: 2.131, 0.99: 2.947, 0.999: 4.073},
    120: {0.8: 1.289, 0.9: 1.658, 0.95: 1.980, 0.99: 2.617, 0.999: 3.373},
}
confidences = st.floats(1e-6, 0.9999)


@pytest.mark.parametrize("freedom", TABLE)
def test_student_is_what_tables_say(freedom: int) -> None:
    for confidence, value in TABLE[freedom].items():
        assert student(confidence, freedom) == pytest.approx(value, rel=5e-4)


@given(confidences)
def test_student_is_as_its_closed_forms(confidence: float) -> None:
    half = confidence / 2
    assert student(confidence, 1) == pytest.approx(math.tan(math.pi * half), rel=1e-3)
    root = math.sqrt(2 / (4 * (0.5 + half) * (0.5 - half)))
    assert student(confidence, 2) == pytest.approx(2 * half * root, rel=1e-3)


@given(confidences, st.floats(1, 1000), st.floats(1.05, 2))
def test_more_freedom_needs_fewer_standard_errors(
    confidence: float, freedom: float, more: float
) -> None:
    assert student(confidence, freedom * more) <= student(confidence, freedom) * 1.0001


@given(confidences)
def test_the_integral_goes_over_into_the_expansion(confidence: float) -> None:
    assert student(confidence, 14.9999) == pytest.approx(student(confidence, 15), rel=2e-3)


@pytest.mark.parametrize("confidence", [0.99991, 0.9999999999999999])
def test_nobody_is_as_sure_as_that(confidence: float) -> None:
    with pytest.raises(BatchSizeError, match="number"):
        GradientNoise(confidence=confidence)
    assert GradientNoise(confidence=0.9999).confidence == 0.9999


def terms(numerator: float, denominator: float, num_samples: float | None = None) -> Signals:
    """What a step measured."""
    return Signals(
        noise_numerator=numerator, noise_denominator=denominator, num_samples=num_samples
    )


steps = st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.integers(1, 1000))


@given(st.lists(steps, min_size=1, max_size=30))
def test_steps_count_by_their_samples(seen: list[tuple[float, float, int]]) -> None:
    average, kept = GradientNoise(window=10), 1 - 2 / 11
    for numerator, denominator, size in seen:
        average = average.after(terms(numerator, denominator, size))
    weights = [size * kept**age for age, (_, _, size) in enumerate(reversed(seen))][::-1]
    total = math.fsum(weights)

    def mean(values: list[float]) -> float:
        return math.fsum(w * value for w, value in zip(weights, values, strict=True)) / total

    x, y = [one[0] for one in seen], [one[1] for one in seen]
    assert average.numerator == pytest.approx(mean(x), abs=1e-9)
    assert average.denominator == pytest.approx(mean(y), abs=1e-9)
    both = mean([a * b for a, b in zip(x, y, strict=True)]) - mean(x) * mean(y)
    assert average.spread_both == pytest.approx(total * both, rel=1e-6, abs=1e-6 * total)
    squares = math.fsum(w * w for w in weights)
    assert average.effective_steps == pytest.approx(total**2 / squares)


def test_steps_of_one_size_count_alike() -> None:
    plain = alike = GradientNoise(window=9)
    for step in range(30):
        plain = plain.after(terms(40 + step % 3, 1 + step % 2))
        alike = alike.after(terms(40 + step % 3, 1 + step % 2, 64))
    assert alike.interval == pytest.approx(plain.interval)
    assert alike.effective_steps == pytest.approx(plain.effective_steps)


@pytest.mark.parametrize("sizes", [(64, 2), (64, 64, 2), (64,) * 20 + (2,)], ids=len)
@pytest.mark.parametrize("window", [2, 9, 20, 100])
def test_epochs_of_a_few_batches_are_enough_in_the_end(sizes: tuple[int, ...], window: int) -> None:
    average, enough = GradientNoise(window), False
    for _ in range(5 * window):
        for size in sizes:
            average = average.after(terms(40.0, 1.0, size))
            enough = enough or average.has_enough_steps
    assert enough


@pytest.mark.parametrize("size", [0, -1, math.nan, math.inf, 1e-320])
def test_a_step_of_no_samples_is_none(size: float) -> None:
    assert GradientNoise().after(terms(1.0, 1.0, size)) == GradientNoise()
