"""Smaller micro-batches if memory runs out.

The optimizer's batch never changes, only the number of passes. A step that runs out of memory is
repeated from its beginning with the same random state of torch and the same buffers, so it computes
what a run with the smaller size would have computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.data import DataSpec, MicroBatch, Step
from stretto.distributed.ranks import Ranks
from stretto.errors import DataError, TrainingError
from stretto.ordering import evenly
from stretto.runtime.out_of_memory import release_memory
from stretto.runtime.packing import count, count_or_none
from stretto.runtime.random_state import device_states, restore_devices
from stretto.timing import Timestamp

_ALWAYS_COPIED_BYTES = 1 << 20
"""Up to this size a buffer is copied without asking whether it has changed."""
_SEARCHES = 2
"""Number of steps before which all modules are searched for buffers: a first forward pass may
create some. A search through a thousand modules takes a millisecond."""


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


@final
class Rewind:
    """Saves torch's random state and a model's buffers before a step, and restores them.

    The generators of Python and NumPy are left alone: reading them would take longer than a small
    step. The copies lie beside the buffers and are overwritten at each `save`. A large buffer, such
    as a causal mask, is copied only when it was written to. A module that has its first buffer only
    after some steps is not noticed.

    Args:
        model: whose buffers are kept.

    >>> norm = nn.BatchNorm1d(3)
    >>> rewind = Rewind(norm)
    >>> rewind.save()
    >>> _ = norm(torch.randn(8, 3))
    >>> rewind.restore()
    >>> norm.running_mean.tolist(), int(norm.num_batches_tracked)
    ([0.0, 0.0, 0.0], 0)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_device = torch.accelerator.is_available()
        self._random = torch.default_generator.get_state()
        self._devices: dict[str, dict[int, Tensor]] = {}
        self._searches = 0
        self._owners: list[nn.Module] = []
        self._buffers: list[_Buffer] = []
        self._copies: list[Tensor] = []
        """Copies of the small buffers, which are overwritten each time."""
        self._tensors: list[Tensor] = []
        """These small buffers."""

    def save(self) -> None:
        """Save the present state."""
        self._random = torch.default_generator.get_state()
        if self._has_device:
            self._devices = device_states()
        if self._searches < _SEARCHES:
            self._searches += 1
            self._owners = [module for module in self._model.modules() if module._buffers]
        if not self._owners:
            return
        present = [tensor for owner in self._owners for tensor in owner._buffers.values()]
        known = [buffer.tensor for buffer in self._buffers]
        if len(present) != len(known) or not all(map(is_, present, known)):
            self._find()
        for buffer in self._buffers:
            if buffer.is_large:
                buffer.save()
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._tensors)  # no public spelling of it

    def restore(self) -> None:
        """Return to the last `save`; can be called repeatedly."""
        for buffer in self._buffers:
            buffer.restore()
        restore_devices(self._devices)
        torch.default_generator.set_state(self._random)

    def _find(self) -> None:
        """Find all buffers again; copies of those that are still there are kept."""
        known = {(id(one.owner), one.name): one for one in self._buffers}
        self._buffers, self._copies, self._tensors = [], [], []
        for owner in self._owners:
            for name, tensor in owner._buffers.items():
                buffer = known.get((id(owner), name))
                if buffer is None or buffer.tensor is not tensor:
                    buffer = _Buffer(owner, name, tensor)
                self._buffers.append(buffer)
                if tensor is not None and buffer.copy is not None and not buffer.is_large:
                    self._copies.append(buffer.copy)
                    self._tensors.append(tensor)


@final
class _Buffer:
    """A buffer and its copy."""

    __slots__ = ("_version", "copy", "is_large", "name", "owner", "tensor")

    def __init__(self, owner: nn.Module, name: str, tensor: Tensor | None) -> None:
        self.owner, self.name, self.tensor = owner, name, tensor
        self.copy: Tensor | None = None
        """None if there is nothing to restore: no tensor, or one without a shape."""
        self.is_large = False
        """Whether it is copied only when its version says that it was written to."""
        self._version = -1
        if tensor is not None and not is_lazy(tensor) and not tensor.is_inference():
            self.copy, self._version = tensor.detach().clone(), tensor._version
            # Batch normalisation writes its statistics without raising their version.
            is_large = tensor.nbytes > _ALWAYS_COPIED_BYTES
            self.is_large = is_large and not hasattr(owner, "running_mean")

    def save(self) -> None:
        """Copy a large buffer if it was written to."""
        assert self.copy is not None, "a large one has a copy"
        assert self.tensor is not None, "a copy is of a tensor"
        if self.tensor._version != self._version:
            self.copy.copy_(self.tensor.detach())
            self._version = self.tensor._version

    def restore(self) -> None:
        """Write the copy back, and restore the tensor itself."""
        if self.tensor is not None and self.copy is not None:
            if not self.is_large or self.tensor._version != self._version:
                with torch.no_grad():
                    self.tensor.copy_(self.copy)
            self._version = self.tensor._version
        # A forward pass may have replaced the tensor.
        self.owner._buffers[self.name] = self.tensor
