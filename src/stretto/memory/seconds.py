"""`measure_step`: the seconds of a step by batch size, in a sandbox."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stretto.batching.step_cost import StepCost, measured
from stretto.data import move_batch
from stretto.memory.examples import batches_of
from stretto.memory.sandbox import sandbox
from stretto.memory.step import WholeStep
from stretto.ordering import evenly
from stretto.runtime import TrainStep
from stretto.runtime.modes import train_mode
from stretto.runtime.out_of_memory import attempt, release_memory
from stretto.timing.timestamp import NANOSECONDS


def measure_step(
    step: TrainStep,
    batch: Any,
    sizes: Sequence[int],
    *,
    micro_batch_size: int | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> StepCost:
    """Return the seconds of a step of several sizes; model, optimizer and random state stay.

    Other ranks and the data are left out. `Trainer.measure_cost` has both the ranks and the noise.

    Args:
        step: the training step.
        batch: a batch of any size, or a function that makes one of a given size.
        sizes: up to five batch sizes in rising order. Those that do not fit are left out.
        micro_batch_size: the most samples of one pass; by default, all.
        clock: nanoseconds that only grow.

    Raises:
        BatchSizeError: there are more sizes, they do not rise, or not even the first fits.

    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(100, 100)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda model, x: model(x).mean())
    >>> sorted(measure_step(step, torch.ones(2, 100), [2, 4]).sizes)
    [2, 4]
    """
    passes = {size: evenly(size, most=micro_batch_size) for size in sizes}

    def made(size: int) -> Any:
        return move_batch(batches_of(batch, passes[size][0])[0], step.device)

    return timed(
        step,
        lambda size, one: WholeStep.of(step, accumulation=len(passes[size])).run(one),
        made,
        sizes=sizes,
        clock=clock,
    )


def timed(
    step: TrainStep,
    run: Callable[[int, Any], object],
    made: Callable[[int], Any],
    *,
    sizes: Sequence[int],
    clock: Callable[[], int],
    agreed: Callable[[float], float] = float,
) -> StepCost:
    """Time `run` for each size, and restore everything.

    Args:
        step: what is restored.
        run: runs a step of a size with its input.
        made: makes the input, which takes no time.
        sizes: the sizes.
        clock: nanoseconds that only grow.
        agreed: returns the seconds that all ranks use.
    """
    inputs = dict[int, Any]()

    def seconds_of(size: int) -> float:
        if size not in inputs:
            inputs[size] = made(size)
        start = clock()
        done = attempt(lambda: run(size, inputs[size]), in_finder=True)
        if step.device.type != "cpu":
            torch.accelerator.synchronize(step.device)
        return agreed((clock() - start) / NANOSECONDS if done.out_of_memory is None else math.inf)

    transforms, step.transforms = step.transforms, ()  # callbacks would count these batches
    try:
        with sandbox(step.model, vars(step)):
            train_mode(step.model)
            return measured(seconds_of, sizes)
    finally:
        step.transforms = transforms
        inputs.clear()
        release_memory()
