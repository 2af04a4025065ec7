"""Our schedules against the formulas of transformers' `get_*_schedule`, written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from tests.schedules.strategies import by_batch, values

from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    InverseSqrt,
    Linear,
    Polynomial,
    Schedule,
)
from stretto.timing import Horizon

WARMUP, STEPS = 25, 200


def warmed(rest: Callable[[int], float]) -> Callable[[int], float]:
    """Return the rise that they all begin with, then a formula."""
    return lambda step: step / max(1, WARMUP) if step < WARMUP else rest(step)


def progress(step: int) -> float:
    """Return how much of what follows the warm-up has passed."""
    return (step - WARMUP) / max(1, STEPS - WARMUP)


def polynomial(step: int) -> float:
    """Return get_polynomial_decay_schedule_with_warmup with lr_end 1e-7 for a base of 1."""
    return (1 - 1e-7) * (1 - progress(step)) ** 3 + 1e-7


def inverse_sqrt(timescale: int) -> Callable[[int], float]:
    """Return get_inverse_sqrt_schedule."""
    shift = timescale - WARMUP
    return lambda step: 1 / math.sqrt((step + shift) / timescale)


def wsd(kind: str) -> Callable[[int], float]:
    """Return get_wsd_schedule with a decay of 40 steps to 0.1."""
    shapes: dict[str, Callable[[float], float]] = {
        "linear": lambda passed: 1 - passed,
        "cosine": lambda passed: 0.5 * (1 + math.cos(math.pi * passed)),
        "1-sqrt": lambda passed: 1 - math.sqrt(passed),
    }

    def rest(step: int) -> float:
        if step < STEPS - 40:
            return 1.0
        return 0.1 + 0.9 * shapes[kind]((step - (STEPS - 40)) / 40)

    return rest


CASES: dict[str, tuple[Schedule, Callable[[int], float]]] = {
    "constant": (Constant(warmup="25ba"), lambda step: 1.0),
    "linear": (
        Linear(warmup="25ba"),
        lambda step: max(0.0, (STEPS - step) / max(1, STEPS - WARMUP)),
    ),
    "cosine": (
        Cosine(warmup="25ba"),
        lambda step: max(0.0, 0.5 * (1 + math.cos(math.pi * 0.5 * 2 * progress(step)))),
    ),
    "cosine-with-minimum": (
        Cosine(1, 0.1, warmup="12.5%"),
        lambda step: 0.5 * (1 + math.cos(math.pi * progress(step))) * 0.9 + 0.1,
    ),
    "cosine-with-hard-restarts": (
        CosineRestarts("1/3dur", warmup="25ba"),
        lambda step: 0.5 * (1 + math.cos(math.pi * ((3 * (step - WARMUP)) % 175) / 175)),
    ),
    "polynomial": (Polynomial(1, 1e-7, power=3, warmup="25ba"), polynomial),
    "inverse-sqrt": (InverseSqrt(warmup="25ba"), inverse_sqrt(WARMUP)),
    "inverse-sqrt-with-timescale": (InverseSqrt("80ba", warmup="25ba"), inverse_sqrt(80)),
    "wsd-linear": (WSD("40ba", 0.1, warmup="25ba"), wsd("linear")),
    "wsd-cosine": (WSD("20%", 0.1, shape="cosine", warmup="25ba"), wsd("cosine")),
    "wsd-1-sqrt": (WSD("40ba", 0.1, shape="1-sqrt", warmup="12.5%"), wsd("1-sqrt")),
}


@pytest.mark.parametrize(("ours", "formula"), CASES.values(), ids=CASES)
def test_the_factor_at_each_step_is_that_of_the_formula(
    ours: Schedule, formula: Callable[[int], float]
) -> None:
    found = values(ours, Horizon(f"{STEPS}ba"), by_batch(STEPS))
    assert found == pytest.approx(
        [warmed(formula)(step) for step in range(STEPS)], rel=1e-12, abs=1e-12
    )


def test_the_transformer_paper() -> None:
    # Vaswani et al. 2017, equation 3: d ** -0.5 * min(step ** -0.5, step * warmup ** -1.5),
    # over its peak, which is at step = warmup.
    found = values(InverseSqrt(warmup="25ba"), Horizon("200ba"), by_batch(200)[1:])
    expected = [min(step**-0.5, step * WARMUP**-1.5) / WARMUP**-0.5 for step in range(1, STEPS)]
    assert found == pytest.approx(expected, rel=1e-12)
