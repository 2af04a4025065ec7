"""One whole optimizer step, whose memory is measured or predicted."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final
from unittest.mock import patch

import torch
from torch import nn
from torch._guards import TracingContext
from torch.optim import Optimizer

from stretto.errors import FitError
from stretto.runtime import TrainStep
from stretto.runtime.gradients import detached
from stretto.runtime.micro_gradients import MicroGradients

_NOTHING = contextlib.nullcontext()
_PATCHING = threading.RLock()
"""Held while torch's function is replaced, for that concerns all threads."""


def _ignore(_phase: str) -> None:
    """Do nothing."""


@final
@dataclass(frozen=True, slots=True)
class WholeStep:
    """An optimizer step on one rank that uses the same batch for each of its micro-batches."""

    step: TrainStep
    accumulation: int = 1
    """Micro-batches per step. From the second on, gradients exist during the forward pass."""
    measures_noise: bool = False
    """Whether the gradient of each micro-batch is measured before it is accumulated."""

    @classmethod
    def of(
        cls, step: TrainStep | WholeStep, *, accumulation: int = 1, measures_noise: bool = False
    ) -> WholeStep:
        """Return a step of this rank alone, without communication.

        >>> from stretto.runtime import SupervisedStep
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> step = WholeStep.of(SupervisedStep(model, optimizer, lambda m, x: m(x).mean()))
        >>> step.run(torch.ones(2, 4))
        >>> model.weight.grad is None
        True
        """
        given: object = step
        if not isinstance(given, (TrainStep, WholeStep)):
            raise FitError.cannot(
                f"follow a step of a {type(given).__name__}",
                why="memory is that of a whole training step: forward, backward and update",
                instead="pass SupervisedStep(model, optimizer, loss), of stretto",
            )
        if isinstance(step, WholeStep):
            return step
        if step.averaging is not None:
            step = copy.copy(step)
            step.averaging = None
        for name, value in list(vars(step).items()):
            if isinstance(value, nn.parallel.DistributedDataParallel):
                step = copy.copy(step)
                setattr(step, name, value.module)
        return cls(step, accumulation, measures_noise)

    def run(self, batch: Any, *, enter: Callable[[str], object] = _ignore) -> None:
        """Run the step, with `batch` as every micro-batch.

        Args:
            batch: a micro-batch, on the device of the model.
            enter: called at the start of each phase with its name: `forward`, `backward` or
                `optimizer`.
        """
        step = self.step
        weight = 1.0 if step.loss_reduction == "sum" else 1 / self.accumulation
        losses = []
        gradients = MicroGradients(self.parameters)
        with _backward_passes(enter):
            for number in range(self.accumulation):
                enter("forward")
                micro = batch
                for transform in step.transforms:
                    micro = transform(micro)
                is_last = number == self.accumulation - 1
                with gradients.watch(is_last=is_last) if self.measures_noise else _NOTHING:
                    losses.append(detached(step.forward_backward(micro, weight)))
                del micro
        enter("optimizer")
        step.update()
        step.clear()

    @property
    def model(self) -> nn.Module:
        """The module that runs, compiled if the step compiles it."""
        return self.step.model if self.step.forward_model is None else self.step.forward_model

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers of the step."""
        return tuple(self.step.optimizers)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.step.device

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizers update."""
        return self.step.parameters


@contextlib.contextmanager
def _backward_passes(enter: Callable[[str], object]) -> Iterator[None]:
    """Call `enter` when autograd starts a backward pass and when it ends.

    `backward`, `grad` and compiled code all call the function that is wrapped here. torch has no
    public hook for it.
    """
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        if TracingContext.try_get() is not None:  # torch.compile traces a backward pass; none runs
            return run_backward(*args, **kwargs)
        enter("backward")
        try:
            return run_backward(*args, **kwargs)
        finally:
            enter("forward")

    with _PATCHING, patch.object(torch.autograd, "_engine_run_backward", run):
        yield
