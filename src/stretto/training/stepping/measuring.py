"""What a step measures for the batch size policy and for callbacks; nothing that nobody reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, final

import torch

from stretto.batching import NO_SIGNALS, Signals
from stretto.batching.adaptive.following import (
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
from stretto.training.stepping.gradient import Gradient
from stretto.training.stepping.noise_meter import NOTHING
from stretto.training.stepping.stepper import Stepper


@final
class Measurements:
    """Turns what ranks know of a step into the signals that a policy reads.

    Args:
        loader: has the policy, which says what it reads.
        stepper: computes the steps; measures noise from here on, if that is read.
        stepping: says how often.
        events: knows whether a callback listens to the noise.
        evaluations: those that there are.

    Raises:
        TrainingError: a metric is read that no evaluation measures, or more than one, or noise
            where it must not or cannot be measured.
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
        """Return what this rank has measured; the sums over ranks are what `signals` takes.

        Every rank must call it, while the gradient is as it was computed.
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
        """Return what all ranks have measured together; the same on each."""
        if self.is_idle:
            return NO_SIGNALS
        total, units, *rest = sums
        noise = NoiseSums(*rest)
        terms = noise.terms(step.size)
        return Signals(
            loss=total / units if self._reads_loss and units else None,
            noise_numerator=None if terms is None else terms.numerator,
            noise_denominator=None if terms is None else terms.denominator,
            num_samples=None if terms is None else step.size,
        )

    def metric(self, named: Mapping[str, float]) -> float | None:
        """Return the metric that the policy reads, if it is among those just measured."""
        return measured_value(self._metric, named)


def keeps_gradients_apart(reads: frozenset[str], callbacks: Iterable[type]) -> bool:
    """Return whether steps of several micro-batches need room for one more gradient.

    Args:
        reads: what the batch size policy reads.
        callbacks: the types of those of the run.
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
