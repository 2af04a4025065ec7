"""The noise over many steps: near the truth, honest about how near, and hard to break."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.noise.truths import TRUTHS, Truth

from stretto.batching import Signals
from stretto.errors import BatchSizeError
from stretto.noise import GradientNoise, NoiseSums

SIZES = [8, 8, 8, 2]


def observed(
    noise: GradientNoise, truth: Truth, steps: int, chance: torch.Generator
) -> GradientNoise:
    """Return the noise after steps of a problem."""
    for squares, whole in truth.steps(steps, SIZES, chance):
        noise = noise.after(NoiseSums.of(squares, SIZES, whole).signals())
    return noise


def terms(numerator: float, denominator: float) -> Signals:
    """What a step of unknown size measured."""
    return Signals(noise_numerator=numerator, noise_denominator=denominator)


@pytest.mark.parametrize("problem", TRUTHS)
def test_the_noise_scale_is_near_the_truth(problem: str) -> None:
    truth, chance = TRUTHS[problem], torch.Generator().manual_seed(5)
    noise = observed(GradientNoise(window=2000), truth, 2000, chance)
    assert noise.scale == pytest.approx(truth.variance / truth.square, rel=0.1)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    truth, chance = TRUTHS["linear regression"], torch.Generator().manual_seed(11)
    true, held, runs = truth.variance / truth.square, 0, 150
    for _ in range(runs):
        lower, upper = observed(GradientNoise(60, 0.9), truth, 60, chance).interval
        held += lower <= true <= upper
    # 0.9, give or take two standard errors of a share of 150.
    assert held / runs == pytest.approx(0.9, abs=0.05)


def test_the_mean_of_ratios_would_be_far_off() -> None:
    truth, chance = TRUTHS["quadratic"], torch.Generator().manual_seed(2)
    noise, ratios = GradientNoise(window=500), []
    for _ in range(500):
        alone = observed(GradientNoise(), truth, 1, chance)
        noise = noise.after(terms(alone.numerator, alone.denominator))
        ratios.append(alone.numerator / alone.denominator)
    true = truth.variance / truth.square
    assert noise.scale == pytest.approx(true, rel=0.25)
    assert abs(sum(ratios) / len(ratios) - true) > 0.5 * true


def test_nothing_is_told_before_it_is_steady() -> None:
    noise = GradientNoise()
    assert (noise.scale, noise.interval) == (None, (0.0, math.inf))
    for step in range(19):
        noise = noise.after(terms(100.0 + step, 2.0))
    assert noise.scale is None
    for step in range(10):
        noise = noise.after(terms(100.0 + step, 2.0))
    assert noise.scale == pytest.approx(54, rel=0.1)


def test_a_gradient_lost_in_noise_gives_no_number() -> None:
    noise = GradientNoise()
    for step in range(400):
        noise = noise.after(terms(100.0, (-1.0) ** step))
    assert noise.scale is None
    lower, upper = noise.interval
    assert lower > 100
    assert math.isinf(upper)


def test_it_follows_a_change_within_its_window() -> None:
    noise = GradientNoise(window=40)
    for step in range(400):
        noise = noise.after(terms(10.0 + step % 3, 1.0 + step % 2 / 10))
    before = noise.scale
    for step in range(80):
        noise = noise.after(terms(40.0 + step % 3, 1.0 + step % 2 / 10))
    assert before == pytest.approx(10.5, rel=0.05)
    assert noise.scale == pytest.approx(39, rel=0.05)


numbers = st.floats() | st.floats(-10, 10) | st.just(0.0)


@given(st.lists(st.tuples(numbers, numbers), max_size=60), st.integers(2, 20))
def test_no_measurement_breaks_it(measured: list[tuple[float, float]], window: int) -> None:
    noise = GradientNoise(window=window)
    for pair in measured:
        noise = noise.after(terms(*pair))
    lower, upper = noise.interval
    if noise.scale is not None:
        assert 0 < lower <= noise.scale * (1 + 1e-9)
        assert noise.scale <= upper * (1 + 1e-9) < math.inf
    state = noise.to_state()
    assert json.loads(json.dumps(state, allow_nan=False)) == state


def test_nan_and_infinity_change_nothing() -> None:
    noise = GradientNoise()
    for step in range(30):
        noise = noise.after(terms(5.0, 1.0 + step % 2))
    for bad in (math.nan, math.inf, -math.inf, 1e200):
        assert noise.after(terms(bad, 1.0)) == noise
        assert noise.after(terms(1.0, bad)) == noise
        assert noise.after(NoiseSums.of([bad, 1.0], [4, 4], 1.0).signals()) == noise
    assert noise.after(Signals(loss=1.0)) == noise


def test_saved_noise_goes_on_to_the_last_bit() -> None:
    chance = torch.Generator().manual_seed(0)
    noise = observed(GradientNoise(30, 0.8), TRUTHS["quadratic"], 30, chance)
    assert GradientNoise(30, 0.8).from_state(json.loads(json.dumps(noise.to_state()))) == noise


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
        GradientNoise(**settings)  # type: ignore[arg-type]
