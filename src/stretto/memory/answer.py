"""What a search for a batch size has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, final

from stretto.batching.policy import size_text
from stretto.errors import FitError
from stretto.memory.amounts import show_bytes
from stretto.memory.limits import MemoryLimit

Certainty: TypeAlias = Literal["phantom", "tried"]


class NothingFitsError(FitError):
    """The smallest candidate does not fit."""


class Cost(NamedTuple):
    """What a search took."""

    phantom_steps: int = 0
    """Sizes that were run on the phantom, three steps each."""
    real_steps: int = 0
    num_samples: int = 0
    """Samples in real steps, or tokens."""
    num_out_of_memory: int = 0
    """Sizes that ran out of memory, on the phantom or in real steps."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.phantom_steps} sizes on the phantom, "
            f"{self.real_steps} real ones with {size_text(self.num_samples)}, "
            f"{self.num_out_of_memory} out of memory, {self.seconds:.2g} s"
        )


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """The largest micro-batch that fits, how it was found, and the cost of the search.

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
    """Samples of the largest micro-batch that fits, or `Tokens`."""
    certainty: Certainty
    """How the size was found.

    - `phantom`: torch's CUDA build has run steps of this size without a GPU.
    - `tried`: a real step of this size has run.
    """
    too_large: int | None
    """The next size that does not fit; None if the largest candidate fits."""
    limit: MemoryLimit
    """Bytes a step may use: free memory plus what the model and its optimizer occupy."""
    reserve: int
    """Bytes of the limit that stay free on purpose."""
    cost: Cost
    peaks: Mapping[int, int] = field(default_factory=dict)
    """Peak memory of the sizes that were run, as far as the device tells it."""
    notes: tuple[str, ...] = ()
    outside: Mapping[str, int] = field(default_factory=dict)
    """What takes memory of the device outside of the allocator, and how many bytes: the CUDA
    context, the buffers of NCCL. `limit` does not include it."""

    @property
    def peak(self) -> int | None:
        """Peak memory of a step of this size; None if only trials were run."""
        return self.peaks.get(self.size)

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
        return f"{size_text(size)}, {self.bound} ({self.certainty}: {need}{self._space})"

    @property
    def headline(self) -> str:
        """The size, how it was found, and whether it is the largest that fits."""
        found = f"{size_text(self.size)} ({self.certainty})"
        if self.too_large is None:
            return f"micro-batch: {found}, {self.bound}"
        return f"largest micro-batch that fits: {found}"

    @property
    def _space(self) -> str:
        return f"{self.limit}, {show_bytes(self.reserve)} of it left free"

    def __str__(self) -> str:
        lines = [self.headline]
        need = "" if self.peak is None else f"it needs {show_bytes(self.peak)} of "
        lines.append(f"{need or 'in '}{self._space}")
        if self.outside:
            total = show_bytes(self.limit.bytes + sum(self.outside.values()))
            taken = " and ".join(f"{what} {show_bytes(n)}" for what, n in self.outside.items())
            lines.append(f"outside of the allocator, of {total}: {taken}")
        if self.too_large is not None:
            lines.append(f"{size_text(self.too_large)} would not fit")
        return "\n".join([*lines, *self.notes, f"cost: {self.cost}"])
