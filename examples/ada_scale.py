"""AdaScale as a callback: the learning rate follows the batch size as far as the noise allows.

In a run file: `callbacks: [{target: "ada_scale:AdaScale", reference: 256}]`, with this file beside
the run file. A plan does not know the gains and shows the learning rate without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from stretto import Callback, Run, Step
from stretto.batching import Signals, checked_size
from stretto.errors import TrainingError
from stretto.noise import GradientNoise


def gain(noise: GradientNoise, size: int, reference: int) -> float:
    """Return the AdaScale gain of a batch over one of `reference` samples.

    `r = (S/b + G2) / (S/B + G2)` for a batch of B samples and a reference of b, where S is
    tr(Sigma) and G2 is |G|^2: between 1 and `B / b`. It is 1 until enough steps are measured.

    >>> noise = GradientNoise()
    >>> for step in range(40):
    ...     noise = noise.after(Signals(noise_numerator=64.0, noise_denominator=1.0))
    >>> round(gain(noise, 128, 64), 3)
    1.333
    """
    variance, square = max(0.0, noise.numerator), max(0.0, noise.denominator)
    if noise.steps < min(20, 0.75 * noise.window) or variance + square == 0:
        return 1.0
    # Fractions of the sum, so that nothing underflows.
    part = variance / (variance + square)
    return (part / reference + (1.0 - part)) / (part / size + (1.0 - part))


@final
class AdaScale(Callback):
    """Multiplies the learning rate by the AdaScale gain of the batch size over a reference.

    With batches s times the reference, the gain is between 1 and s: s where noise is all there is,
    which larger batches average away, and 1 where there is none (Johnson et al. 2020, arXiv
    2007.05105, equation 3; of a single step: see `gain`). Made for SGD. The paper also stretches
    the schedule: there it reads `gained` instead of the number of steps. It replaces a learning
    rate rule.

    >>> AdaScale(256)
    AdaScale(256, window=100)

    Args:
        reference: the batch size that the learning rate is meant for.
        window: how many measured steps are averaged.

    Raises:
        BatchSizeError: the reference is not a batch size.
        TrainingError: when training begins: a learning rate rule, a `Seesaw` or a second AdaScale
            also changes the learning rate.
    """

    def __init__(self, reference: int, *, window: int = 100) -> None:
        self._reference = checked_size(reference, "the reference of AdaScale")
        self._window = window
        self.noise = GradientNoise(window)
        self._left_out = 0
        self.gain = 1.0
        """The present gain."""
        self.gained = 0.0
        """The sum of the gains of all steps that changed the weights."""

    def on_fit_start(self, run: Run) -> None:
        """Refuse other things that multiply the learning rate by the batch size."""
        rule = run.hyperparameters.rules.get("lr")
        first = next((one for one in run.callbacks if isinstance(one, AdaScale)), self)
        if rule is not None:
            raise _scaled_already(rule, "leave rule out")
        if first is not self:
            raise _scaled_already(first, "leave one of the two out")

    def on_batch_start(self, run: Run, step: Step) -> None:
        """Multiply the learning rates that were just set."""
        self.gain = gain(self.noise, step.batch_size, self._reference)
        self._left_out = run.skipped_steps
        for group in [group for one in run.optimizers for group in one.param_groups]:
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(self.gain)
            else:
                group["lr"] *= self.gain

    def on_noise(self, run: Run, step: Step, signals: Signals) -> None:
        """Record what a step measured."""
        del run, step
        self.noise = self.noise.after(signals)

    def on_batch_end(self, run: Run, step: Step) -> None:
        """Log the gain, and the sum of the gains of all steps that were not skipped."""
        del step
        if run.skipped_steps == self._left_out:
            self.gained += self.gain
        run.log("gain", self.gain, reduce="last")
        run.log("gained", self.gained, reduce="last")

    def on_fit_end(self, run: Run) -> None:
        """Remove the gain from the learning rates, so that it is not mistaken for a base value."""
        run.hyperparameters.apply(run.timer.timestamp)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the sum."""
        return {"estimator": self.noise.to_state(), "gained": self.gained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved averages."""
        self.noise = self.noise.from_state(state["estimator"])
        self.gained = float(state["gained"])

    def __repr__(self) -> str:
        return f"AdaScale({self._reference}, window={self._window})"


def _scaled_already(by: object, instead: str) -> TrainingError:
    return TrainingError.cannot(
        "use AdaScale", why=f"{by!r} already scales the learning rate", instead=instead
    )
