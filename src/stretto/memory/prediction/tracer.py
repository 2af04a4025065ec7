"""Run steps on fake tensors, and explain why if that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from stretto.data import move_batch
from stretto.errors import FitError, StrettoError, first_line
from stretto.memory.prediction.cuda import CudaKernels, use_foreach
from stretto.memory.prediction.fake_copies import FakeCopies
from stretto.memory.prediction.fake_values import FakeValues
from stretto.memory.prediction.recording import Recording
from stretto.memory.prediction.trace import trace
from stretto.memory.step import WholeStep
from stretto.runtime.random_state import RandomState


@final
class Tracer:
    """Runs steps on fake copies of a model and its optimizer.

    The first step creates the optimizer state, which later steps use.

    Args:
        step: the step. It is not modified.
        make_batch: makes a batch of a given size.
        value: the value of elements that are read from fake tensors.
        for_cuda: whether to trace CUDA kernels.

    Raises:
        FitError: the model cannot be copied.
    """

    def __init__(
        self,
        step: WholeStep,
        make_batch: Callable[[int], Any],
        value: int = 0,
        *,
        for_cuda: bool = False,
    ) -> None:
        self.num_steps = 0
        self._device = "cuda" if step.device.type == "cuda" else "cpu"
        self.fake_values = FakeValues(value, on_cuda=for_cuda or self._device == "cuda")
        self._copies = FakeCopies(self._device)
        self._make_batch = make_batch
        try:
            self._step = self._copies.step(step)
        except Exception as error:  # copying a user's model may raise anything
            raise FitError.cannot(
                "copy a model with fake tensors",
                why=f"copy.deepcopy of the model fails: {first_line(error)}",
                instead="probe with real steps, or give modules a __deepcopy__",
            ) from error
        self._kernels: AbstractContextManager[Any] = contextlib.nullcontext()
        if for_cuda and self._device == "cpu":
            use_foreach(self._step.optimizers)
            self._kernels = CudaKernels()

    def record(self, size: int) -> Recording:
        """Return the recording of a step with a batch of that size.

        Raises:
            FitError: the step cannot run on fake tensors.
        """
        self.num_steps += 1
        state = RandomState.now()
        try:
            with self._copies.entered(), torch.compiler.set_stance("force_eager"):
                batch = self._copies.batch(self._make_batch(size))
                batch = move_batch(batch, self._device)
                with self._kernels:
                    return trace(self._step, batch, size, fake_values=self.fake_values)
        except StrettoError:
            raise
        except Exception as error:  # a user's model may raise anything
            raise FitError.cannot(
                f"follow a step of {size} samples on fake tensors",
                why=first_line(error),
                instead="probe with real steps",
            ) from error
        finally:
            state.restore()
