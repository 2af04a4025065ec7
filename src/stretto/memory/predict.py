"""The memory of a step, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, final

from stretto.errors import FitError
from stretto.memory.caching_allocator import fits, reserved
from stretto.memory.curve import MAXIMUM, MemoryCurve, Peak, largest
from stretto.memory.fit import fit, settled
from stretto.memory.modules import compiled_modules
from stretto.memory.recording import Place
from stretto.memory.step import TrainingStep
from stretto.memory.tracer import Tracer

Certainty = Literal["exact", "upper bound", "estimate", "calibrated", "tried"]
SIZES = (2, 3)
"""Sizes that are recorded. Never 1: a dimension of 1 is broadcast, and is another program."""


@final
class Prediction:
    """What a step will need, and how sure that is; made by `predict`."""

    def __init__(self, runs: list[_Run], *, is_compiled: bool, for_cuda: bool) -> None:
        self._runs = runs
        self._is_compiled = is_compiled
        self._for_cuda = for_cuda

    @property
    def certainty(self) -> Certainty:
        """How sure it is: `exact`, `upper bound` or `estimate`."""
        return "estimate" if self._for_cuda else self._judged()[0]

    @property
    def reason(self) -> str:
        """Why it is that sure and no surer."""
        habits = "the habits of CUDA were followed, unchecked; what lies outside its caching "
        on_top = f"{habits}allocator comes on top"
        return on_top if self._for_cuda else self._judged()[1]

    @property
    def num_steps(self) -> int:
        """How many fake steps it took."""
        return sum(run.tracer.num_steps for run in self._runs)

    @property
    def curve(self) -> MemoryCurve:
        """Bytes as a function of the size; where values are read, by the way that needs more."""
        size = max(max(run.curve.sizes) for run in self._runs)
        return max((run.curve for run in self._runs), key=lambda curve: curve.peak(size))

    def peak(self, size: int) -> int:
        """Return the bytes that a batch of that size needs at once.

        For CUDA, what its caching allocator reserves for them.
        """
        if self._for_cuda:
            return max(reserved(run.curve, size) for run in self._runs)
        return max(run.curve.peak(size) for run in self._runs)

    def at(self, size: int) -> Peak:
        """Return the moment of the peak, and what is allocated at it."""
        return max((run.curve.at(size) for run in self._runs), key=lambda peak: peak.bytes)

    def largest(self, limit: int, *, maximum: int = MAXIMUM) -> int | None:
        """Return the largest size, up to `maximum`, that needs at most `limit` bytes.

        Verified by a fake step of that size and one of the next. None: not even one sample fits.

        Raises:
            FitError: the step cannot be taken with as many samples.
        """
        while True:
            size = largest(lambda size: self._fits(size, limit), maximum=maximum)
            if size is None or (self.verify(size) and self.verify(size + 1)):
                return size

    def _fits(self, size: int, limit: int) -> bool:
        if any(run.curve.peak(size) > limit for run in self._runs):
            return False
        return not self._for_cuda or all(fits(run.curve, size, limit) for run in self._runs)

    def _judged(self) -> tuple[Certainty, str]:
        return _judged(self._runs, is_compiled=self._is_compiled)

    def verify(self, size: int) -> bool:
        """Take a fake step of that size, and return whether the curve has said what it needs.

        Where it has not, the curve is mended by what was seen: it bends more than was thought.

        Raises:
            FitError: the step cannot be taken with as many samples.
        """
        # Each is asked, so that each is mended.
        verified = [run.verify(size) for run in self._runs]
        return all(verified)


@final
class _Run:
    """Fake steps of several sizes, with the same answers to what fakes cannot tell."""

    def __init__(
        self, step: TrainingStep, make_batch: Callable[[int], Any], value: int, *, for_cuda: bool
    ) -> None:
        self.tracer = Tracer(step, make_batch, value, for_cuda=for_cuda)
        self.answers = self.tracer.answers
        first, steady = (self.tracer.record(size) for size in SIZES)
        alike = settled(first, steady)
        self._recordings = [alike or self.tracer.record(SIZES[0]), steady]
        self._verified = set(SIZES)
        self.curve = fit(self._recordings)

    def verify(self, size: int) -> bool:
        """Take a step of that size; where the curve was wrong, mend it and return False."""
        if size in self._verified or size < min(SIZES):
            return True
        recording = self.tracer.record(size)
        self._verified.add(size)
        if recording.peak == self.curve.peak(size):
            return True
        self._recordings.append(recording)
        self.curve = fit(self._recordings)
        return False


def predict(
    step: TrainingStep,
    make_batch: Callable[[int], Any],
    *,
    device: Literal["cpu", "cuda"] | None = None,
) -> Prediction:
    """Return what a training step needs for a batch of any size, without allocating it.

    The step is taken on fake tensors, with batches of 2 and 3 samples; every allocation is
    followed, and its bytes are a polynomial in the size. Neither the model nor the optimizer is
    touched, and the model may be on the meta device.

    >>> import torch
    >>> model = torch.nn.Linear(1000, 10)
    >>> step = TrainingStep(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).mean())
    >>> prediction = predict(step, lambda size: torch.ones(size, 1000))
    >>> prediction.largest(2**30), prediction.certainty
    (265738, 'exact')

    Args:
        step: what is trained, and how.
        make_batch: returns a micro-batch of as many samples as it is told. It is called where
            tensors are fake, so a large one costs nothing.
        device: the kind of device that is asked about; left out, the bytes of tensors are told,
            on whichever they are. For `cuda` no GPU is needed: the kernels' habits and the
            caching allocator are followed by a model of them. That is an estimate.

    Raises:
        FitError: the step cannot be taken on fake tensors; the message says why.
    """
    runs: list[_Run] = []
    failure: FitError | None = None
    for value in (0, 1):
        try:
            runs.append(_Run(step, make_batch, value, for_cuda=device == "cuda"))
        except FitError as error:
            failure = error
        if runs and not runs[0].answers.reads:
            break  # nothing is read, so a second run would be the same
    if not runs:
        assert failure is not None
        raise failure
    # The mark that torch leaves on a compiled function has no public name.
    is_function = hasattr(step.loss, "_torchdynamo_orig_callable")
    is_compiled = is_function or bool(compiled_modules(step.model))
    return Prediction(runs, is_compiled=is_compiled, for_cuda=device == "cuda")


def _judged(runs: list[_Run], *, is_compiled: bool) -> tuple[Certainty, str]:
    """Return how sure the runs are, and why."""
    scratch, reads, worst = (
        _places([getattr(run.answers, what) for run in runs])
        for what in ("scratch", "reads", "worst_cases")
    )
    # An optimizer reads values to scale or to skip its update; the larger run is the update.
    reads = [place for place in reads if place.phase != "optimizer"]
    doubts = []
    if scratch:
        doubts.append(f"kernels allocate for themselves in {_listed(scratch)}")
    if reads:
        doubts.append(f"values are read in {_listed(reads)}: it was taken with 0 and with 1")
    if doubts:
        return "estimate", "; ".join(doubts)
    if is_compiled:
        return "upper bound", "compiled code was followed as if it were not"
    if worst:
        where = _listed(worst)
        return "upper bound", f"shapes depend on values in {where}: they were taken as the largest"
    return "exact", "every allocation of the step was followed on fake tensors"


def _places(found: list[Mapping[str, Place]]) -> list[Place]:
    return list(dict.fromkeys(place for one in found for place in one.values()))


def _listed(places: list[Place]) -> str:
    names = list(dict.fromkeys(place.module or f"the {place.phase}" for place in places))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
