"""Smaller micro-batches if memory runs out.

The optimizer's batch never changes, only the number of passes. A step that runs out of memory is
repeated from its beginning with the same random state of torch and the same buffers, so it computes
what a run with the smaller size would have computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import nn

from stretto.data import DataSpec, MicroBatch, Step
from stretto.errors import DataError, TrainingError
from stretto.ordering import evenly
from stretto.runtime.out_of_memory import release_memory
from stretto.runtime.packing import count, count_or_none
from stretto.runtime.ranks import Ranks
from stretto.runtime.rewind import Rewind
from stretto.timing import Timestamp


@final
class Retry:
    """Cuts steps into micro-batches of at most `size` samples, and halves it if memory runs out.

    On several ranks, the others wait for the rank that ran out of memory in the middle of the step,
    so the run ends with an error there.

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
        self._spec, self._ranks = spec, ranks
        self.largest = size
        """The size that was given or found; None: the whole share of a rank."""
        self.is_found = is_found
        """Whether `largest` was found by a search."""
        self.size = size
        """The most samples of a micro-batch in force; None: the whole share of a rank."""
        self.splits = 0
        """How often memory ran out."""
        self.on_fall_back: Callable[[Timestamp, int, int], None] = lambda *_: None
        """Called with the clock, the size that ran out of memory, and the next one."""

    def pieces(self, step: Step) -> Sequence[MicroBatch]:
        """Return the micro-batches of a step."""
        try:
            return [piece for micro in step.micro_batches for piece in self._cut(micro)]
        except DataError as error:
            error.add_note("memory ran out, so the batch had to be cut into smaller micro-batches")
            raise

    def _cut(self, micro: MicroBatch) -> list[MicroBatch]:
        number, most = micro.num_samples, self.size
        if most is None or number <= most or not micro.weight:
            return [micro]
        pieces, start = [], 0
        for size in evenly(number, most=most):
            pieces.append(self._spec.cut(micro, slice(start, start + size)))
            start += size
        return pieces

    def largest_piece(self, step: Step | None) -> int:
        """Return the samples of the largest micro-batch of a step on this rank; 0 if unknown."""
        micro_batches = () if step is None else step.micro_batches
        sizes = (one.num_samples for one in micro_batches if one.weight)
        return max((evenly(size, most=self.size)[0] for size in sizes), default=0)

    def fall_back(self, step: Step, most: int, message: str, *, clear: Callable[[], None]) -> None:
        """Undo a step that ran out of memory and choose a size below `most`.

        Raises:
            TrainingError: not even one sample fits, or other ranks wait.
        """
        at, brief = step.timestamp.get("sp"), " ".join(message.split())[:200]
        smaller = (most + 1) // 2
        if most == 1:
            why, instead = "with one sample", "use shorter samples or a smaller model"
        else:
            why = f"on rank {self._ranks.rank}, and the others wait for it"
            instead = f"resume from the last checkpoint with micro_batch_size={smaller}"
        if most == 1 or self._ranks.world_size > 1:
            raise TrainingError.cannot(
                f"compute the step at {at} in micro-batches of {most:,}",
                why=f"memory ran out {why} ({brief})",
                instead=instead,
            )
        clear()
        release_memory()
        self.rewind.restore()
        self.size = smaller
        self.splits += 1
        self.on_fall_back(step.timestamp, most, smaller)
        warnings.warn(
            f"memory ran out in the step at {at} with micro-batches of {most:,}; the step is "
            f"repeated with micro-batches of {smaller:,}, and the batch size does not change",
            RuntimeWarning,
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the present size."""
        return {
            "largest": self.largest,
            "is_found": self.is_found,
            "size": self.size,
            "splits": self.splits,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the saved size, unless another one was configured since."""
        largest = count_or_none(state, "largest", least=1)
        if self.is_found and state["is_found"]:
            self.largest = self.size = largest
        if self.largest == largest:
            self.size = count_or_none(state, "size", least=1)
        self.splits = count(state, "splits")
