"""Trace every allocation of a step on fake tensors."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor, nn

from stretto.memory.prediction.fake_values import FakeValues
from stretto.memory.prediction.modules import ModuleWatch
from stretto.memory.prediction.recording import Event, Recording
from stretto.memory.prediction.storage_trace import StorageTrace, TracedDevice
from stretto.memory.prediction.tensors import state_tensors, tensors_in
from stretto.memory.step import WholeStep

Around: TypeAlias = Callable[[StorageTrace], AbstractContextManager[Any]]
"""Returns a context in which steps are traced."""


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return the events with adjacent frees sorted by allocation.

    Tensors that are freed at the same time have no defined order; it can differ between steps.
    """
    result: list[Event] = []
    for is_free, group in itertools.groupby(events, key=lambda event: event.is_free):
        same = list(group)
        result += sorted(same, key=lambda event: event.allocation) if is_free else same
    return result


def trace(
    step: WholeStep, batch: Any, size: int, *, fake_values: FakeValues, device: TracedDevice
) -> Recording:
    """Run the fake `step` and return its allocations."""
    with _tracing(step, fake_values, device) as (seen, run):
        seen.find(tensors_in(batch), "batch")
        run(batch)
        return seen.recording(size, in_order(seen.events()))


def trace_from_start(
    step: WholeStep,
    batches: Iterable[Any],
    size: int,
    *,
    fake_values: FakeValues,
    device: TracedDevice,
    around: Around = contextlib.nullcontext,
) -> Recording:
    """Run the first steps of a run, one for each batch, and return all allocations in order.

    Args:
        step: the step, on fake tensors.
        batches: a batch for each step.
        size: their size.
        fake_values: what fake tensors do not have.
        device: the device to trace for.
        around: returns a context for the steps.
    """
    with _tracing(step, fake_values, device) as (seen, run), around(seen):
        start: int | None = None
        for batch in batches:
            if start is not None and seen.is_as_at(start):
                seen.repeat(start)  # a step that leaves memory as it was is followed by the same
                continue
            start = seen.num_events
            seen.arrive(batch)
            run(batch)
            del batch
        return seen.recording(size, seen.events())


@contextlib.contextmanager
def _tracing(
    step: WholeStep, fake_values: FakeValues, device: TracedDevice
) -> Iterator[tuple[StorageTrace, Callable[[Any], None]]]:
    """Yield a trace that knows the static tensors, and a function that runs a traced step."""
    watch = ModuleWatch()
    seen = StorageTrace(watch, fake_values, device)
    parameters = step.parameters

    def enter(phase: str) -> None:
        seen.name((p.grad for p in parameters if p.grad is not None), "gradients")
        seen.enter(phase)

    def run(batch: Any) -> None:
        with seen:
            step.run(batch, enter=enter)
            seen.name(state_tensors(step), "optimizer")

    seen.find(_in_order_of_moving(step.model, "parameters"), "parameters")
    seen.find(parameters, "parameters")
    seen.find(_in_order_of_moving(step.model, "buffers"), "buffers")
    seen.find(state_tensors(step), "optimizer")
    with watch.watching(step.model), uncollected():
        yield seen, run


def _in_order_of_moving(model: nn.Module, what: str) -> Iterator[Tensor]:
    """Yield tensors in the order in which `model.to(device)` moves them."""
    for child in model.children():
        yield from _in_order_of_moving(child, what)
    yield from getattr(model, what)(recurse=False)


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
