"""Smaller micro-batches when memory runs out, and larger ones again later.

The optimizer's batch never changes, only the number of passes. A step that runs out of memory is
repeated from its beginning with the same random state and buffers. So it computes what a run with
the smaller size would have computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast, final

from torch import nn

from stretto.data import DataSpec, MicroBatch, Step
from stretto.errors import DataError, TrainingError
from stretto.ordering import evenly
from stretto.runtime.gradients import is_fully_sharded
from stretto.runtime.out_of_memory import attempt, is_out_of_memory, release_memory
from stretto.runtime.rewind import Rewind
from stretto.timing import Timestamp
from stretto.training.checkpointing.records import count
from stretto.training.distributed.ranks import Ranks

T = TypeVar("T")

QUIET_STEPS = 100
"""Steps without an out-of-memory error after which a larger size is tried. It doubles each time
that the larger size fails."""
_MOST_QUIET_STEPS = 100 * 2**10
_CAREFUL_STEPS = 20
"""Steps after a change of size in which ranks exchange errors before they average gradients."""


class Demand(NamedTuple):
    """What determines the memory of a step; the same on all ranks."""

    size: int
    """The most samples in one pass."""
    accumulates: bool
    """Whether gradients exist during a forward pass."""


@final
class SafetyNet:
    """Runs steps in micro-batches of at most `size` samples.

    On several ranks, a rank that runs out of memory must not leave the others waiting. So in the
    first steps of each size, gradients are averaged only after all ranks have computed theirs. In
    later steps they are averaged during the backward pass, as usual, and an out-of-memory error
    ends the run. It also does if ranks communicate in each forward pass (FSDP2, SyncBatchNorm).

    Args:
        model: its buffers are restored.
        spec: cuts batches.
        ranks: the processes of the run.
        size: the most samples of a micro-batch; None: the whole share of a rank.
        is_found: whether `size` was found by a search; a resumed run then keeps the saved one.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: DataSpec,
        ranks: Ranks,
        *,
        size: int | None,
        is_found: bool = False,
    ) -> None:
        self.rewind = Rewind(model)
        """Restores random state and buffers."""
        self._spec = spec
        self._ranks = ranks
        self._has_others = ranks.world_size > 1
        self._meets_in_passes = self._has_others and meets_in_passes(model)
        self.largest = size
        """The size to return to; None: the whole share of a rank."""
        self.is_found = is_found
        """Whether `largest` was found by a search."""
        self._successes = 0
        self._steps_until_larger = QUIET_STEPS
        self.is_on_trial = False
        """Whether a larger size is being tried."""
        self._careful = _CAREFUL_STEPS
        self._seen = Demand(0, accumulates=False)
        self.size = size
        """The most samples of a micro-batch in force; None: the whole share of a rank."""
        self.splits = 0
        """How often memory ran out."""

    def take(
        self,
        step: Step,
        *,
        compute: Callable[[Sequence[MicroBatch], bool], T],
        prepare: Callable[[], None],
        clear: Callable[[], None],
        average: Callable[[], None],
    ) -> T:
        """Compute the gradient of a step in micro-batches that fit; return the result of `compute`.

        Args:
            step: the step from the loader.
            compute: accumulates the gradient of pieces; the flag: averaged over ranks.
            prepare: does the collective work of the first pass of a step.
            clear: clears what was accumulated.
            average: averages the accumulated gradients over ranks.

        Raises:
            TrainingError: not even one sample fits, or memory ran out in a step in which other
                ranks wait.
        """
        if self._has_others:
            if not self._is_careful(step):
                result = self._take_in_step(step, compute)
                self._note_success(step)
                return result
            prepare()
        self.rewind.take()
        while True:
            pieces = self._pieces(step)

            def work(pieces: Sequence[MicroBatch] = pieces) -> T:
                return compute(pieces, not self._has_others)

            done = attempt(work)
            if not self._ranks.agree((done.out_of_memory is not None,))[0]:
                if self._has_others:
                    average()
                self._note_success(step)
                return cast(T, done.result)
            most = _most(pieces)
            del pieces, work
            self.fall_back(step, most, done.out_of_memory, clear=clear)

    def fall_back(
        self, step: Step, most: int, message: str | None, *, clear: Callable[[], None]
    ) -> None:
        """Undo the step and choose a size below `most`, which did not fit."""
        clear()
        release_memory()
        self.rewind.restore()
        self._shrink(most, step.timestamp, message)

    def state_dict(self) -> dict[str, Any]:
        """Return the present size and when it will grow."""
        return {
            "largest": self.largest,
            "is_found": self.is_found,
            "size": self.size,
            "successes": self._successes,
            "steps_until_larger": self._steps_until_larger,
            "is_on_trial": self.is_on_trial,
            "splits": self.splits,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the saved size, unless another one was configured since."""
        if self.is_found and state["is_found"]:
            self.largest = self.size = count(state, "largest", least=1)
        if self.largest == state["largest"]:
            self.size = None if state["size"] is None else count(state, "size", least=1)
            self._successes = count(state, "successes")
            self._steps_until_larger = count(state, "steps_until_larger")
            self.is_on_trial = bool(state["is_on_trial"])
        self.splits = count(state, "splits")
        self._careful, self._seen = _CAREFUL_STEPS, Demand(0, accumulates=False)

    def _take_in_step(self, step: Step, compute: Callable[[Sequence[MicroBatch], bool], T]) -> T:
        """Run a step in which ranks wait for each other; turn an out-of-memory error into ours."""
        pieces = self._pieces(step)
        try:
            return compute(pieces, self._has_others)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            most = _most(pieces)
            smaller = (
                "use shorter samples or a smaller model"
                if most == 1
                else f"resume from the last checkpoint with micro_batch_size={(most + 1) // 2}"
            )
            raise TrainingError.cannot(
                f"take the step at {step.timestamp.get('sp')} in micro-batches of {most:,}",
                why=f"memory ran out on rank {self._ranks.rank}, and the others wait for it in "
                f"the middle of the step ({_brief(str(error))})",
                instead=smaller,
            ) from error

    def _pieces(self, step: Step) -> Sequence[MicroBatch]:
        if self.size is None:
            return step.micro_batches
        try:
            return [piece for micro in step.micro_batches for piece in self._cut(micro, self.size)]
        except DataError as error:
            error.add_note("memory ran out, so the batch had to be cut into smaller micro-batches")
            raise

    def _cut(self, micro: MicroBatch, most: int) -> list[MicroBatch]:
        count = micro.num_samples
        if count <= most or not micro.weight:
            return [micro]
        pieces, start = [], 0
        for size in evenly(count, most=most):
            pieces.append(self._spec.cut(micro, slice(start, start + size)))
            start += size
        return pieces

    def _is_careful(self, step: Step) -> bool:
        if self._meets_in_passes:
            return False
        # A growing batch size may bring larger micro-batches than before.
        demand = self._demand(step)
        return (
            self._careful > 0
            or demand.size > self._seen.size
            or demand.accumulates > self._seen.accumulates
        )

    def _demand(self, step: Step) -> Demand:
        share = self._share(step)
        passes = 1 if self.size is None else -(-share // self.size)
        return Demand(-(-share // passes), passes > 1)

    def _share(self, step: Step) -> int:
        """Return the most samples of a step on one rank."""
        return -(-step.num_samples // self._ranks.world_size)

    def _note_success(self, step: Step) -> None:
        """Count a step that did not run out of memory."""
        if self._has_others:
            demand = self._demand(step)
            self._seen = Demand(
                max(self._seen.size, demand.size), self._seen.accumulates or demand.accumulates
            )
            self._careful = max(0, self._careful - 1)
        if self.size == self.largest and not self.is_on_trial:
            return
        self._successes += 1
        if self._successes >= self._steps_until_larger:
            self._successes, self.is_on_trial = 0, False
            if self.size is not None and self.size != self.largest:
                self.size = self._larger(self.size, step)
                self.is_on_trial, self._careful = True, _CAREFUL_STEPS

    def _larger(self, size: int, step: Step) -> int | None:
        if self.largest is not None:
            return min(2 * size, self.largest)
        return 2 * size if 2 * size < self._share(step) else None

    def _shrink(self, most: int, at: Timestamp, message: str | None) -> None:
        most = max(int(text) for text in self._ranks.gather(str(most)))
        why = next(text for text in self._ranks.gather(message or "") if text)
        if most == 1:
            raise TrainingError.cannot(
                f"take the step at {at.get('sp')}",
                why=f"memory runs out with one sample ({_brief(why)})",
                instead="use shorter samples, a smaller model, or precision='bf16'",
            )
        self.splits += 1
        self.size = (most + 1) // 2
        if self.is_on_trial:  # it grew too early: wait longer before the next try
            self._steps_until_larger = min(2 * self._steps_until_larger, _MOST_QUIET_STEPS)
        self._successes, self.is_on_trial = 0, False
        self._careful, self._seen = _CAREFUL_STEPS, Demand(0, accumulates=False)
        if self._ranks.is_first:
            warnings.warn(
                f"memory ran out in the step at {at.get('sp')} with micro-batches of {most:,}; the "
                f"step is repeated with micro-batches of {self.size:,}, and the batch size does "
                "not change",
                RuntimeWarning,
                stacklevel=2,
            )


def meets_in_passes(model: nn.Module) -> bool:
    """Return whether ranks communicate in each forward pass of a model.

    >>> meets_in_passes(nn.BatchNorm1d(2)), meets_in_passes(nn.SyncBatchNorm(2))
    (False, True)
    """
    return is_fully_sharded(model) or any(
        isinstance(module, nn.SyncBatchNorm) for module in model.modules()
    )


def _most(pieces: Sequence[MicroBatch]) -> int:
    return max(piece.num_samples for piece in pieces)


def _brief(text: str) -> str:
    return " ".join(text.split())[:200]
