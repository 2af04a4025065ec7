"""Record every allocation of a real step with the profiler."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, final
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from stretto.memory.measuring.copies import memory_of
from stretto.memory.prediction.modules import ModuleWatch
from stretto.memory.prediction.recording import Allocation, Category, Event, Place, Recording
from stretto.memory.prediction.storage_trace import BEFORE
from stretto.memory.prediction.tensors import state_tensors, tensors_in
from stretto.memory.prediction.trace import in_order, uncollected
from stretto.memory.step import WholeStep
from stretto.runtime import TrainStep

_MARK = "stretto: "
_PIECE = 512
"""Bytes that CUDA's allocator counts in."""


def record_step(step: TrainStep | WholeStep, batch: Any, size: int) -> Recording:
    """Run a real step and return its allocations on the device.

    The allocator itself reports the events, so scratch memory of kernels is included. The step
    changes weights and optimizer state as usual.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> record_step(step, torch.ones(2, 4), 2).peak > 4 * (4 + 1) + 4 * (2 * 4)
    True
    """
    step = WholeStep.of(step)
    watch, parameters = ModuleWatch(), step.parameters
    ledger = _AllocationLog(watch)
    ledger.find(step.model.parameters(), "parameters")
    ledger.find(parameters, "parameters")
    ledger.find(step.model.buffers(), "buffers")
    ledger.find(state_tensors(step), "optimizer")
    ledger.find(tensors_in(batch), "batch")

    def enter(phase: str) -> None:
        ledger.expect(_addresses(p.grad for p in parameters if p.grad is not None), "gradients")
        with record_function(_MARK + phase):
            pass

    device = step.device.type
    with (
        watch.watching(step.model, in_compiled=False),
        uncollected(),
        _profiled(device) as profiler,
        _allocator_history(step.device) as history,
    ):
        step.run(batch, enter=enter)
        ledger.expect(_addresses(state_tensors(step)), "optimizer")
        with record_function(_MARK + "optimizer"):
            pass
    for moment in _with_history(_moments(profiler, device), history):
        ledger.add(moment)
    return ledger.recording(size)


class _Moment(NamedTuple):
    """An event of the profiler."""

    time: int
    node: int
    """The sequence number of the autograd node; negative if unknown."""
    mark: str | None
    """The phase that begins here."""
    bytes: int
    """Allocated bytes; negative if freed."""
    address: int
    source: str


