"""The result of a search: the size, its certainty and its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, final

from stretto.errors import samples_text
from stretto.memory.amounts import show_bytes
from stretto.memory.measuring.limits import MemoryLimit
from stretto.memory.measuring.probe import Probe
from stretto.memory.prediction.certainty import Certainty
from stretto.memory.prediction.cuda.prediction import CudaPrediction
from stretto.memory.prediction.predict import Prediction
from stretto.memory.search import CandidateSizes

Estimator: TypeAlias = Prediction | CudaPrediction | Probe
"""Estimates the memory of a step."""


class Cost(NamedTuple):
    """The cost of a search."""

    fake_steps: int = 0
    """Steps on fake tensors."""
    real_steps: int = 0
    num_samples: int = 0
    """Samples in the real steps."""
    num_out_of_memory: int = 0
    """How many of the real steps ran out of memory."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.fake_steps} steps without memory, {self.real_steps} real ones with "
            f"{samples_text(self.num_samples)}, {self.num_out_of_memory} out of memory, "
            f"{self.seconds:.2g} s"
        )


class Row(NamedTuple):
    """A row of the table of an answer."""

    size: int
    peak: int
    headroom: int
    """Bytes left below the limit; negative if the size exceeds it."""


def peaks_around(size: int, sizes: CandidateSizes) -> list[int]:
    """Return sizes for a table around the answer: fractions of it, itself, and larger ones.

    >>> peaks_around(100, CandidateSizes())
    [1, 12, 25, 50, 75, 100, 101, 125, 150]
    """
    parts = [size // 8, size // 4, size // 2, 3 * size // 4, size, 5 * size // 4, 3 * size // 2]
    wanted = [sizes.smallest, sizes.above(size), *(sizes.at_most(part) for part in parts)]
    return sorted({one for one in wanted if one is not None})


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """The largest micro-batch that fits, its certainty and the cost of the search.

    `str(answer)` prints all of it.

    >>> import torch
    >>> from stretto import SupervisedStep, find_batch_size
    >>> model = torch.nn.Linear(64, 1)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> answer = find_batch_size(step, torch.ones(2, 64), maximum=8)
    >>> answer.size, answer.too_large is None
    (8, True)
    """

    size: int
    """Samples of the largest micro-batch that fits."""
    certainty: Certainty
    """How certain the size is.

    - `exact`: every allocation of a step of this size was traced.
    - `upper bound`: a step needs at most `peak`, so more may fit.
    - `estimate`: a step may need more than `peak`.
    - `calibrated`: corrected by small real steps.
    - `tried`: a real step of this size has run.
    """
    too_large: int | None
    """The next size, which does not fit; None if the largest candidate fits."""
    limit: MemoryLimit
    """Bytes a step may use: free memory plus what the model and its optimizer occupy."""
    reserve: int
    """Bytes of the limit that stay free on purpose."""
    peak: int | None
    """Peak memory of a step of this size; None if only trials were run."""
    cost: Cost
    notes: tuple[str, ...] = ()
    """Reasons for the certainty, and other findings."""
    peaks: Mapping[int, int] = field(default_factory=dict, repr=False)
    """Peak memory of other sizes, if an estimator is known."""
    estimator: Any = field(default=None, repr=False, compare=False)
    """The `Prediction` or `Probe` used; None if only trials were run."""
    outside: Mapping[str, int] = field(default_factory=dict)
    """What takes memory of the device outside of the allocator, and how many bytes: the CUDA
    context, the buffers of NCCL. `limit` does not include it."""
    needs: Callable[[int], int] | None = field(default=None, repr=False, compare=False)
    """Returns the peak memory of any size; None if only trials were run."""

    @property
    def bound(self) -> str:
        """What limits the size: memory, or the data and `maximum`."""
        if self.too_large is None:
            return "all there are; more would fit"
        return "the largest that fits"

    def summary(self, size: int | None = None) -> str:
        """Return the size, its bound and its peak memory in one line.

        Args:
            size: printed instead of the size, if it was derived from it.
        """
        size = self.size if size is None else size
        need = "" if self.peak is None else f"a step needs {show_bytes(self.peak)} of "
        return f"{samples_text(size)}, {self.bound} ({self.certainty}: {need}{self._space})"

    @property
    def _space(self) -> str:
        return f"{self.limit}, {show_bytes(self.reserve)} of it left free"

    @property
    def headline(self) -> str:
        """The size, its certainty, and whether it is the largest that fits."""
        found = f"{samples_text(self.size)} ({self.certainty})"
        if self.too_large is None:
            return f"micro-batch: {found}, {self.bound}"
        return f"largest micro-batch that fits: {found}"

    def rows(self) -> Sequence[Row]:
        """Return the peak memory of sizes around the answer, the answer included."""
        return [
            Row(size, peak, self.limit.bytes - self.reserve - peak)
            for size, peak in sorted(self.peaks.items())
        ]

    def __str__(self) -> str:
        lines = [self.headline]
        if self.peak is None:
            lines.append(f"in {self._space}")
        else:
            lines.append(f"it needs {show_bytes(self.peak)} of {self._space}")
        if self.outside:
            total = show_bytes(self.limit.bytes + sum(self.outside.values()))
            taken = " and ".join(f"{what} {show_bytes(n)}" for what, n in self.outside.items())
            lines.append(f"outside of the allocator, of {total}: {taken}")
        if self.too_large is not None:
            lines.append(f"{samples_text(self.too_large)} would not fit")
        lines += self.notes
        lines.append(f"cost: {self.cost}")
        return "\n".join(lines)
