"""The best evaluation so far, whose checkpoint is kept besides the newest ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from stretto.batching.adaptive.following import check_monitored, measured_value, metrics_of
from stretto.checkpoint import checkpoint_path
from stretto.settings import Checkpointing
from stretto.training.checkpointing.records import count, number
from stretto.training.settings import Evaluation


@final
class Best:
    """Watches one metric of one evaluation.

    Args:
        settings: names the metric, as `validation/loss`, and whether less or more of it is better.
        evaluations: those that there are.

    Raises:
        TrainingError: none of them measures that metric.
    """

    def __init__(self, settings: Checkpointing | None, evaluations: Sequence[Evaluation]) -> None:
        self._monitor = settings.monitor if settings is not None else None
        self._sign = -1 if settings is not None and settings.mode == "max" else 1
        self.value = math.inf * self._sign
        self.sample: int | None = None
        """The position at which it was measured; None before the first."""
        # Of the best one whose checkpoint is whole.
        self._kept: int | None = None
        if self._monitor is not None:
            check_monitored(self._monitor, metrics_of(evaluations))

    def is_beaten(self, metrics: Mapping[str, float], sample: int) -> bool:
        """Take the metrics of an evaluation at position `sample`; return whether they are best."""
        value = measured_value(self._monitor, metrics)
        if value is None or not value * self._sign < self.value * self._sign:  # nan is never better
            return False
        self.value, self.sample = value, sample
        return True

    def confirm(self, sample: int) -> None:
        """Note that the checkpoint at `sample` is whole."""
        if sample == self.sample:
            self._kept = sample

    def paths(self, folder: Path) -> list[Path]:
        """Return the checkpoints that must stay: of the best, and of the last that was written."""
        kept = {sample for sample in (self.sample, self._kept) if sample is not None}
        return [checkpoint_path(folder, sample) for sample in sorted(kept)]

    def state_dict(self) -> dict[str, Any]:
        """Return what is best so far."""
        value = None if math.isinf(self.value) else self.value
        return {
            "monitor": self._monitor,
            "value": value,
            "sample": self.sample,
            "kept": self._kept,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was best, if that was the same metric."""
        self.start_over()
        if state["monitor"] == self._monitor and state["value"] is not None:
            self.value, self.sample = number(state, "value"), count(state, "sample")
            if state.get("kept", self.sample) is not None:
                self._kept = count({"kept": self.sample, **state}, "kept")

    def start_over(self) -> None:
        """Forget what was best."""
        self.value, self.sample, self._kept = math.inf * self._sign, None, None
