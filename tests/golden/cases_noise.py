"""Errors about measuring the noise of gradients."""

from __future__ import annotations

from collections.abc import Callable

from stretto.noise import NoiseEstimator, noise_terms

CASES: list[tuple[str, Callable[[], object]]] = [
    ("noise-window", lambda: NoiseEstimator(window=1)),
    ("noise-confidence", lambda: NoiseEstimator(confidence=1.0)),
    ("noise-sizes", lambda: noise_terms([1.0, 2.0], [3], 1.0)),
]
