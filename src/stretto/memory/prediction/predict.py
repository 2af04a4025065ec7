"""The memory of a step, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, final

from torch import nn

from stretto.errors import FitError
from stretto.memory.finding.candidates import CandidateSizes, search
from stretto.memory.prediction.caching_allocator import fits, reserved
from stretto.memory.prediction.curve import MAXIMUM, MemoryCurve, Peak, largest
from stretto.memory.prediction.fit import fit, settled
from stretto.memory.prediction.modules import compiled_modules
from stretto.memory.prediction.recording import Place, Recording
from stretto.memory.prediction.tracer import Tracer
from stretto.memory.step import WholeStep
from stretto.runtime import TrainStep

Certainty = Literal["exact", "upper bound", "estimate", "extrapolated", "calibrated", "tried"]
SIZES = (2, 3)
"""Sizes that are recorded. Never 1: a dimension of 1 is broadcast, and is another program."""
MOST_RECORDINGS = 5
"""A curve that is still wrong with so many recordings does not describe the step."""


@final
class Prediction:
    """What a step will need, and how sure that is; made by `predict`."""

    def __init__(self, runs: list[_Run], *, is_compiled: bool, for_cuda: bool) -> None:
        self._runs = runs
        self._is_compiled = is_compiled
        self._for_cuda = for_cuda

    @property
    def certainty_if_verified(self) -> Certainty:
        """How sure it is of a size that was verified: `exact`, `upper bound` or `estimate`."""
        return "estimate" if self._for_cuda else self._judged()[0]

    def certainty(self, size: int) -> Certainty:
        """Return how sure it is of what a batch of that size needs.

        `extrapolated` where no fake step of that size was taken: some kernels change with the size.
        An `estimate` stays one.
        """
        best = self.certainty_if_verified
        is_known = best == "estimate" or all(run.is_verified(size) for run in self._runs)
        return best if is_known else "extrapolated"

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
        """Bytes as a function of the size; where values are read, by the way that needs more.

        Where no curve describes all sizes, that of the largest size that was verified.
        """
        size = max(run.largest_size for run in self._runs)
        return max((run.curve_at(size) for run in self._runs), key=lambda curve: curve.peak(size))

    def peak(self, size: int) -> int:
        """Return the bytes that a batch of that size needs at once.

        For CUDA, what its caching allocator reserves for them.
        """
        if self._for_cuda:
            return max(reserved(run.curve_at(size), size) for run in self._runs)
        return max(run.curve_at(size).peak(size) for run in self._runs)

    def at(self, size: int) -> Peak:
        """Return the moment of the peak, and what is allocated at it."""
        return max((run.curve_at(size).at(size) for run in self._runs), key=lambda peak: peak.bytes)

    def largest(self, limit: int, *, maximum: int = MAXIMUM) -> int | None:
        """Return the largest size, up to `maximum`, that needs at most `limit` bytes.

        Verified by a fake step of that size and one of the next. None: not even one sample fits.

        Raises:
            FitError: the step cannot be taken with as many samples.
        """
        while True:
            size = self._search(limit, maximum)
            if size is None or (self.verify(size) and self.verify(size + 1)):
                return size

    def guess(self, limit: int) -> int | None:
        """Return about how many samples need `limit` bytes, for a search that takes fake steps.

        None if a curve describes all sizes, and can be asked about any.
        """
        guesses = [run.guess(limit) for run in self._runs]
        return min((one for one in guesses if one is not None), default=None)

    def _search(self, limit: int, maximum: int) -> int | None:
        guess = self.guess(limit)
        if guess is None:
            return largest(lambda size: self._fits(size, limit), maximum=maximum)
        if not self._fits(1, limit):
            return None
        sizes = CandidateSizes(maximum=maximum)
        return search(lambda size: self._fits(size, limit), sizes, guess=guess).size

    def _fits(self, size: int, limit: int) -> bool:
        curves = [run.curve_at(size) for run in self._runs]
        if any(curve.peak(size) > limit for curve in curves):
            return False
        return not self._for_cuda or all(fits(curve, size, limit) for curve in curves)

    def _judged(self) -> tuple[Certainty, str]:
        return _judged(self._runs, is_compiled=self._is_compiled)

    def verify(self, size: int) -> bool:
        """Take a fake step of that size, and return whether the curve has said what it needs.

        Where it has not, the curve goes through this size from now on. If no curve can (a kernel
        is another for other sizes), each size that is asked about gets a fake step of its own.

        Raises:
            FitError: the step cannot be taken with as many samples.
        """
        # Each is asked, so that each is mended.
        verified = [run.verify(size) for run in self._runs]
        return all(verified)


@final
class _Run:
    """Fake steps of several sizes, with the same value for every element that is read."""

    def __init__(
        self, step: WholeStep, make_batch: Callable[[int], Any], value: int, *, for_cuda: bool
    ) -> None:
        self.tracer = Tracer(step, make_batch, value, for_cuda=for_cuda)
        self.fake_values = self.tracer.fake_values
        self._verified: dict[int, MemoryCurve] = {}
        first, steady = (self.tracer.record(size) for size in SIZES)
        alike = settled(first, steady)
        self._recordings = [alike or self.tracer.record(SIZES[0]), steady]
        self._curve: MemoryCurve | None = None
        for recording in self._recordings:
            self._verified[recording.size] = fit([recording])
        self._fit()

    @property
    def largest_size(self) -> int:
        """The largest size that was verified."""
        return max(self._verified)

    def is_verified(self, size: int) -> bool:
        """Return whether a step of that size was taken."""
        return size in self._verified

    def curve_at(self, size: int) -> MemoryCurve:
        """Return a curve that is right for a size, as far as is known."""
        if size not in self._verified and self._curve is None:
            self._record(size)
        return self._verified.get(size) or self._curve or self._verified[SIZES[0]]

    def guess(self, limit: int) -> int | None:
        """Return about how many samples need `limit` bytes, if no curve describes all sizes."""
        if self._curve is not None:
            return None
        peaks = sorted((size, curve.peak(size)) for size, curve in self._verified.items())
        low = max((one for one in peaks if one[1] <= limit), default=peaks[0])
        high = min((one for one in peaks if one > low), default=low)
        first = peaks[0] if high == low else low
        if high[1] <= first[1]:
            return low[0]
        return max(1, low[0] + (limit - low[1]) * (high[0] - first[0]) // (high[1] - first[1]))

    def verify(self, size: int) -> bool:
        """Take a step of that size; where the curve was wrong, mend it and return False."""
        if size in self._verified or self._curve is None:
            return True
        expected, recording = self._curve.peak(size), self._record(size)
        if recording is None or recording.peak == expected:
            return True
        if size >= min(SIZES):
            self._recordings.append(recording)
            self._fit()
        return False

    def _record(self, size: int) -> Recording | None:
        """Take a step of that size; None where a step cannot be taken with a single sample."""
        try:
            recording = self.tracer.record(size)
        except FitError:
            if size >= min(SIZES):
                raise
            return None  # as batch normalisation refuses
        self._verified[size] = fit([recording])
        return recording

    def _fit(self) -> None:
        """Make a curve through all recordings; None where there is none."""
        try:
            curve = fit(self._recordings)
        except FitError:
            curve = None
        is_right = (
            curve is not None
            and len(self._recordings) <= MOST_RECORDINGS
            and all(curve.peak(one.size) == one.peak for one in self._recordings)
        )
        self._curve = curve if is_right else None


def predict(
    step: TrainStep | WholeStep,
    make_batch: Callable[[int], Any],
    *,
    device: Literal["cpu", "cuda"] | None = None,
    accumulation: int = 1,
    measures_noise: bool = False,
) -> Prediction:
    """Return what a training step needs for a batch of any size, without allocating it.

    The step is taken on fake tensors, with batches of 2 and 3 samples; every allocation is
    followed, and its bytes are taken to be a polynomial in the size. That is extrapolated until
    a step of the size in question has verified it, as `largest` does. Neither the model nor the
    optimizer is touched, and the model may be on the meta device.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(1000, 10)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> prediction = predict(step, lambda size: torch.ones(size, 1000))
    >>> size = prediction.largest(2**30)
    >>> size, prediction.certainty(size), prediction.certainty(1000)
    (265738, 'exact', 'extrapolated')

    Args:
        step: what is trained, and how.
        make_batch: returns a micro-batch of as many samples as it is told. It is called where
            tensors are fake, so a large one costs nothing.
        device: the kind of device that is asked about; left out, the bytes of tensors are told,
            on whichever they are. For `cuda` no GPU is needed: the kernels' habits and the
            caching allocator are followed by a model of them. That is an estimate.
        accumulation: micro-batches of a step: from the second on, the gradients are there during
            the forward.
        measures_noise: whether the gradient of each micro-batch is kept apart before it is added.

    Raises:
        FitError: the step cannot be taken on fake tensors; the message says why.
    """
    whole = WholeStep.of(step, accumulation=accumulation, measures_noise=measures_noise)
    runs: list[_Run] = []
    failure: FitError | None = None
    for value in (0, 1):
        try:
            runs.append(_Run(whole, make_batch, value, for_cuda=device == "cuda"))
        except FitError as error:
            failure = error
        if runs and not runs[0].fake_values.reads:
            break  # nothing is read, so a second run would be the same
    if not runs:
        assert failure is not None
        raise failure
    is_compiled = any(map(_is_compiled, vars(whole.step).values()))
    return Prediction(runs, is_compiled=is_compiled, for_cuda=device == "cuda")


def _is_compiled(part: object) -> bool:
    """Return whether a part of a step runs as compiled code."""
    # The mark that torch leaves on a compiled function has no public name.
    is_function = hasattr(part, "_torchdynamo_orig_callable")
    return is_function or (isinstance(part, nn.Module) and bool(compiled_modules(part)))


def _judged(runs: list[_Run], *, is_compiled: bool) -> tuple[Certainty, str]:
    """Return how sure the runs are, and why."""
    scratch, reads, worst = (
        _places([getattr(run.fake_values, what) for run in runs])
        for what in ("scratch", "reads", "worst_cases")
    )
    # An optimizer reads values to scale or to skip its update; the larger run is the update.
    reads = [place for place in reads if place.phase != "optimizer"]
    doubts = []
    if scratch:
        where = _listed(scratch)
        doubts.append(f"kernels allocate for themselves in {where}, which is bounded from above")
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
