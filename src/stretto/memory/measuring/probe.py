"""The memory of a step, known from a few real steps that are tiny."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any, final

from stretto.errors import FitError
from stretto.memory.limits import allocated_bytes, free_memory, guard
from stretto.memory.measuring.real import record_step
from stretto.memory.measuring.sandbox import sandbox
from stretto.memory.prediction.curve import MAXIMUM, MemoryCurve, Peak
from stretto.memory.prediction.fit import fit
from stretto.memory.prediction.predict import SIZES, Certainty
from stretto.memory.prediction.trace import step_tensors
from stretto.memory.step import WholeStep
from stretto.runtime import TrainStep
from stretto.runtime.out_of_memory import release_memory

CALIBRATION_SHARE = 10
"""The real step that checks a probe has about this part of the size that is found."""

SAFE_PART = 0.8
"""The part of what is free here that a step may need as far as its curve says."""

NOISE = Fraction(1, 10)
"""How far from a straight line an allocation may be; see `fit`."""


@final
class Probe:
    """What a step will need, from what tiny ones needed; made by `probe`."""

    def __init__(
        self, step: WholeStep, make_batch: Callable[[int], Any], also: Iterable[object]
    ) -> None:
        self._step = step
        self._make_batch = make_batch
        self._also = [vars(step.step), *also]
        self._largest_seen = max(SIZES)
        self.num_steps = 0
        """How many real steps it took."""
        self.num_samples = 0
        """How many samples they had."""
        self.sizes: set[int] = set()
        """The sizes of the steps."""
        self._recorded: dict[int, int] = {}
        self._recordings = self._record(SIZES)
        self.curve: MemoryCurve = fit(self._recordings, noise=NOISE)
        """Bytes as a function of the size."""

    @property
    def certainty_if_verified(self) -> Certainty:
        """How sure it is: an `estimate`, until a larger step has been taken: `calibrated`."""
        return "calibrated" if self._largest_seen > max(SIZES) else "estimate"

    def certainty(self, size: int) -> Certainty:
        """Return how sure it is of what a batch of that size needs; `tried` if one was taken."""
        return "tried" if size in self._recorded else self.certainty_if_verified

    @property
    def reason(self) -> str:
        """Why it is that sure and no surer."""
        return f"the allocations of real steps of up to {self._largest_seen} samples were followed"

    def peak(self, size: int) -> int:
        """Return the bytes that a batch of that size needs at once."""
        return self._recorded.get(size) or self.curve.peak(size)

    def guess(self, limit: int) -> int | None:
        """Return None: its curve can be asked about any size."""

    def at(self, size: int) -> Peak:
        """Return the moment of the peak, and what is allocated at it."""
        return self.curve.at(size)

    def largest(self, limit: int, *, maximum: int = MAXIMUM) -> int | None:
        """Return the largest size, up to `maximum`, that needs at most `limit` bytes.

        Calibrated once, by a step of about a tenth of it. None: not even one sample fits.

        Raises:
            FitError: the larger step has too little in common with the tiny ones.
        """
        size = self.curve.largest(limit, maximum=maximum)
        if size is None or self.verify(size):
            return size
        return self.curve.largest(limit, maximum=maximum)

    def verify(self, size: int) -> bool:
        """Return whether a step of about a tenth of that size needs what the curve says.

        One such step is taken; after it the answer is yes. It is smaller where this machine has
        no room for it.

        Raises:
            FitError: the larger step has too little in common with the tiny ones.
        """
        part = min(size // CALIBRATION_SHARE, self.largest_here() or 0)
        is_done = self._largest_seen > max(SIZES)
        return is_done or part <= self._largest_seen or self.calibrate(part)

    def largest_here(self) -> int | None:
        """Return the largest size that this machine seems to have room for a step of.

        None: for none, or the system does not tell.
        """
        device = self._step.device
        release_memory()
        try:
            free = free_memory(device).bytes
        except FitError:
            return None
        held = allocated_bytes(step_tensors(self._step), device)
        return self.curve.largest(int(SAFE_PART * free) + held)

    def calibrate(self, size: int) -> bool:
        """Take a real step of that size, and return whether the curve has said what it needs.

        Where it has not, the curve is mended by what was seen.

        Raises:
            FitError: the step has too little in common with the tiny ones.
        """
        expected, (recording,) = self.curve.peak(size), self._record((size,))
        self._largest_seen = max(size, self._largest_seen)
        if recording.peak == expected:
            return True
        self._recordings.append(recording)
        self.curve = fit(self._recordings, noise=NOISE)
        return False

    def _record(self, sizes: Iterable[int]) -> list[Any]:
        """Take steps that leave no trace; the first makes the optimizer's state."""
        recordings = []
        with (
            self._bounds(),
            sandbox(self._step.model, also=self._also),
        ):
            self._take(SIZES[0])
            for size in sizes:
                # Kernels of a GPU that see a size for the first time may prepare for it.
                if self._step.device.type != "cpu":
                    self._take(size)
                batch = self._make_batch(size)
                recordings.append(record_step(self._step, batch, size))
                self._recorded[size] = recordings[-1].peak
                self._count(size)
                del batch
        return recordings

    def _bounds(self) -> AbstractContextManager[Any]:
        """Let a step that this machine has no memory for raise an error."""
        if self._step.device.type != "cpu" or sys.platform != "linux":
            return contextlib.nullcontext()
        return guard(free_memory(self._step.device).bytes)

    def _take(self, size: int) -> None:
        self._step.run(self._make_batch(size))
        self._count(size)

    def _count(self, size: int) -> None:
        self.num_steps += 1
        self.num_samples += size * self._step.accumulation
        self.sizes.add(size)


def probe(
    step: TrainStep | WholeStep,
    make_batch: Callable[[int], Any],
    *,
    accumulation: int = 1,
    measures_noise: bool = False,
    also: Iterable[object] = (),
) -> Probe:
    """Return what a training step needs for a batch of any size, from real steps of 2 and 3.

    The events are the allocator's own, so the scratch of kernels, compiled modules, and whatever
    depends on values are seen. The steps leave no trace.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(1000, 10)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> found = probe(step, lambda size: torch.ones(size, 1000))
    >>> found.peak(100) > 100 * 4 * 1000, found.certainty(100)
    (True, 'estimate')

    Args:
        step: what is trained, and how.
        make_batch: returns a micro-batch of as many samples as it is told, on the model's device.
        accumulation: micro-batches of a step: from the second on, the gradients are there during
            the forward.
        measures_noise: whether the gradient of each micro-batch is kept apart before it is added.
        also: what else to put back after the steps; see `sandbox`.

    Raises:
        FitError: the steps do not allocate alike.
    """
    whole = WholeStep.of(step, accumulation=accumulation, measures_noise=measures_noise)
    return Probe(whole, make_batch, also)
