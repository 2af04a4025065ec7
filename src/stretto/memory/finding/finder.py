"""`find_batch_size`: ask the cheapest estimator that can tell, and trust it as far as it goes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from stretto.data import move_batch
from stretto.errors import FitError, cannot, shown
from stretto.memory.amounts import Margin, parse_bytes
from stretto.memory.batches import resize_batch
from stretto.memory.finding.candidates import CandidateSizes
from stretto.memory.finding.methods import Finder
from stretto.memory.finding.ranks import Together
from stretto.memory.finding.request import Request
from stretto.memory.finding.result import Answer
from stretto.memory.limits import MemoryLimit, allocated_bytes, free_memory
from stretto.memory.prediction.trace import step_tensors
from stretto.memory.step import WholeStep
from stretto.runtime import TrainStep
from stretto.runtime.out_of_memory import release_memory

FindMethod = Literal["auto", "predict", "probe", "try", "halve"]
METHODS: tuple[FindMethod, ...] = ("auto", "predict", "probe", "try", "halve")
MARGIN = "1.5%"
"""What is left free unless said otherwise: what the same step varies by on a busy machine."""
MARGIN_OF_PREDICTIONS = "5%"
"""And where no step was taken on the device: buffers of libraries, fragments of freed blocks."""
MARGIN_OF_PROBES = "25%"
"""And where a probe answers for a device that is not here, and no step of that size was taken:
kernels may be others for large batches."""


def find_batch_size(
    step: TrainStep | WholeStep,
    batch: Any,
    *,
    accumulation: int = 1,
    measures_noise: bool = False,
    method: FindMethod = "auto",
    device_memory: str | int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    margin: str | int | None = None,
    minimum: int = 1,
    maximum: int = 1 << 24,
    multiple_of: int = 1,
    power_of_two: bool = False,
    check: bool = False,
    agree_minimum: Callable[[int], int] | None = None,
    also: Iterable[object] = (),
) -> Answer:
    """Return the largest micro-batch that a training step has memory for.

    `auto` goes from the cheapest way to the dearest: it predicts; where fake tensors cannot follow
    the model it probes; where there is a device to try on it calibrates with a step of a tenth of
    the answer, and where that shows much that no tensor accounts for, it tries the answer. Nothing
    that it does leaves a trace in the model, the optimizer or any generator.

    - `predict`: on fake tensors alone. Needs neither memory nor the device it is asked for.
    - `probe`: from a few real steps of two or three samples.
    - `try`: real steps, doubling and then bisecting until they run out of memory.
    - `halve`: real steps from `maximum` down; the fewest, and an answer down to half of what fits.

    Args:
        step: what is trained, and how.
        batch: a micro-batch of any size, its sequences as long as the longest there are; or a
            function that makes one of a given size.
        accumulation: micro-batches of a step: from the second on, the gradients are there during
            the forward.
        measures_noise: whether the gradient of each micro-batch is kept apart before it is added.
        method: how to find it.
        device_memory: what the device has, such as `"80GiB"`; left out: what this one has left.
        device: the kind of device that has it, which a prediction then is for: the kernels and the
            allocator of `cuda` take more than the tensors do. Left out: the tensors are counted.
        margin: what stays free, in percent of that (`"3%"`) or in bytes (`"512MiB"`). Left out: 1.5
            percent, or 5 if no real step is taken on the device. It is at least 25 percent if a
            probe answers for a device that is not here and this machine has no room to verify it.
        minimum: the smallest size that is wanted.
        maximum: the largest size that is wanted.
        multiple_of: what sizes are to be multiples of.
        power_of_two: whether they are to be powers of two.
        check: whether a real step of the answer itself is taken, however sure it is.
        agree_minimum: returns the least of a number over all ranks. Each rank calls
            `find_batch_size`, and all get the same answer.
        also: what else to put back after real steps; see `sandbox`.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(1000, 10)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> answer = find_batch_size(step, torch.ones(2, 1000), device_memory="1GiB")
    >>> answer.size > 250_000, answer.certainty, answer.cost.real_steps
    (True, 'exact', 0)

    Raises:
        FitError: no size that is wanted fits, or this way cannot tell.
        ConfigError: an amount of memory cannot be read.
    """
    _one_of("by", method, METHODS)
    _one_of("for", device, ("cpu", "cuda", None))
    start = time.perf_counter()
    whole = WholeStep.of(step, accumulation=accumulation, measures_noise=measures_noise)
    limit = _limit(whole, device_memory)
    is_here = device_memory is None
    usual = MARGIN if is_here and method != "predict" else MARGIN_OF_PREDICTIONS
    reserve = Margin.parse(usual if margin is None else margin).of(limit.bytes)
    request = Request(
        step=whole,
        make_batch=_maker(batch, whole.device),
        make_fake=_maker(batch, None),
        sizes=CandidateSizes(minimum, maximum, multiple_of, power_of_two),
        limit=limit,
        reserve=reserve,
        reserve_of_probes=Margin.parse(MARGIN_OF_PROBES).of(limit.bytes),
        is_here=is_here,
        also=tuple(also),
        device=device,
        is_checked=check,
    )
    answer = Finder(request, Together(agree_minimum)).run(method)
    cost = answer.cost._replace(seconds=time.perf_counter() - start)
    return dataclasses.replace(answer, cost=cost)


def _one_of(what: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise FitError(
            cannot(
                f"find a batch size {what} {shown(value)}",
                why="there is no such choice",
                instead=f"write {', '.join(map(repr, choices))}",
            )
        )


def _maker(batch: Any, device: torch.device | None) -> Callable[[int], Any]:
    """Make batches of any size, on a device or wherever `batch` is."""

    def make(size: int) -> Any:
        made = batch(size) if callable(batch) else resize_batch(batch, size)
        return made if device is None else move_batch(made, device)

    return make


def _limit(step: WholeStep, device_memory: str | int | None) -> MemoryLimit:
    """What a step may use in all."""
    if device_memory is not None:
        stated = parse_bytes(device_memory)
        if not stated:
            raise FitError(
                cannot(
                    f"find a batch size for device_memory={shown(device_memory)}",
                    why="it is not above zero",
                    instead="write for example 80GiB, or leave it out to use this machine's memory",
                )
            )
        return MemoryLimit(stated, "as stated")
    if step.device.type == "meta":
        raise FitError(
            cannot(
                "find a batch size for a model on the meta device",
                why="it is on no device whose memory could be looked at",
                instead="pass device_memory, for example '80GiB'",
            )
        )
    release_memory()
    free = free_memory(step.device)
    tensors: list[torch.Tensor] = step_tensors(step)
    tensors += [p.grad for p in step.parameters if p.grad is not None]
    return MemoryLimit(free.bytes + allocated_bytes(tensors, step.device), free.source)
