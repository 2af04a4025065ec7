"""Record when and where each storage is allocated and freed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.memory.prediction.fake_values import FakeValues
from stretto.memory.prediction.modules import ModuleWatch
from stretto.memory.prediction.recording import Allocation, Category, Event, Place, Recording
from stretto.memory.prediction.tensors import WRAPPERS, inner, tensors_in

_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor
_DROPOUT = torch.ops.aten.native_dropout.default
_LIFT = torch.ops.aten.lift_fresh.default
BEFORE = Place("before", "")


class TracedDevice(Protocol):
    """How operations use the memory of a device, beyond the elements of their results."""

    def scratch(self, func: Any, args: Sequence[Any], result: Any) -> Sequence[Sequence[int]]:
        """Return the blocks that the kernel allocates for itself, in bytes.

        Those of a group are allocated together, and freed before the next group. The number of
        blocks does not depend on the batch size, so that recordings can be compared.
        """

    def copies(self, func: Any, args: Sequence[Any]) -> Sequence[int]:
        """Return the bytes of the arguments that are copied before the operation."""

    def result_bytes(self, func: Any, args: Sequence[Any]) -> int | None:
        """Return the bytes of the result's storage; None: those of its elements."""

    def kept(self, func: Any, phase: str) -> tuple[str, int] | None:
        """Return the name and the bytes of a block that stays allocated from the first use on."""

    def is_on_host(self, func: Any, tensor: Tensor) -> bool:
        """Return whether a result of an operation is in the memory of the host."""

    def stream(self) -> int:
        """Return the number of the current stream; 0 is the default stream."""


