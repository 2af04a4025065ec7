"""The noise of the gradient in Composer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import final

from composer import State
from composer.core import Precision

from stretto.batching import NO_SIGNALS, Signals
from stretto.data import MicroBatch, Step
from stretto.errors import TrainingError
from stretto.integrations.meter import StepMeter


@final
class Noise:
    """Measures the noise of the gradient over the micro-batches that Composer cuts."""

    def __init__(self, meter: StepMeter) -> None:
        self.signals = NO_SIGNALS
        self._meter = meter
        self._micros: list[MicroBatch] = []
        self._open: AbstractContextManager[None] = nullcontext()
        self._most: int | float | None = None

    def begin(self, state: State, step: Step) -> None:
        """Begin a step. If it has one micro-batch on one rank, have Composer cut it into two."""
        whole, most = step.micro_batches[0], state.device_train_microbatch_size
        assert most is not None, "Composer has set it"
        parts, left = self._meter.micro_batches(step), sum(one.num_samples for one in step)
        size = max(one.num_samples for one in parts) if len(parts) > 1 else left
        if size < most:
            self._most, state.device_train_microbatch_size = most, size
        size = min(size, int(most))
        self._micros, self.signals = [], NO_SIGNALS
        for start in range(0, left, size):
            self._micros.append(replace(whole, num_samples=min(size, left - start)))

    def watch(self) -> None:
        """Measure the next backward pass."""
        if not self._micros:
            raise _other_parts("more")
        micro = self._micros.pop(0)
        self._open = self._meter.watch(micro, is_last=not self._micros)
        self._open.__enter__()

    def read(self, state: State) -> None:
        """Stop measuring; after the last pass of a step, read what was measured."""
        self._open.__exit__(None, None, None)
        if not self._micros:
            is_scaled = state.precision is Precision.AMP_FP16 and state.scaler is not None
            self.signals = self._meter.signals(state.scaler.get_scale() if is_scaled else 1.0)

    def end(self, state: State) -> Signals:
        """Return what the step measured."""
        if self._most is not None:
            self._most, state.device_train_microbatch_size = None, self._most
        if self._micros:
            raise _other_parts("fewer")
        return self.signals


def _other_parts(how: str) -> TrainingError:
    return TrainingError.cannot(
        "follow the noise of the gradient",
        why=f"split_batch returns {how} micro-batches than device_train_microbatch_size asks for",
        instead="plan the batch sizes, such as '0ep:32 1ep:64', or leave split_batch out",
    )
