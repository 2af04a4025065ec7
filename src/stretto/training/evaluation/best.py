"""The best evaluation so far; its checkpoint is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from stretto.batching.following import check_monitored, measured_value, metrics_of
from stretto.checkpoint import checkpoint_path
from stretto.settings import Checkpointing
from stretto.training.checkpointing.records import count, number
from stretto.training.settings import Evaluation


class BestEvaluation(NamedTuple):
    """The best evaluation of a run so far."""

    path: Path
    """Its checkpoint."""
    metric: str
    value: float


@final
class Best:
    """Tracks the best value of one metric.

    Args:
        settings: the metric, such as `validation/loss`, and whether lower or higher is better.
        evaluations: all evaluations of the run.

    Raises:
        TrainingError: no evaluation measures that metric.
    """

    def __init__(self, settings: Checkpointing | None, evaluations: Sequence[Evaluation]) -> None:
        self.monitor = settings.monitor if settings is not None else None
        self._sign = -1 if settings is not None and settings.mode == "max" else 1
        self.value = math.inf * self._sign
        self.sample: int | None = None
        """The position at which it was measured; None before the first."""
        # The position of the best one whose checkpoint is complete.
        self._kept: int | None = None
        if self.monitor is not None:
            check_monitored(self.monitor, metrics_of(evaluations))

    def is_beaten(self, metrics: Mapping[str, float], sample: int) -> bool:
        """Update with the metrics of an evaluation at `sample`; return whether it is the best."""
        value = measured_value(self.monitor, metrics)
        if value is None or not value * self._sign < self.value * self._sign:  # nan is never better
            return False
        self.value, self.sample = value, sample
        return True

    def confirm(self, sample: int) -> None:
        """Record that the checkpoint at `sample` is complete."""
        if sample == self.sample:
            self._kept = sample

    def paths(self, folder: Path) -> list[Path]:
        """Return the checkpoints to keep: of the best, and of the best that is complete."""
        kept = {sample for sample in (self.sample, self._kept) if sample is not None}
        return [checkpoint_path(folder, sample) for sample in sorted(kept)]

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far."""
        value = None if math.isinf(self.value) else self.value
        return {
            "monitor": self.monitor,
            "value": value,
            "sample": self.sample,
            "kept": self._kept,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value, if the metric is the same."""
        self.start_over()
        if state["monitor"] == self.monitor and state["value"] is not None:
            self.value, self.sample = number(state, "value"), count(state, "sample")
            if state.get("kept", self.sample) is not None:
                self._kept = count({"kept": self.sample, **state}, "kept")

    def start_over(self) -> None:
        """Reset the best value."""
        self.value, self.sample, self._kept = math.inf * self._sign, None, None
