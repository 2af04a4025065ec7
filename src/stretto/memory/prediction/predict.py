"""Predict the memory of a step before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, final, overload

from stretto.errors import FitError
from stretto.memory.prediction.certainty import Certainty, is_compiled, judge
from stretto.memory.prediction.cuda.gpu import gpu_named
from stretto.memory.prediction.cuda.prediction import CudaPrediction, CudaRun
from stretto.memory.prediction.cuda.sharding import Shard, Sharding
from stretto.memory.prediction.cuda.unsharded import sharding_of
from stretto.memory.prediction.curve import MemoryCurve, Peak
from stretto.memory.prediction.fit import fit, settled
from stretto.memory.prediction.recording import Recording
from stretto.memory.prediction.tracer import Tracer
from stretto.memory.step import WholeStep
from stretto.runtime import TrainStep

SIZES = (2, 3)
"""Recorded sizes. Never 1, because a dimension of 1 is broadcast."""
READ_VALUES = (0, 1)
"""What elements are taken to be when a step reads them; the larger trace counts."""
MOST_RECORDINGS = 5
"""A curve that is still wrong with this many recordings is given up."""


@final
class Prediction:
    """The predicted memory of a step, with its certainty; made by `predict`."""

    def __init__(self, runs: list[_Run], *, is_compiled: bool) -> None:
        self._runs = runs
        self._is_compiled = is_compiled

    @property
    def certainty_if_verified(self) -> Certainty:
        """The certainty for a verified size: `exact`, `upper bound` or `estimate`."""
        return self._judged()[0]

    def certainty(self, size: int) -> Certainty:
        """Return the certainty for a size.

        It is `extrapolated` if no fake step of that size has run, because some kernels change with
        the size. An `estimate` stays an `estimate`.
        """
        best = self.certainty_if_verified
        is_known = best == "estimate" or all(size in run.verified for run in self._runs)
        return best if is_known else "extrapolated"

    @property
    def reason(self) -> str:
        """Why it has this certainty."""
        return self._judged()[1]

    @property
    def num_steps(self) -> int:
        """Number of fake steps."""
        return sum(run.tracer.num_steps for run in self._runs)

    @property
    def curve(self) -> MemoryCurve:
        """Bytes as a function of the size; if values are read, the larger of both runs.

        If no curve describes all sizes, it is the curve of the largest verified size.
        """
        size = max(max(run.verified) for run in self._runs)
        return max((run.curve_at(size) for run in self._runs), key=lambda curve: curve.peak(size))

    def peak(self, size: int) -> int:
        """Return the peak memory of a step of that size, in bytes."""
        return max(run.curve_at(size).peak(size) for run in self._runs)

    def at(self, size: int) -> Peak:
        """Return the moment of the peak and the allocations at that moment."""
        return max((run.curve_at(size).at(size) for run in self._runs), key=lambda peak: peak.bytes)

    def guess(self, limit: int) -> int | None:
        """Return roughly how many samples need `limit` bytes, for a search with fake steps.

        None if a curve describes all sizes.
        """
        guesses = [run.guess(limit) for run in self._runs]
        return min((one for one in guesses if one is not None), default=None)

    def verify(self, size: int) -> bool:
        """Run a fake step of that size; return whether it confirms the curve.

        If it does not, the curve is fitted again with this size. If no curve fits (kernels change
        with the size), each query runs a fake step of its own.

        Raises:
            FitError: the step fails with that many samples.
        """
        # Verify all runs, so that each curve is corrected.
        verified = [run.verify(size) for run in self._runs]
        return all(verified)

    def _judged(self) -> tuple[Certainty, str]:
        return judge([run.fake_values for run in self._runs], is_compiled=self._is_compiled)


@final
class _Run:
    """Fake steps of several sizes, all with the same value for elements that are read."""

    def __init__(self, step: WholeStep, make_batch: Callable[[int], Any], value: int) -> None:
        self.tracer = Tracer(step, make_batch, value)
        self.fake_values = self.tracer.fake_values
        self.verified: dict[int, MemoryCurve] = {}
        first, steady = (self.tracer.record(size) for size in SIZES)
        alike = settled(first, steady)
        self._recordings = [alike or self.tracer.record(SIZES[0]), steady]
        self._curve: MemoryCurve | None = None
        for recording in self._recordings:
            self.verified[recording.size] = fit([recording])
        self._fit()

    def curve_at(self, size: int) -> MemoryCurve:
        """Return the best known curve for a size."""
        if size not in self.verified and self._curve is None:
            self._record(size)
        return self.verified.get(size) or self._curve or self.verified[SIZES[0]]

    def guess(self, limit: int) -> int | None:
        """Return roughly how many samples need `limit` bytes, if no curve fits all sizes."""
        if self._curve is not None:
            return None
        peaks = sorted((size, curve.peak(size)) for size, curve in self.verified.items())
        low = max((one for one in peaks if one[1] <= limit), default=peaks[0])
        high = min((one for one in peaks if one > low), default=low)
        first = peaks[0] if high == low else low
        if high[1] <= first[1]:
            return low[0]
        return max(1, low[0] + (limit - low[1]) * (high[0] - first[0]) // (high[1] - first[1]))

    def verify(self, size: int) -> bool:
        """Run a step of that size; if the curve was wrong, correct it and return False."""
        if size in self.verified or self._curve is None:
            return True
        expected, recording = self._curve.peak(size), self._record(size)
        if recording is None or recording.peak == expected:
            return True
        if size >= min(SIZES):
            self._recordings.append(recording)
            self._fit()
        return False

    def _record(self, size: int) -> Recording | None:
        """Record a step of that size; None if a single sample is refused."""
        try:
            recording = self.tracer.record(size)
        except FitError:
            if size >= min(SIZES):
                raise
            return None  # batch normalisation refuses it
        self.verified[size] = fit([recording])
        return recording

    def _fit(self) -> None:
        """Fit a curve to all recordings; None if none fits."""
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


Made = TypeVar("Made", _Run, CudaRun)


@overload
def predict(
    step: TrainStep | WholeStep,
    make_batch: Callable[[int], Any],
    *,
    device: Literal["cpu"] | None = None,
    gpu: str | None = None,
    world_size: None = None,
    shard: str | Shard = "fsdp",
    accumulation: int = 1,
    measures_noise: bool = False,
) -> Prediction: ...


@overload
def predict(
    step: TrainStep | WholeStep,
    make_batch: Callable[[int], Any],
    *,
    device: Literal["cuda"],
    gpu: str | None = None,
    world_size: int | None = None,
    shard: str | Shard = "fsdp",
    accumulation: int = 1,
    measures_noise: bool = False,
) -> CudaPrediction: ...


def predict(
    step: TrainStep | WholeStep,
    make_batch: Callable[[int], Any],
    *,
    device: Literal["cpu", "cuda"] | None = None,
    gpu: str | None = None,
    world_size: int | None = None,
    shard: str | Shard = "fsdp",
    accumulation: int = 1,
    measures_noise: bool = False,
) -> Prediction | CudaPrediction:
    """Predict the memory of a training step for any batch size, without allocating it.

    The step runs on fake tensors with batches of 2 and 3 samples. Every allocation is traced, and
    its bytes are fitted by a polynomial in the size. Other sizes are extrapolated until a fake step
    of that size verifies them, as `find_batch_size` does. Neither model nor optimizer is modified,
    and the model may be on the meta device.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(1000, 10)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> prediction = predict(step, lambda size: torch.ones(size, 1000))
    >>> prediction.peak(1000), prediction.certainty(1000)
    (4240172, 'extrapolated')
    >>> prediction.verify(1000), prediction.certainty(1000)
    (True, 'exact')

    Args:
        step: the training step.
        make_batch: makes a micro-batch of a given size. It is called under the fake mode, so a
            large batch costs nothing.
        device: the device type to predict for. Default: only the bytes of tensors. `cuda` needs no
            GPU: its kernels and its caching allocator are simulated, for each size anew.
        gpu: the kind of GPU, such as `"a100"`. Default: `"h100"`.
        world_size: the number of ranks that the model is spread over; only for `cuda`. The memory
            is that of rank 0. It takes no other process: collectives move nothing. Default: a model
            that `fully_shard` has sharded is predicted for its ranks, any other for one rank.
        shard: how it is spread: `"fsdp"` (FSDP2, each block of a `ModuleList`, then the rest),
            `"hsdp:8"` (so over 8 ranks, with replicas), `"ddp"`, `"ddp:views"` (with
            `gradient_as_bucket_view`), or a function `shard(model, mesh)` that calls
            `fully_shard` or `parallelize_module`. The mesh has one dimension with all ranks. The
            function may make others, changes the model in place or returns another, and keeps
            the names of parameters. The step has the model before that and an optimizer of its
            parameters; the optimizer gets the shards.
        accumulation: micro-batches per step. From the second on, gradients exist during the
            forward pass.
        measures_noise: whether the gradient of each micro-batch is kept apart before it is
            accumulated.

    Raises:
        FitError: the step cannot run on fake tensors; the message says why.
        ConfigError: an environment variable with settings of the allocator cannot be read.
    """
    whole = WholeStep.of(step, accumulation=accumulation, measures_noise=measures_noise)
    if device == "cuda":
        kind = gpu_named(gpu)
        given = sharding_of(whole.step.model)
        sharding = given if world_size is None else Sharding(world_size, shard)
        if given is not None and world_size is not None:
            raise FitError.cannot(
                f"predict for {world_size} ranks",
                why="the model is sharded already",
                instead="leave world_size and shard out, or pass the model before it is sharded",
            )
        runs = _with_each_value(lambda value: CudaRun(whole, make_batch, value, kind, sharding))
        return CudaPrediction(runs, is_compiled=is_compiled(whole), gpu=kind)
    if world_size is not None:
        raise FitError.cannot(
            f"predict for {world_size} ranks on {device or 'this device'}",
            why="ranks are simulated on CUDA only",
            instead="write device='cuda', or leave world_size out",
        )
    own = _with_each_value(lambda value: _Run(whole, make_batch, value))
    return Prediction(own, is_compiled=is_compiled(whole))


def _with_each_value(make: Callable[[int], Made]) -> list[Made]:
    """Trace with the first value, and if any element is read, with the others."""
    runs: list[Made] = []
    failure: FitError | None = None
    for value in READ_VALUES:
        try:
            runs.append(make(value))
        except FitError as error:
            failure = error
        if runs and not runs[0].fake_values.reads:
            break
    if not runs:
        assert failure is not None
        raise failure
    return runs
