"""What a finder has found: the size, how sure that is, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

from stretto.memory.amounts import show_bytes
from stretto.memory.finding.candidates import CandidateSizes
from stretto.memory.limits import MemoryLimit
from stretto.memory.prediction.predict import Certainty


class MemoryEstimator(Protocol):
    """Says what a step needs: a prediction or a probe."""

    @property
    def certainty_if_verified(self) -> Certainty:
        """How sure it is of a size that was verified."""

    @property
    def reason(self) -> str:
        """Why it is that sure."""

    def certainty(self, size: int) -> Certainty:
        """Return how sure it is of a size."""

    def peak(self, size: int) -> int:
        """Return the bytes that a batch of that size needs at once."""

    def guess(self, limit: int) -> int | None:
        """Return about how many samples need `limit` bytes if each answer costs a step.

        None if it can be asked about any size for nothing.
        """

    def verify(self, size: int) -> bool:
        """Return whether a step of that size confirms it."""


@runtime_checkable
class RealStepEstimator(MemoryEstimator, Protocol):
    """One that takes real steps: a probe."""

    num_samples: int
    """Samples in its steps."""

    def largest_here(self) -> int | None:
        """Return the largest size that this machine seems to have room for a step of."""

    def calibrate(self, size: int) -> bool:
        """Take a real step of that size, and return whether it confirms the estimator."""


class Cost(NamedTuple):
    """What it took to find an answer."""

    fake_steps: int = 0
    """Steps on tensors that have no memory."""
    real_steps: int = 0
    num_samples: int = 0
    """Samples in the real steps."""
    num_out_of_memory: int = 0
    """How many of the real steps ran out of memory."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.fake_steps} steps without memory, {self.real_steps} real ones with "
            f"{self.num_samples:,} samples, {self.num_out_of_memory} out of memory, "
            f"{self.seconds:.2g} s"
        )


class Row(NamedTuple):
    """A line of the table of an answer."""

    size: int
    peak: int
    headroom: int
    """What is left of the limit; negative where that size exceeds it."""


def peaks_around(size: int, sizes: CandidateSizes) -> list[int]:
    """Return sizes that show how an answer came about: parts of it, itself, and what is beyond.

    >>> peaks_around(100, CandidateSizes())
    [1, 12, 25, 50, 75, 100, 101, 125, 150]
    """
    parts = [size // 8, size // 4, size // 2, 3 * size // 4, size, 5 * size // 4, 3 * size // 2]
    wanted = [sizes.smallest, sizes.above(size), *(sizes.at_most(part) for part in parts)]
    return sorted({one for one in wanted if one is not None})


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """The largest micro-batch that fits, how sure that is, and what it cost to know.

    `str(answer)` says all of it.

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
    """How sure that is.

    - `exact`: every allocation of a step of this size was followed.
    - `upper bound`: a step needs at most what is said, so more may fit.
    - `estimate`: it may need more than is said.
    - `calibrated`: corrected by small real steps.
    - `tried`: a real step of this size was taken.
    """
    too_large: int | None
    """The next size known not to fit; None where the largest that was wanted does."""
    limit: MemoryLimit
    """What a step may use: what is free, and what the model and its optimizer have already."""
    reserve: int
    """Bytes of it that are left free on purpose."""
    peak: int | None
    """What a step of this size needs; None where only trials know."""
    cost: Cost
    notes: tuple[str, ...] = ()
    """Why it is as sure as it is, and what was learnt on the way."""
    peaks: Mapping[int, int] = field(default_factory=dict, repr=False)
    """What other sizes need, where an estimator has said so."""
    estimator: Any = field(default=None, repr=False, compare=False)
    """The `Prediction` or probe behind it; None where only trials know."""
    needs: Callable[[int], int] | None = field(default=None, repr=False, compare=False)
    """Returns what a step of any size needs, as `peaks` does; None where only trials know."""

    @property
    def bound(self) -> str:
        """What keeps the size from being larger: memory, or the data and `maximum`."""
        if self.too_large is None:
            return "all there are; more would fit"
        return "the largest that fits"

    def summary(self, size: int | None = None) -> str:
        """Return the size, why it is no larger, and what it needs, in one line.

        Args:
            size: what to say instead of the size, if it follows from that.
        """
        size = self.size if size is None else size
        need = "" if self.peak is None else f"a step needs {show_bytes(self.peak)} of "
        return f"{size:,} samples, {self.bound} ({self.certainty}: {need}{self._space})"

    @property
    def _space(self) -> str:
        return f"{self.limit}, {show_bytes(self.reserve)} of it left free"

    @property
    def headline(self) -> str:
        """The size, how sure it is, and whether it is the largest that fits."""
        found = f"{self.size:,} samples ({self.certainty})"
        if self.too_large is None:
            return f"micro-batch: {found}, {self.bound}"
        return f"largest micro-batch that fits: {found}"

    def rows(self) -> Sequence[Row]:
        """Return what sizes around the answer need, the answer among them."""
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
        if self.too_large is not None:
            lines.append(f"{self.too_large:,} samples would not fit")
        lines += self.notes
        lines.append(f"cost: {self.cost}")
        return "\n".join(lines)
