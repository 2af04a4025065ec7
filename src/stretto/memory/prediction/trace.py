"""Trace every allocation of a step on fake tensors."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.data.containers import nodes
from stretto.memory.prediction.fake_values import FakeValues
from stretto.memory.prediction.modules import ModuleWatch
from stretto.memory.prediction.recording import Allocation, Category, Event, Place, Recording
from stretto.memory.prediction.scratch import scratch_bytes
from stretto.memory.step import WholeStep

_DEVICE = torch.ops.prim.device.default
_LIFT = torch.ops.aten.lift_fresh.default
BEFORE = Place("before", "")


@final
class StorageTrace(TorchDispatchMode):
    """Records when and where each storage is allocated and freed.

    A storage is identified by its address. A weak reference reports when it is freed.
    """

    def __init__(self, watch: ModuleWatch, fake_values: FakeValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_values = fake_values
        self._watch = watch
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._phase = "before"
        self._allocations: list[Allocation] = []
        self._before: list[Event] = []
        self._events: list[Event] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:  # called twice per operation, so return early
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        # The argument of lift_fresh is new: torch.tensor has just created it.
        for argument in () if func is _LIFT else args:
            if isinstance(argument, Tensor):
                self._find(argument, "other")
            elif isinstance(argument, (list, tuple)):
                for item in argument:
                    if isinstance(item, Tensor):
                        self._find(item, "other")
        named = kwargs or {}
        result = self._fake_values.call(func, args, named, self._place)
        if isinstance(result, Tensor):
            self._see(result, func)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, Tensor):
                    self._see(item, func)
        scratch = scratch_bytes(func, args, result, on_cuda=self._fake_values.on_cuda)
        if scratch:
            self._pass(scratch, func)
        return result

    def enter(self, phase: str) -> None:
        """Start a phase."""
        if phase == "backward":
            # Memory of the forward pass that is still live is saved for the backward pass.
            for index, _ in self._live.values():
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
        for tensor in tensors:
            known = self._live.get(tensor.untyped_storage()._cdata)
            if known is not None:
                one = self._allocations[known[0]]
                self._allocations[known[0]] = one._replace(category=category)

    def recording(self, size: int) -> Recording:
        """Stop recording and return the recording."""
        self._live.clear()
        return Recording(size, self._allocations, in_order([*self._before, *self._events]))

    def _find(self, tensor: Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            index = self._add(storage, BEFORE, "", category)
            self._before.append(Event(index, is_free=False, place=BEFORE))

    def _see(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None:
            if self._allocations[known[0]].bytes == storage.nbytes():
                return
            self._free(storage._cdata)  # its memory was replaced, by resize_ or set_
        place = self._place
        index = self._add(storage, place, str(func))
        self._events.append(Event(index, is_free=False, place=place))

    def _add(
        self,
        storage: torch.UntypedStorage,
        place: Place,
        source: str,
        category: Category = "temporaries",
    ) -> int:
        key, index = storage._cdata, len(self._allocations)
        self._allocations.append(Allocation(storage.nbytes(), place, category, source))
        self._live[key] = index, weakref.ref(storage, lambda _: self._free(key))
        return index

    def _pass(self, scratch: int, func: Any) -> None:
        """Record the scratch memory of an operation."""
        place = self._place
        index = len(self._allocations)
        self._allocations.append(Allocation(scratch, place, "temporaries", f"{func}, scratch"))
        self._events += [Event(index, is_free, place) for is_free in (False, True)]

    def _free(self, key: int) -> None:
        known = self._live.pop(key, None)
        if known is not None:
            self._events.append(Event(known[0], is_free=True, place=self._place))

    @property
    def _place(self) -> Place:
        return Place(self._phase, self._watch.path())


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return the events with adjacent frees sorted by allocation.

    Tensors that are freed at the same time have no defined order; it can differ between steps.
    """
    result: list[Event] = []
    for is_free, group in itertools.groupby(events, key=lambda event: event.is_free):
        same = list(group)
        result += sorted(same, key=lambda event: event.allocation) if is_free else same
    return result


def trace(step: WholeStep, batch: Any, size: int, *, fake_values: FakeValues) -> Recording:
    """Run the fake `step` and return its allocations."""
    watch = ModuleWatch()
    seen = StorageTrace(watch, fake_values)
    parameters = step.parameters

    def enter(phase: str) -> None:
        seen.name((p.grad for p in parameters if p.grad is not None), "gradients")
        seen.enter(phase)

    seen.find(step.model.parameters(), "parameters")
    seen.find(parameters, "parameters")
    seen.find(step.model.buffers(), "buffers")
    seen.find(state_tensors(step), "optimizer")
    seen.find(tensors_in(batch), "batch")
    with watch.watching(step.model), uncollected(), seen:
        step.run(batch, enter=enter)
        seen.name(state_tensors(step), "optimizer")
    return seen.recording(size)


def state_tensors(step: WholeStep) -> list[Tensor]:
    """Return the tensors of the optimizers' state."""
    return tensors_in([list(one.state.values()) for one in step.optimizers])


def step_tensors(step: WholeStep) -> list[Tensor]:
    """Return the static tensors of a step: parameters, buffers and optimizer state."""
    return [*step.model.parameters(), *step.model.buffers(), *state_tensors(step)]


def tensors_in(batch: Any) -> list[Tensor]:
    """Return all tensors in nested containers."""
    return [node for node in nodes(batch) if isinstance(node, Tensor)]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection, which would run at unpredictable times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
