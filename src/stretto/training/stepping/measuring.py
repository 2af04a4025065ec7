"""Measures what the batch size policy and callbacks read, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, final

import torch

from stretto.batching import NO_SIGNALS, Signals
from stretto.batching.following import (
    LOSS,
    NOISE,
    followed_metric,
    measured_value,
    metrics_of,
)
from stretto.data import Step, StepLoader
from stretto.errors import TrainingError
from stretto.noise import NoiseSums
from stretto.settings import Stepping
from stretto.training.callback import Callback, Events
from stretto.training.settings import Evaluation
from stretto.training.stepping.finite import Gradient
from stretto.training.stepping.noise_meter import NOTHING
from stretto.training.stepping.stepper import Stepper


@final
class Measurements:
    """Turns measurements of a step on all ranks into the signals for the policy.

    Args:
        loader: its policy says what it reads.
        stepper: computes the steps; measures the noise if it is read.
        stepping: how often the noise is measured.
        events: whether a callback reads the noise.
        evaluations: the evaluations of the run.

    Raises:
        TrainingError: the policy reads a metric that no evaluation measures, or that several do;
            or it reads the noise, and the noise cannot be measured.
    """

    def __init__(
        self,
        loader: StepLoader,
        stepper: Stepper,
        *,
        stepping: Stepping,
        events: Events,
        evaluations: Sequence[Evaluation],
    ) -> None:
        self._stepper = stepper
        self._reads_loss = LOSS in loader.reads
        if NOISE in loader.reads or events.listeners("on_noise"):
            every = _steps_between(stepping.measure_noise)
            stepper.measure_noise(loader.spec, every=every)
        self.is_idle = not self._reads_loss and stepper.meter is None
        """Whether nothing is measured."""
        self._metric = followed_metric(loader.reads, metrics_of(evaluations))

    def own(self, gradient: Gradient) -> tuple[float, ...]:
        """Return this rank's sums; `signals` takes their totals over ranks.

        Every rank must call it, before the gradient is changed.
        """
        if self.is_idle:
            return ()
        total = units = 0.0
        if self._reads_loss and gradient.losses:
            losses = torch.stack([one.loss for one in gradient.losses]).double().tolist()
            pairs = zip(losses, gradient.losses, strict=True)
            total = sum(loss * one.factor for loss, one in pairs)
            units = sum(one.weight for one in gradient.losses)
        noise = NOTHING if self._stepper.meter is None else self._stepper.noise()
        return (total, units, *noise)

    def signals(self, step: Step, sums: Sequence[float]) -> Signals:
        """Return the signals of all ranks."""
        if self.is_idle:
            return NO_SIGNALS
        total, units, *rest = sums
        noise = NoiseSums(*rest)
        terms = noise.terms(step.num_samples)
        return Signals(
            loss=total / units if self._reads_loss and units else None,
            noise_numerator=None if terms is None else terms.numerator,
            noise_denominator=None if terms is None else terms.denominator,
            num_samples=None if terms is None else step.num_samples,
        )

    def metric(self, named: Mapping[str, float]) -> float | None:
        """Return the metric that the policy reads, if it was just measured."""
        return measured_value(self._metric, named)


def keeps_gradients_apart(reads: frozenset[str], callbacks: Iterable[type]) -> bool:
    """Return whether measuring needs memory for one more gradient.

    Args:
        reads: the signals that the batch size policy reads.
        callbacks: the types of the callbacks.
    """
    listens = any(
        issubclass(one, Callback) and one.on_noise is not Callback.on_noise for one in callbacks
    )
    return NOISE in reads or listens


def _steps_between(measure_noise: Literal["auto"] | int | None) -> int:
    """In how many steps noise is measured once, where it is read."""
    if measure_noise is None:
        raise TrainingError.cannot(
            "follow the noise of the gradient",
            why="it is not measured: measure_noise is None",
            instead="leave measure_noise out, or write in how many steps to measure it once",
        )
    return 1 if measure_noise == "auto" else measure_noise
