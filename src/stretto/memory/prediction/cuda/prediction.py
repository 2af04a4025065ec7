"""The memory that steps need on a GPU, from traces on fake tensors and a model of the allocator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from stretto.memory.prediction.allocator.caching_allocator import CachingAllocator
from stretto.memory.prediction.allocator.settings import AllocatorSettings
from stretto.memory.prediction.certainty import Certainty, judge
from stretto.memory.prediction.cuda.gpu import Gpu
from stretto.memory.prediction.cuda.sharding import Sharding
from stretto.memory.prediction.curve import Peak
from stretto.memory.prediction.fit import fit
from stretto.memory.prediction.recording import Recording
from stretto.memory.prediction.tracer import Tracer
from stretto.memory.step import WholeStep

SIZES = (2, 3)
"""Sizes of the first traces. Never 1, because a dimension of 1 is broadcast."""
GUESSES = 1
"""Traces that refine a guess."""
PARTS = 300
"""A guess is searched in steps of this part of it."""
SHARDED_SIZES = (1, 2)
"""The same for a sharded model. It is large, so few samples fit, and a trace takes seconds."""
COMMUNICATOR_BYTES = 384 << 20
"""What NCCL takes for a communicator: 32 channels with buffers of 10 and 2 MiB, as its log shows on
H100s (NVIDIA/nccl, issue 1685). Fewer GPUs or slower links take fewer channels."""


@final
class CudaPrediction:
    """The predicted memory of a step on a GPU; made by `predict`.

    Each size that is asked about is traced, because kernels take scratch memory that is no
    polynomial in the size.
    """

    def __init__(self, runs: list[CudaRun], *, is_compiled: bool, gpu: Gpu) -> None:
        self._runs = runs
        self._is_compiled = is_compiled
        self.gpu = gpu
        """The kind of GPU."""
        self._fitting: dict[int, int] = {}

    @property
    def certainty_if_verified(self) -> Certainty:
        """The certainty for a traced size: `estimate`, or `upper bound`."""
        best, _ = self._judged()
        return "estimate" if best == "exact" else best

    def certainty(self, size: int) -> Certainty:  # noqa: ARG002  each size is traced
        """Return the certainty for a size."""
        return self.certainty_if_verified

    @property
    def reason(self) -> str:
        """Why it has this certainty."""
        best, why = self._judged()
        done = (
            f"the kernels of the {self.gpu.name.upper()} and its caching allocator were simulated"
        )
        return done if best == "exact" else f"{done}; {why}"

    @property
    def num_steps(self) -> int:
        """Number of fake steps."""
        return sum(run.num_steps for run in self._runs)

    def peak(self, size: int) -> int:
        """Return the bytes that the caching allocator reserves for a step of that size.

        If memory is short, the allocator releases unused segments and tries again. So a step may
        fit into less memory. If `fits` has found that, this returns the smaller number.
        """
        reserved = max(run.reserved(size) for run in self._runs)
        return min(reserved, self._fitting.get(size, reserved))

    def allocated(self, size: int) -> int:
        """Return the largest number of bytes in use at once, `torch.cuda.max_memory_allocated`."""
        return max(run.allocated(size) for run in self._runs)

    @property
    def communication_bytes(self) -> int:
        """About what NCCL takes for its buffers, outside of the allocator and not in `peak`."""
        return COMMUNICATOR_BYTES * max(run.num_communicators for run in self._runs)

    def fits(self, size: int, limits: Sequence[int]) -> bool:
        """Return whether the allocator can serve a step of that size from each of the limits.

        Where memory is short, the allocator releases what is free, earlier or later depending on
        the limit. So a step may fit into less memory and not into more.
        """
        if not all(run.fits(size, limit) for run in self._runs for limit in limits):
            return False
        self._fitting[size] = min(limits)
        return True

    def at(self, size: int) -> Peak:
        """Return the moment of the most bytes in tensors, and the allocations at that moment."""
        peaks = (fit([run.recording(size)]).at(size) for run in self._runs)
        return max(peaks, key=lambda peak: peak.bytes)

    def guess(self, limit: int) -> int:
        """Return about the largest number of samples that fit into `limit` bytes."""
        return min(run.guess(limit) for run in self._runs)

    def verify(self, size: int) -> bool:  # noqa: ARG002  each size is traced
        """Return True: a size that is asked about has been traced."""
        return True

    def _judged(self) -> tuple[Certainty, str]:
        return judge([run.fake_values for run in self._runs], is_compiled=self._is_compiled)


@final
class CudaRun:
    """Traces of several sizes, all with the same value for elements that are read."""

    def __init__(
        self,
        step: WholeStep,
        make_batch: Callable[[int], Any],
        value: int,
        gpu: Gpu,
        sharding: Sharding | None = None,
    ) -> None:
        self._tracer = Tracer(step, make_batch, value, gpu=gpu, sharding=sharding)
        self.fake_values = self._tracer.fake_values
        self._recordings: dict[int, Recording] = {}
        self._replays: dict[int, CachingAllocator] = {}
        self._settings = AllocatorSettings.from_environment()
        self._sizes = SIZES if sharding is None else SHARDED_SIZES
        for size in self._sizes:
            self.recording(size)

    @property
    def num_steps(self) -> int:
        """Number of traces."""
        return self._tracer.num_steps

    @property
    def num_communicators(self) -> int:
        """Groups of ranks that this rank communicates with."""
        return self._tracer.num_communicators

    def recording(self, size: int) -> Recording:
        """Return the recording of the first steps with batches of that size."""
        if size not in self._recordings:
            self._recordings[size] = self._tracer.record_from_start(size)
        return self._recordings[size]

    def reserved(self, size: int) -> int:
        """Return the most reserved bytes, with no limit."""
        return self._replayed(size).peak_reserved

    def allocated(self, size: int) -> int:
        """Return the most bytes in blocks that are in use."""
        return self._replayed(size).peak_allocated

    def fits(self, size: int, limit: int) -> bool:
        """Return whether the allocator can serve the steps from `limit` bytes."""
        if self.reserved(size) <= limit:
            return True
        if self.allocated(size) > limit:
            return False
        return self._replay(self.recording(size), limit=limit) is not None

    def guess(self, limit: int) -> int:
        """Return about the largest number of samples that fit, from the nearest traced sizes."""
        low, high = self._sizes
        for _ in range(GUESSES):
            found = self._extrapolated(limit, low, high)
            if found <= max(self._sizes):
                return found
            self.recording(found)
            low, high = sorted(sorted(self._recordings, key=lambda size: abs(size - found))[:2])
        return self._extrapolated(limit, low, high)

    def _extrapolated(self, limit: int, low: int, high: int) -> int:
        """Return how many samples fit if each allocation grows with them in a straight line.

        Between two sizes that fit may be one that does not, so the search comes from above.
        """
        per_sample = (self.allocated(high) - self.allocated(low)) / (high - low)
        if per_sample <= 0:
            return high
        model, other = self.recording(high), self.recording(low)
        counts = _bytes(model)
        if len(other.allocations) != len(counts):
            return max(1, high + int((limit - self.reserved(high)) / per_sample))
        slopes = [(b - a) / (high - low) for a, b in zip(_bytes(other), counts, strict=True)]
        top = max(1, high + int((limit - self.allocated(high)) / per_sample))
        step = max(1, top // PARTS)
        for size in range(top, 0, -step):
            change = size - high
            sizes = [
                max(0, round(count + slope * change))
                for count, slope in zip(counts, slopes, strict=True)
            ]
            if self._replay(model, sizes, limit) is not None:
                return size
        return 1

    def _replayed(self, size: int) -> CachingAllocator:
        if size not in self._replays:
            replayed = self._replay(self.recording(size))
            assert replayed is not None
            self._replays[size] = replayed
        return self._replays[size]

    def _replay(
        self, recording: Recording, counts: Sequence[int] | None = None, limit: int | None = None
    ) -> CachingAllocator | None:
        counts = _bytes(recording) if counts is None else counts
        return replay(recording, counts, limit, self._settings)


def replay(
    recording: Recording,
    counts: Sequence[int],
    limit: int | None = None,
    settings: AllocatorSettings | None = None,
) -> CachingAllocator | None:
    """Give the allocations of a recording to the allocator; None: memory runs out.

    Args:
        recording: the order of allocations and frees.
        counts: the bytes of each allocation.
        limit: the bytes of the device.
        settings: options of the allocator.
    """
    allocator = CachingAllocator(limit, settings)
    allocate, free = allocator.allocate, allocator.free
    for event in recording.events:
        index = event.allocation
        if event.is_free:
            free(index)
        elif not allocate(index, counts[index], recording.allocations[index].stream):
            return None
    return allocator


def _bytes(recording: Recording) -> list[int]:
    return [one.bytes for one in recording.allocations]
