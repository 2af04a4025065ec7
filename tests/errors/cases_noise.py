"""Errors about measuring the noise of gradients, and about batch sizes that follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stretto.batching import (
    NoiseScale,
    NormTest,
    Plateau,
    Signals,
)
from stretto.noise import NoiseEstimator, noise_terms
from stretto.training import Stepping, Trainer
from stretto.training.algorithms import NoiseReport

wrong: Any = None
"""A value that a type checker would refuse."""
"""A batch size and the schedule that goes with it."""


def follows(policy: Any, **settings: Any) -> Trainer:
    """A run whose batch size follows something."""
    model = nn.Linear(3, 1)
    return Trainer(
        model,
        torch.zeros(20, 3),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch).mean(),
        max_duration="2ep",
        batch_size=policy,
        **settings,
    )


def plateau(**settings: Any) -> Plateau:
    """A plateau with one setting changed."""
    return Plateau(**{"metric": "validation/loss", "start": 8, "maximum": 64, **settings})


CASES: list[tuple[str, Callable[[], object]]] = [
    ("noise-window", lambda: NoiseEstimator(window=1)),
    ("noise-confidence", lambda: NoiseEstimator(confidence=1.0)),
    ("noise-sizes", lambda: noise_terms([1.0, 2.0], [3], 1.0)),
    ("noise-sizes-negative", lambda: noise_terms([1.0, 2.0], [-1, 2], 1.0)),
    ("noise-steps", lambda: Stepping(measure_noise=0)),
    ("noise-off", lambda: follows(NoiseScale(8, 64), stepping=Stepping(measure_noise=None))),
    ("noise-scale-above", lambda: NoiseScale(128, 64)),
    ("noise-scale-below", lambda: NoiseScale(8, 64, minimum=16)),
    ("noise-scale-part", lambda: NoiseScale(8, 64, c=0)),
    ("noise-scale-power", lambda: NoiseScale(8, 64, power=2)),
    ("noise-scale-sure", lambda: NoiseScale(8, 64, confidence=wrong)),
    ("norm-test-eta", lambda: NormTest(8, 64, eta=1.5)),
    ("plateau-metric", lambda: plateau(metric="loss")),
    ("plateau-factor", lambda: plateau(factor=1)),
    ("plateau-patience", lambda: plateau(patience=0)),
    ("plateau-threshold", lambda: plateau(threshold=-1)),
    ("plateau-mode", lambda: plateau(mode="less")),
    ("plateau-not-measured", lambda: follows(plateau())),
    ("noise-report", lambda: NoiseReport(confidence=2)),
    ("noise-signal", lambda: Signals(noise_numerator="x")),  # type: ignore[arg-type]
    ("noise-not-a-number", lambda: noise_terms([wrong, 2.0], [1, 3], 1.0)),
    ("noise-confidence-most", lambda: NoiseEstimator(confidence=0.99999)),
    ("noise-gain", lambda: NoiseEstimator().gain(0, 64)),
]
