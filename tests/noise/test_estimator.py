"""The estimate over many steps: near the truth, honest about how near, and hard to break."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.noise.truths import TRUTHS, Truth

from stretto.errors import BatchSizeError
from stretto.noise import NoiseEstimator, NoiseTerms

SIZES = [8, 8, 8, 2]


def observe(estimator: NoiseEstimator, truth: Truth, steps: int, chance: torch.Generator) -> None:
    """Let an estimator see steps of a problem."""
    for squares, whole in truth.steps(steps, SIZES, chance):
        estimator.observe(squares, SIZES, whole)


@pytest.mark.parametrize("problem", TRUTHS)
def test_the_noise_scale_is_near_the_truth(problem: str) -> None:
    truth, estimator = TRUTHS[problem], NoiseEstimator(window=2000)
    observe(estimator, truth, 2000, torch.Generator().manual_seed(5))
    assert estimator.noise_scale == pytest.approx(truth.variance / truth.square, rel=0.1)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    truth, chance = TRUTHS["linear regression"], torch.Generator().manual_seed(11)
    true, held, runs = truth.variance / truth.square, 0, 150
    for _ in range(runs):
        estimator = NoiseEstimator(window=60, confidence=0.9)
        observe(estimator, truth, 60, chance)
        lower, upper = estimator._interval
        held += lower <= true <= upper
    # 0.9, give or take two standard errors of a share of 150.
    assert held / runs == pytest.approx(0.9, abs=0.05)


def test_the_mean_of_ratios_would_be_far_off() -> None:
    truth, chance = TRUTHS["quadratic"], torch.Generator().manual_seed(2)
    estimator, ratios = NoiseEstimator(window=500), []
    for _ in range(500):
        one = NoiseEstimator()
        observe(one, truth, 1, chance)
        assert one.numerator is not None
        assert one.denominator is not None
        estimator.add(NoiseTerms(one.numerator, one.denominator))
        ratios.append(one.numerator / one.denominator)
    true = truth.variance / truth.square
    assert estimator.noise_scale == pytest.approx(true, rel=0.25)
    assert abs(sum(ratios) / len(ratios) - true) > 0.5 * true


def test_nothing_is_told_before_it_is_steady() -> None:
    estimator = NoiseEstimator()
    assert [estimator.noise_scale, estimator.interval, estimator.numerator] == [None] * 3
    for step in range(19):
        estimator.add(NoiseTerms(100.0 + step, 2.0))
    assert estimator.noise_scale is None
    assert estimator.numerator is not None
    for step in range(10):
        estimator.add(NoiseTerms(100.0 + step, 2.0))
    assert estimator.noise_scale == pytest.approx(54, rel=0.1)


def test_a_gradient_lost_in_noise_gives_no_number() -> None:
    estimator = NoiseEstimator()
    for step in range(400):
        estimator.add(NoiseTerms(100.0, (-1.0) ** step))
    assert not estimator.is_steady
    assert estimator.interval is None
    assert math.isinf(estimator._interval.upper)
    assert estimator._interval.lower > 100


def test_it_follows_a_change_within_its_window() -> None:
    estimator = NoiseEstimator(window=40)
    for step in range(400):
        estimator.add(NoiseTerms(10.0 + step % 3, 1.0 + step % 2 / 10))
    before = estimator.noise_scale
    for step in range(80):
        estimator.add(NoiseTerms(40.0 + step % 3, 1.0 + step % 2 / 10))
    assert before == pytest.approx(10.5, rel=0.05)
    assert estimator.noise_scale == pytest.approx(39, rel=0.05)


@pytest.mark.parametrize(
    ("terms", "gain"),
    [((8.0, 1.0), 1.5), ((8e99, 1e99), 1.5), ((8e-300, 1e-300), 1.5), ((5e-324, 0.0), 2.0)],
    ids=str,
)
def test_the_gain_does_not_go_by_how_large_gradients_are(
    terms: tuple[float, float], gain: float
) -> None:
    estimator = NoiseEstimator()
    for _ in range(40):
        estimator.add(NoiseTerms(*terms))
    assert estimator.gain(8, 4) == pytest.approx(gain)


numbers = st.floats() | st.floats(-10, 10) | st.just(0.0)


@given(st.lists(st.tuples(numbers, numbers), max_size=60), st.integers(2, 20))
def test_no_measurement_breaks_it(measured: list[tuple[float, float]], window: int) -> None:
    estimator = NoiseEstimator(window=window)
    for pair in measured:
        estimator.add(NoiseTerms(*pair))
    scale, interval = estimator.noise_scale, estimator.interval
    assert (scale is None) == (interval is None)
    if scale is not None and interval is not None:
        assert 0 < interval.lower <= scale * (1 + 1e-9)
        assert scale <= interval.upper * (1 + 1e-9) < math.inf
    state = estimator.state_dict()
    assert json.loads(json.dumps(state, allow_nan=False)) == state


def test_nan_and_infinity_change_nothing() -> None:
    estimator = NoiseEstimator()
    for step in range(30):
        estimator.add(NoiseTerms(5.0, 1.0 + step % 2))
    before = estimator.state_dict()
    for bad in (math.nan, math.inf, -math.inf, 1e200):
        estimator.add(NoiseTerms(bad, 1.0))
        estimator.add(NoiseTerms(1.0, bad))
        estimator.observe([bad, 1.0], [4, 4], 1.0)
    estimator.add(None)
    assert estimator.state_dict() == before


def test_a_saved_estimator_goes_on_to_the_last_bit() -> None:
    one, chance = NoiseEstimator(), torch.Generator().manual_seed(0)
    observe(one, TRUTHS["quadratic"], 30, chance)
    other = NoiseEstimator()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for step in range(30):
        for each in (one, other):
            each.add(NoiseTerms(50.0 + step, 3.0))
    assert one.state_dict() == other.state_dict()
    assert one.noise_scale == other.noise_scale


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 1}, "window=1"),
        ({"window": 2.5}, "window=2.5"),
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"confidence": "high"}, "confidence='high'"),
    ],
    ids=["one", "no integer", "certain", "text"],
)
def test_settings_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(BatchSizeError, match=message):
        NoiseEstimator(**settings)  # type: ignore[arg-type]
