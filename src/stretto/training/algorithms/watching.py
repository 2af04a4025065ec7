"""Callbacks that follow what is measured: early stopping, and a report of the noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, final

from stretto.batching import Signals
from stretto.batching.metrics import measured_value
from stretto.data import Step
from stretto.errors import TrainingError
from stretto.noise import GradientNoise
from stretto.run import Run
from stretto.runtime.packing import number
from stretto.schedules.fields import one_of
from stretto.timing import Time, TimeLike
from stretto.training.callback import Callback


@final
class EarlyStopping(Callback):
    """Stops the run when a metric has not improved for a time.

    >>> EarlyStopping("validation/loss", patience="1ep")
    EarlyStopping('validation/loss', patience='1ep')

    Args:
        monitor: the metric, as it is logged: `"validation/loss"`.
        patience: for how long, in any unit, the best value may stay as it is.
        mode: whether less or more of the metric is better.
        min_delta: by how much a value must be better to count.

    Raises:
        TimeError: the patience is not a time.
        TrainingError: there is no such mode; or, in a trainer, no evaluation measures the metric.
    """

    def __init__(
        self,
        monitor: str = "validation/loss",
        *,
        patience: TimeLike,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        one_of(mode, "mode", ("min", "max"), TrainingError)
        self.monitor: str = monitor
        self._patience = Time(patience)
        self._sign, self._min_delta = (1 if mode == "min" else -1), min_delta
        self._best = math.inf
        self._since: float | None = None

    def on_build(self, run: Run) -> None:
        """Place the patience on the clock of the run.

        Raises:
            ConversionError: a fact is missing.
        """
        self._axis = run.horizon.axis(self._patience.unit)
        self._ticks = float(run.horizon.ticks(self._patience, self._axis))

    def on_evaluation_end(
        self,
        run: Run,
        name: str,  # noqa: ARG002
        metrics: Mapping[str, float],
    ) -> None:
        """Compare the metric with the best one so far."""
        value = measured_value(self.monitor, metrics)
        if value is None:
            return
        now = float(self._axis.read(run.timer.timestamp))
        if value * self._sign < self._best - self._min_delta:
            self._best, self._since = value * self._sign, now
        elif self._since is None:  # nan from the beginning
            self._since = now
        elif now - self._since >= self._ticks:
            best = self._best * self._sign
            run.stop(f"{self.monitor} was not better than {best:g} for {self._patience}")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its time."""
        return {"best": self._best if math.isfinite(self._best) else None, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._best = math.inf if state["best"] is None else float(state["best"])
        self._since = None if state["since"] is None else number(state, "since")

    def __repr__(self) -> str:
        mode = "" if self._sign == 1 else ", mode='max'"
        delta = f", min_delta={self._min_delta}" if self._min_delta else ""
        return f"EarlyStopping({self.monitor!r}, patience='{self._patience}'{mode}{delta})"


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
