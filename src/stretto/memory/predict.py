"""The memory of a step, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, final

from stretto.memory.curve import MAXIMUM, MemoryCurve, Peak
from stretto.memory.fakes import FakeWorld
from stretto.memory.fit import fit
from stretto.memory.modules import ModuleWatch
from stretto.memory.recording import Recording
from stretto.memory.step import TrainingStep
from stretto.memory.trace import trace

Certainty = Literal["exact", "upper bound", "estimate", "calibrated", "tried"]
SIZES = (2, 3)
"""Sizes that are recorded. Never 1: a dimension of 1 is broadcast, and is another program."""


@final
class Prediction:
    """What a step will need, and how sure that is; made by `predict`.

    Attributes:
        curve: bytes as a function of the size of the batch.
        certainty: `exact`, or `upper bound` or `estimate` for the stated reason.
        reason: why it is that sure and no surer.
        num_steps: how many fake steps it took.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._verified: set[int] = set(SIZES)
        self._recordings = [tracer.record(size) for size in SIZES]
        self.curve: MemoryCurve = fit(self._recordings)
        self.certainty: Certainty = "exact"
        self.reason = "each allocation of a step on fake tensors is followed"

    @property
    def num_steps(self) -> int:
        """How many fake steps it took."""
        return self._tracer.num_steps

    def peak(self, size: int) -> int:
        """Return the bytes that a batch of that size needs at once."""
        return self.curve.peak(size)

    def at(self, size: int) -> Peak:
        """Return the moment of the peak, and what is allocated at it."""
        return self.curve.at(size)

    def largest(self, limit: int, *, maximum: int = MAXIMUM) -> int | None:
        """Return the largest size, up to `maximum`, that needs at most `limit` bytes.

        Verified by a fake step of that size and one of the next. None: not even one sample fits.
        """
        while True:
            size = self.curve.largest(limit, maximum=maximum)
            if size is None or (self.verify(size) and self.verify(size + 1)):
                return size

    def verify(self, size: int) -> bool:
        """Take a fake step of that size, and return whether the curve has said what it needs.

        Where it has not, the curve is mended by what was seen: it bends more than was thought.
        """
        if size in self._verified or size < min(SIZES):
            return True
        recording = self._tracer.record(size)
        self._verified.add(size)
        if recording.peak == self.curve.peak(size):
            return True
        self._recordings.append(recording)
        self.curve = fit(self._recordings)
        return False


@final
class Tracer:
    """Takes fake steps of any size.

    The first is taken twice: the optimizer makes its state in it, and every later step finds it.
    """

    def __init__(self, step: TrainingStep, make_batch: Callable[[int], Any]) -> None:
        self._world = FakeWorld()
        self._make_batch = make_batch
        self._step = self._world.step(step)
        self._is_warm = False
        self.num_steps = 0

    def record(self, size: int) -> Recording:
        """Return the recording of a step with a batch of that size."""
        if not self._is_warm:
            self._is_warm = True
            self.record(size)
        self.num_steps += 1
        watch = ModuleWatch()
        with self._world.entered(), watch.watching(self._step.model):
            batch = self._world.batch(self._make_batch(size))
            return trace(self._step, batch, size, watch=watch)


def predict(step: TrainingStep, make_batch: Callable[[int], Any]) -> Prediction:
    """Return what a training step needs for a batch of any size, without allocating it.

    The step is taken on fake tensors, with batches of 2 and 3 samples; every allocation is
    followed, and its bytes are a polynomial in the size. Neither the model nor the optimizer is
    touched.

    >>> import torch
    >>> model = torch.nn.Linear(1000, 10)
    >>> step = TrainingStep(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).mean())
    >>> prediction = predict(step, lambda size: torch.ones(size, 1000))
    >>> prediction.largest(2**30), prediction.certainty
    (265128, 'exact')

    Args:
        step: what is trained, and how.
        make_batch: returns a micro-batch of as many samples as it is told. It is called where
            tensors are fake, so a large one costs nothing.

    Raises:
        FitError: the step cannot be taken on fake tensors; the message says why.
    """
    return Prediction(Tracer(step, make_batch))
