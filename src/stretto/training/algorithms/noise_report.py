"""Report the noise scale in the metrics, without acting on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from stretto.batching import Signals
from stretto.data import Step
from stretto.noise import GradientNoise
from stretto.run import Run
from stretto.training.callback import Callback


@final
class NoiseReport(Callback):
    """Logs the gradient noise scale with its confidence interval.

    Lines of metrics get `noise_scale`, `noise_scale_low` and `noise_scale_high` as soon as they are
    known. `NoiseScale` is the policy that follows them.

    >>> NoiseReport(window=50)
    NoiseReport(window=50, confidence=0.9)

    Args:
        window: the number of measured steps in the averages.
        confidence: the probability that the interval contains the true noise scale.

    Raises:
        BatchSizeError: a value is out of range.
    """

    def __init__(self, *, window: int = 100, confidence: float = 0.9) -> None:
        self._settings = f"window={window}, confidence={confidence}"
        self.noise = GradientNoise(window, confidence)
        """The noise so far."""

    def on_noise(self, run: Run, step: Step, signals: Signals) -> None:
        """Add what a step measured."""
        del run, step
        self.noise = self.noise.after(signals)

    def on_batch_end(self, run: Run, step: Step) -> None:
        """Log the noise scale and its interval, once they are known."""
        del step
        if self.noise.scale is not None:
            lower, upper = self.noise.interval
            run.log("noise_scale", self.noise.scale, reduce="last")
            run.log("noise_scale_low", lower, reduce="last")
            run.log("noise_scale_high", upper, reduce="last")

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        return {"estimator": self.noise.to_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved averages."""
        self.noise = self.noise.from_state(state["estimator"])

    def __repr__(self) -> str:
        return f"NoiseReport({self._settings})"