@final
class _AllocationLog:
    """Turns the moments of a profile into allocations and events."""

    def __init__(self, watch: ModuleWatch) -> None:
        self._watch = watch
        self._place = BEFORE
        self._live: dict[int, int] = {}
        self._allocations: list[Allocation] = []
        self._events: list[Event] = []
        self._expected: list[tuple[set[int], Category]] = []

    def find(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of tensors that exist before the step."""
        for memory in itertools.chain.from_iterable(map(memory_of, tensors)):
            if memory.nbytes() and memory.data_ptr() not in self._live:
                self._allocate(memory.data_ptr(), Allocation(memory.nbytes(), BEFORE, category))

    def expect(self, addresses: set[int], category: Category) -> None:
        """Set the category of some addresses as of the next mark."""
        self._expected.append((addresses, category))

    def add(self, moment: _Moment) -> None:
        """Add the next event of the profile."""
        if moment.mark is not None:
            self._pass(moment.mark)
            return
        if moment.node >= 0:
            self._place = self._place._replace(module=self._watch.of_node(moment.node))
        if moment.bytes > 0:
            new = Allocation(moment.bytes, self._place, "temporaries", moment.source)
            self._allocate(moment.address, new)
        elif moment.address in self._live:
            index = self._live.pop(moment.address)
            self._events.append(Event(index, is_free=True, place=self._place))

    def recording(self, size: int) -> Recording:
        """Return the recording."""
        return Recording(size, self._allocations, in_order(self._events))

    def _allocate(self, address: int, allocation: Allocation) -> None:
        self._live[address] = len(self._allocations)
        self._events.append(Event(len(self._allocations), is_free=False, place=allocation.place))
        self._allocations.append(allocation)

    def _pass(self, phase: str) -> None:
        addresses, category = self._expected.pop(0)
        for address in addresses & self._live.keys():
            self._name(self._live[address], category)
        if phase == "backward":
            for index in self._live.values():
                if self._allocations[index].place.phase == "forward":
                    self._name(index, "activations")
        self._place = Place(phase, "")

    def _name(self, index: int, category: Category) -> None:
        if self._allocations[index].category == "temporaries":
            self._allocations[index] = self._allocations[index]._replace(category=category)


@contextlib.contextmanager
def _profiled(device: str) -> Iterator[profile]:
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # torch 2.13 writes two lines to stderr for each profile, at level "USDT", above errors. The
    # level is read when the first profile begins.
    quiet = {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "6")}
    with patch.dict(os.environ, quiet), profile(activities=activities, profile_memory=True) as made:
        yield made


class _Change(NamedTuple):
    """An entry of the history that CUDA's allocator keeps."""

    address: int
    bytes: int
    """What was asked for, in whole pieces of the allocator; 0 if freed."""


@contextlib.contextmanager
def _allocator_history(device: torch.device) -> Iterator[list[_Change]]:
    """Yield a list that has all changes of a CUDA device's memory when the context ends.

    It stays empty on other devices, and if a program records the history already.
    """
    changes: list[_Change] = []
    library: Any = torch._C  # its type says that it answers nothing
    if device.type != "cuda" or library._cuda_isHistoryEnabled():
        yield changes
        return
    memory = torch.cuda.memory
    memory._record_memory_history("all", context=None)
    try:
        yield changes
        torch.cuda.synchronize(device)
        changes += [
            _Change(entry["addr"], _rounded(entry["size"]) if entry["action"] == "alloc" else 0)
            for entry in memory._snapshot(device)["device_traces"][device.index]
            if entry["action"] in {"alloc", "free_requested"}
        ]
    finally:
        memory._record_memory_history(None)


def _rounded(size: int) -> int:
    return -(-size // _PIECE) * _PIECE


def _with_history(moments: list[_Moment], history: list[_Change]) -> Iterator[_Moment]:
    """Yield the moments with the frees and sizes of the history, if there is one.

    The profiler misses frees on CUDA: autograd runs nodes in a thread of the device, and drops the
    inputs of a node after it has left the profiler (`Engine::thread_main` of torch 2.13). Recorded
    peaks of a GPT were 1.1 (fp32) to 1.4 (bf16) times the real ones. It also reports the size of
    the block that was found, which depends on what was freed before the step.
    """
    if not history:
        yield from moments
        return
    waiting, time = iter(history), 0
    for moment in moments:
        time = moment.time
        if moment.mark is not None:
            yield moment
        elif moment.bytes > 0:
            for change in waiting:
                if change.bytes and change.address == moment.address:
                    yield moment._replace(bytes=change.bytes)
                    break
                if not change.bytes:
                    yield _Moment(time, -1, None, -1, change.address, "")
    for change in waiting:
        if not change.bytes:
            yield _Moment(time, -1, None, -1, change.address, "")


def _moments(profiler: profile, device: str) -> list[_Moment]:
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    # Each thread has its own tree. The sort is stable, so equal times keep their order.
    return sorted(_walk(roots, device), key=lambda moment: moment.time)


def _walk(roots: list[Any], device: str) -> Iterator[_Moment]:
    """Yield the events of a tree in order, without recursion because graphs are deep."""
    waiting: list[tuple[Any, int, str]] = [(event, -1, "") for event in reversed(roots)]
    while waiting:
        event, node, source = waiting.pop()
        time, fields = event.start_time_ns, event.extra_fields
        if event.tag == _EventType.Allocation:
            if fields.device.type == device:
                yield _Moment(time, node, None, fields.alloc_size, fields.ptr, source)
            continue
        if event.tag == _EventType.TorchOp:
            if event.name.startswith(_MARK):
                yield _Moment(time, -1, event.name.removeprefix(_MARK), 0, 0, "")
            number = fields.sequence_number
            node, source = (number if number >= 0 else node), event.name
        waiting += [(child, node, source) for child in reversed(event.children)]


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {memory.data_ptr() for tensor in tensors for memory in memory_of(tensor)}
