"""Estimate the memory of a step from a few small real steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, final

from stretto.errors import FitError
from stretto.memory.measuring.limits import allocated_bytes, bounded, free_memory
from stretto.memory.measuring.real import record_step
from stretto.memory.measuring.sandbox import sandbox
from stretto.memory.prediction.certainty import Certainty
from stretto.memory.prediction.curve import MemoryCurve, Peak
from stretto.memory.prediction.fit import fit
from stretto.memory.prediction.predict import SIZES
from stretto.memory.prediction.tensors import step_tensors
from stretto.memory.step import WholeStep
from stretto.runtime import TrainStep
from stretto.runtime.out_of_memory import release_memory

CALIBRATION_SHARE = 10
"""The real step that checks a probe has about this fraction (1/10) of the size."""

SAFE_PART = 0.8
"""A step is run here only if its estimate is below this fraction of the free memory."""

NOISE = Fraction(1, 10)
"""How far an allocation may deviate from a straight line; see `fit`."""


@final
class Probe:
    """Estimated memory of a step, extrapolated from small steps; made by `probe`."""

    def __init__(self, step: WholeStep, make_batch: Callable[[int], Any]) -> None:
        self._step = step
        self._make_batch = make_batch
        self._largest_seen = max(SIZES)
        self.num_steps = 0
        """Number of real steps."""
        self.num_samples = 0
        """Number of samples in these steps."""
        self.sizes: set[int] = set()
        """The batch sizes of these steps."""
        self._recorded: dict[int, int] = {}
        self._recordings = self._record(SIZES)
        self.curve: MemoryCurve = fit(self._recordings, noise=NOISE)
        """Bytes as a function of the size."""

    @property
    def certainty_if_verified(self) -> Certainty:
        """`calibrated` if a larger step has run, else `estimate`."""
        return "calibrated" if self._largest_seen > max(SIZES) else "estimate"

    def certainty(self, size: int) -> Certainty:
        """Return the certainty for a size; `tried` if a step of that size has run."""
        return "tried" if size in self._recorded else self.certainty_if_verified

    @property
    def reason(self) -> str:
        """Why it has this certainty."""
        return f"the allocations of real steps of up to {self._largest_seen} samples were followed"

    def peak(self, size: int) -> int:
        """Return the peak memory of a step of that size, in bytes."""
        return self._recorded.get(size) or self.curve.peak(size)

    def guess(self, limit: int) -> int | None:
        """Return None: the curve gives an answer for any size."""

    def at(self, size: int) -> Peak:
        """Return the moment of the peak and the allocations at that moment."""
        return self.curve.at(size)

    def verify(self, size: int) -> bool:
        """Return whether a step of about a tenth of that size confirms the curve.

        Only one such step is run; later calls return True. It is smaller if this machine has too
        little memory.

        Raises:
            FitError: the larger step differs too much from the small ones.
        """
        part = min(size // CALIBRATION_SHARE, self.largest_here() or 0)
        is_done = self._largest_seen > max(SIZES)
        return is_done or part <= self._largest_seen or self.calibrate(part)

    def largest_here(self) -> int | None:
        """Return the largest size whose step probably fits on this machine.

        None if no size fits, or if the free memory is unknown.
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
        """Run a real step of that size; return whether it confirms the curve.

        If it does not, the curve is fitted again with this step.

        Raises:
            FitError: the step differs too much from the small ones.
        """
        expected, (recording,) = self.curve.peak(size), self._record((size,))
        self._largest_seen = max(size, self._largest_seen)
        if recording.peak == expected:
            return True
        self._recordings.append(recording)
        self.curve = fit(self._recordings, noise=NOISE)
        return False

    def _record(self, sizes: Iterable[int]) -> list[Any]:
        """Run and record steps in a sandbox; the first creates the optimizer state."""
        recordings = []
        with bounded(self._step.device), sandbox(self._step.model, vars(self._step.step)):
            self._take(SIZES[0])
            for size in sizes:
                # GPU kernels may allocate extra memory for a size that they see first.
                if self._step.device.type != "cpu":
                    self._take(size)
                batch = self._make_batch(size)
                recordings.append(record_step(self._step, batch, size))
                self._recorded[size] = recordings[-1].peak
                self._count(size)
                del batch
        return recordings

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
) -> Probe:
    """Estimate the memory of a training step for any batch size from real steps of 2 and 3 samples.

    The allocator itself reports the events. So scratch memory of kernels, compiled modules and
    value-dependent shapes are included. Everything is restored after the steps.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(1000, 10)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> found = probe(step, lambda size: torch.ones(size, 1000))
    >>> found.peak(100) > 100 * 4 * 1000, found.certainty(100)
    (True, 'estimate')

    Args:
        step: the training step.
        make_batch: makes a micro-batch of a given size on the model's device.
        accumulation: micro-batches per step. From the second on, gradients exist during the
            forward pass.
        measures_noise: whether the gradient of each micro-batch is kept apart before it is
            accumulated.

    Raises:
        FitError: the steps do not have the same allocations.
    """
    whole = WholeStep.of(step, accumulation=accumulation, measures_noise=measures_noise)
    return Probe(whole, make_batch)