@final
class StorageTrace(TorchDispatchMode):
    """Records when and where each storage is allocated and freed.

    A storage is identified by its address. A weak reference reports when it is freed.
    """

    def __init__(self, watch: ModuleWatch, fake_values: FakeValues, device: TracedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_values = fake_values
        self._watch = watch
        self._device = device
        self._live: dict[int, tuple[int, weakref.ref[Any], int]] = {}
        self._kept: set[str] = set()
        self._phase = "before"
        self._is_paused = False
        self._sum: tuple[int, int, int] | None = None
        self._allocations: list[Allocation] = []
        self._before: list[Event] = []
        self._events: list[Event] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(one.__name__ in WRAPPERS for one in types):
            return NotImplemented  # its own dispatch calls operations on the tensors inside
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        if func is _DEVICE:  # called twice per operation, so return early
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func is not _LIFT:  # its argument is new: torch.tensor has just created it
            self._find_arguments(args)
        named = kwargs or {}
        result = self._fake_values.call(func, args, named, self._place)
        self._see_all(func, args, result)
        return result

    def _see_all(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Record what an operation allocates: its results, and what its kernel needs."""
        copies = self._begin(self._device.copies(func, args), func)
        count = self._device.result_bytes(func, args)
        items = result if isinstance(result, (tuple, list)) else (result,)
        # The mask is allocated before the result.
        for item in reversed(items) if func is _DROPOUT else items:
            if isinstance(item, Tensor):
                self._see(item, func, count)
        if func is _ADD and self._phase == "backward":
            self._note_sum(args, result)
        kept = self._device.kept(func, self._phase)
        if kept is not None and kept[0] not in self._kept:
            self._keep(*kept)
        for group in self._device.scratch(func, args, result):
            self._end(self._begin(group, func))
        self._end(copies)

    def _note_sum(self, args: Sequence[Any], result: Any) -> None:
        """Remember where autograd adds two gradients of a tensor.

        If nothing else uses the first gradient, autograd adds in place, but not if it is fake.
        """
        if torch._C._current_autograd_node() is None and isinstance(args[0], Tensor):
            keys = [tensor.untyped_storage()._cdata for tensor in (args[0], result)]
            self._sum = keys[0], keys[1], len(self._events) - 1

    def _add_in_place(self, key: int, index: int) -> bool:
        """Let the sum take over the memory of its first term, if that is freed right after."""
        if self._sum is None or self._sum[0] != key:
            return False
        _, total, place = self._sum
        self._sum = None
        known, later = self._live.get(total), self._events[place + 1 :]
        if known is None or not all(event.is_free for event in later):
            return False
        if self._allocations[known[0]].bytes != self._allocations[index].bytes:
            return False
        del self._events[place]
        self._live[total] = index, *known[1:]
        return True

    def enter(self, phase: str) -> None:
        """Start a phase."""
        if phase == "backward":
            # Memory of the forward pass that is still live is saved for the backward pass.
            for index, _, _ in self._live.values():
                one = self._allocations[index]
                if one.place.phase == "forward" and one.category == "temporaries":
                    self._allocations[index] = one._replace(category="activations")
        self._phase = phase

    def find(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of tensors that exist before the step."""
        for tensor in tensors:
            self._find(tensor, category)

    def name(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of tensors that the step has created."""
        for tensor in map(inner, tensors):
            known = self._live.get(tensor.untyped_storage()._cdata)
            if known is not None:
                one = self._allocations[known[0]]
                self._allocations[known[0]] = one._replace(category=category)

    def arrive(self, batch: Any) -> None:
        """Record the allocation of a batch, between two steps."""
        for tensor in tensors_in(batch):
            if tensor.untyped_storage()._cdata not in self._live:
                index = self._add(tensor.untyped_storage(), BEFORE, "", "batch")
                self._events.append(Event(index, is_free=False, place=BEFORE))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage has been resized without an operation."""
        known = self._live.get(storage._cdata)
        if self._is_paused or (known is not None and known[2] == storage.nbytes()):
            return
        self._free(storage._cdata)
        if storage.nbytes():
            place = self._place
            index = self._add(storage, place, "resize")
            self._events.append(Event(index, is_free=False, place=place))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    @property
    def num_events(self) -> int:
        """Number of events since tracing began."""
        return len(self._events)

    def is_as_at(self, start: int) -> bool:
        """Return whether all that was allocated since an event has been freed, and nothing else."""
        allocated, freed = (
            {event.allocation for event in self._events[start:] if event.is_free is is_free}
            for is_free in (False, True)
        )
        return allocated == freed

    def repeat(self, start: int) -> None:
        """Record once more what has happened since an event; see `is_as_at`."""
        again: dict[int, int] = {}
        for event in self._events[start:]:
            if not event.is_free:
                again[event.allocation] = len(self._allocations)
                self._allocations.append(self._allocations[event.allocation])
            self._events.append(event._replace(allocation=again[event.allocation]))

    def events(self) -> list[Event]:
        """Return what has happened, in order."""
        return [*self._before, *self._events]

    def recording(self, size: int, events: Sequence[Event]) -> Recording:
        """Stop recording and return the recording."""
        self._live.clear()
        return Recording(size, self._allocations, events)

    def _find(self, tensor: Tensor, category: Category) -> None:
        tensor = inner(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            is_on_host = category == "optimizer" and self._device.is_on_host(None, tensor)
            index = self._add(storage, BEFORE, "", category, 0 if is_on_host else None)
            self._before.append(Event(index, is_free=False, place=BEFORE))

    def _find_arguments(self, args: Sequence[Any]) -> None:
        for argument in args:
            if isinstance(argument, Tensor):
                self._find(argument, "other")
            elif isinstance(argument, (list, tuple)):
                for item in argument:
                    if isinstance(item, Tensor):
                        self._find(item, "other")

    def _see(self, tensor: Tensor, func: Any, count: int | None) -> None:
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None:
            if known[2] == storage.nbytes():
                return
            self._free(storage._cdata)  # its memory was replaced, by resize_ or set_
        place = self._place
        if self._device.is_on_host(func, tensor):
            count = 0
        index = self._add(storage, place, str(func), count=count)
        self._events.append(Event(index, is_free=False, place=place))

    def _add(
        self,
        storage: torch.UntypedStorage,
        place: Place,
        source: str,
        category: Category = "temporaries",
        count: int | None = None,
    ) -> int:
        key, index, own = storage._cdata, len(self._allocations), storage.nbytes()
        count = own if count is None else count
        self._allocations.append(Allocation(count, place, category, source, self._device.stream()))
        self._live[key] = index, weakref.ref(storage, lambda _: self._free(key)), own
        return index

    def _keep(self, name: str, count: int) -> None:
        self._kept.add(name)
        place = self._place
        self._events.append(Event(len(self._allocations), is_free=False, place=place))
        self._allocations.append(Allocation(count, place, "workspaces", name))

    def _begin(self, counts: Sequence[int], func: Any) -> range:
        """Record the allocation of scratch memory of an operation; return its indices."""
        place, stream = self._place, self._device.stream()
        first = len(self._allocations)
        source = f"{func}, scratch"
        self._allocations += [
            Allocation(count, place, "temporaries", source, stream) for count in counts
        ]
        indices = range(first, first + len(counts))
        self._events += [Event(index, is_free=False, place=place) for index in indices]
        return indices

    def _end(self, indices: Iterable[int]) -> None:
        place = self._place
        self._events += [Event(index, is_free=True, place=place) for index in indices]

    def _free(self, key: int) -> None:
        known = self._live.pop(key, None)
        if known is not None and not self._add_in_place(key, known[0]):
            self._events.append(Event(known[0], is_free=True, place=self._place))

    @property
    def _place(self) -> Place:
        return Place(self._phase, self._watch.path())
