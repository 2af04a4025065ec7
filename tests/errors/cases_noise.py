"""Errors about measuring the noise of gradients, and about batch sizes that follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.batching import (
    NoiseScale,
    Plateau,
    Signals,
)
from stretto.noise import NoiseSums

wrong: Any = None
"""A value that a type checker would refuse."""
"""A batch size and the schedule that goes with it."""


def plateau(**settings: Any) -> Plateau:
    """A plateau with one setting changed."""
    return Plateau(**{"metric": "validation/loss", "start": 8, "maximum": 64, **settings})


CASES: list[tuple[str, Callable[[], object]]] = [
    ("noise-sizes-negative", lambda: NoiseSums.of([1.0, 2.0], [-1, 2], 1.0)),
    ("noise-scale-above", lambda: NoiseScale(128, 64)),
    ("noise-scale-below", lambda: NoiseScale(8, 64, minimum=16)),
    ("noise-scale-sure", lambda: NoiseScale(8, 64, confidence=wrong)),
    ("plateau-metric", lambda: plateau(metric="loss")),
    ("plateau-patience", lambda: plateau(patience=0)),
    ("plateau-threshold", lambda: plateau(threshold=-1)),
    ("noise-signal", lambda: Signals(noise_numerator="x")),  # type: ignore[arg-type]
]
