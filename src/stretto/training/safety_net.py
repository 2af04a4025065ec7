"""Micro-batches that become smaller where memory runs out, and larger again when it does not.

The batch of the optimizer never changes: only into how many passes it is cut. A step in which
memory runs out is done again from its beginning, with random state and buffers as they were, so it
is the step of a run that had the smaller size all along.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, final

from torch import nn

from stretto.data import DataSpec, MicroBatch, Step
from stretto.data.feed import evenly
from stretto.errors import TrainingError, cannot
from stretto.memory.release import attempt, release_memory
from stretto.memory.rewind import Rewind
from stretto.timing import Timestamp
from stretto.training.ranks import Ranks
from stretto.training.records import count

T = TypeVar("T")

QUIET_STEPS = 100
"""Steps without running out of memory after which a larger size is tried again; doubled each time
that this turns out too early."""
_MOST_QUIET_STEPS = 100 * 2**10
_CAREFUL_STEPS = 20
"""Steps after a change of size in which ranks agree before they average gradients."""


@final
class SafetyNet:
    """Takes steps in micro-batches of at most `size` samples, whatever those of the loader are.

    On several ranks a rank whose memory runs out must not leave the others waiting. So in the first
    steps of each size gradients are averaged only when all ranks have one; later they are averaged
    while the backward pass runs, as always, and running out of memory ends the run.

    Args:
        model: whose buffers are put back.
        spec: cuts batches.
        ranks: the processes of the run.
        size: the most samples of a micro-batch.
    """

    def __init__(self, model: nn.Module, spec: DataSpec, ranks: Ranks, *, size: int) -> None:
        self._rewind = Rewind(model)
        self._spec = spec
        self._ranks = ranks
        self.largest = size
        """What it grows back to."""
        self._quiet = 0
        self._patience = QUIET_STEPS
        self._careful = _CAREFUL_STEPS
        self._most_seen = 0
        self.size = size
        """The most samples of a micro-batch in force."""
        self.splits = 0
        """How often memory has run out."""

    def take(
        self,
        step: Step,
        *,
        compute: Callable[[Sequence[MicroBatch], bool], T],
        clear: Callable[[], None],
        average: Callable[[], None],
    ) -> T:
        """Return what `compute` returns for pieces of the step's micro-batches that fit.

        Args:
            step: what the loader yielded.
            compute: accumulates the gradient of pieces, averaged over ranks or of this one alone.
            clear: forgets what was accumulated.
            average: averages over ranks what each has accumulated.

        Raises:
            TrainingError: not even one sample fits.
        """
        several = self._ranks.world_size > 1
        self._rewind.take()
        while True:
            pieces = [piece for micro in step.micro_batches for piece in self._cut(micro)]
            averages = several and not self._is_careful(step)
            if averages:
                result = compute(pieces, averages)
                self._calm(step)
                return result

            def work(pieces: Sequence[MicroBatch] = pieces) -> T:
                return compute(pieces, not several)

            most = max(piece.num_samples for piece in pieces)
            done = attempt(work)
            del pieces, work
            if not self._ranks.agree((done.out_of_memory is not None,))[0]:
                average()
                self._calm(step)
                return cast(T, done.result)
            clear()
            release_memory()
            self._rewind.restore()
            self._shrink(most, step.timestamp, done.out_of_memory)

    def state_dict(self) -> dict[str, int]:
        """Return the size in force, and what decides when it grows again."""
        return {
            "largest": self.largest,
            "size": self.size,
            "quiet": self._quiet,
            "patience": self._patience,
            "splits": self.splits,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the size that was in force."""
        self.largest, self.size = count(state, "largest", least=1), count(state, "size", least=1)
        self._quiet, self._patience = count(state, "quiet"), count(state, "patience")
        self.splits = count(state, "splits")
        self._careful, self._most_seen = _CAREFUL_STEPS, 0

    def _cut(self, micro: MicroBatch) -> list[MicroBatch]:
        count = micro.num_samples
        if count <= self.size or not micro.weight:
            return [micro]
        pieces, start = [], 0
        for size in evenly(count, self.size):
            pieces.append(self._spec.cut(micro, slice(start, start + size)))
            start += size
        return pieces

    def _is_careful(self, step: Step) -> bool:
        # A batch size that grows may bring micro-batches that were never seen. Its own is the same
        # on all ranks, as the answer must be.
        return self._careful > 0 or step.size > self._most_seen

    def _calm(self, step: Step) -> None:
        """Note a step in which all went well."""
        self._most_seen = max(self._most_seen, step.size)
        self._careful = max(0, self._careful - 1)
        if self.size == self.largest:
            return
        self._quiet += 1
        if self._quiet >= self._patience:
            self.size = min(2 * self.size, self.largest)
            self._quiet, self._careful = 0, _CAREFUL_STEPS
            # If that is too early, the next try comes later.
            self._patience = min(2 * self._patience, _MOST_QUIET_STEPS)

    def _shrink(self, most: int, at: Timestamp, said: str | None) -> None:
        most = max(int(text) for text in self._ranks.gather(str(most)))
        why = next(text for text in self._ranks.gather(said or "") if text)
        if most == 1:
            raise TrainingError(
                cannot(
                    f"take the step at {at.get('sp')}",
                    why=f"memory runs out with one sample ({' '.join(why.split())[:200]})",
                    instead="use shorter samples, a smaller model, or precision='bf16'",
                )
            )
        self.splits += 1
        self.size = (most + 1) // 2
        self._quiet, self._careful, self._most_seen = 0, _CAREFUL_STEPS, 0
        if self._ranks.is_first:
            warnings.warn(
                f"memory ran out in the step at {at.get('sp')} with micro-batches of {most:,}; it "
                f"is taken again with {self.size:,}, and the batch is what it was",
                RuntimeWarning,
                stacklevel=2,
            )
