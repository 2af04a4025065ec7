"""Run steps on fake tensors, and explain why if that fails."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, final
from unittest.mock import patch

import torch

from stretto.data import move_batch
from stretto.errors import FitError, StrettoError, first_line
from stretto.memory.prediction.cuda.device import Cuda
from stretto.memory.prediction.cuda.fake_ranks import fake_ranks, following_storages, num_groups
from stretto.memory.prediction.cuda.gpu import Gpu
from stretto.memory.prediction.cuda.kernels import cuda_kernels
from stretto.memory.prediction.cuda.sharding import Sharding
from stretto.memory.prediction.cuda.unsharded import copied_unsharded
from stretto.memory.prediction.fake_copies import FakeCopies
from stretto.memory.prediction.fake_values import FakeValues
from stretto.memory.prediction.recording import Recording
from stretto.memory.prediction.scratch import Cpu
from stretto.memory.prediction.storage_trace import TracedDevice
from stretto.memory.prediction.trace import Around, trace, trace_from_start
from stretto.memory.step import WholeStep
from stretto.runtime.random_state import RandomState

_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
STEPS = 3
"""Traced steps of a run on a GPU. The first creates the state of the optimizer between blocks that
it frees later; the third allocates as all later ones do."""


@final
class Tracer:
    """Runs steps on fake copies of a model and its optimizer.

    Args:
        step: the step. It is not modified.
        make_batch: makes a batch of a given size.
        value: the value of elements that are read from fake tensors.
        gpu: the kind of GPU to trace for; None: the device of the step.
        sharding: how the model is spread over ranks; None: this rank is alone.

    Raises:
        FitError: the model cannot be copied.
    """

    def __init__(
        self,
        step: WholeStep,
        make_batch: Callable[[int], Any],
        value: int = 0,
        *,
        gpu: Gpu | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self.num_steps = self.num_communicators = 0
        self.fake_values = FakeValues(value)
        self._label = "cuda" if step.device.type == "cuda" and sharding is None else "cpu"
        self._real_step = step
        self._make_batch = make_batch
        self._gpu = gpu
        self._sharding = sharding
        self._copy()

    def record(self, size: int) -> Recording:
        """Return the recording of a step with a batch of that size.

        The first recording creates the optimizer state, which later ones use.

        Raises:
            FitError: the step cannot run on fake tensors.
        """
        with self._following(size):
            batch = self._batch(size)
            return trace(self._step, batch, size, fake_values=self.fake_values, device=Cpu())

    def record_from_start(self, size: int) -> Recording:
        """Return the recording of the first steps of a run on a GPU.

        Raises:
            FitError: the steps cannot run on fake tensors.
        """
        assert self._gpu is not None
        if self.num_steps:
            self._copy()  # without the optimizer state of the last recording
        is_labelled_cpu = self._label == "cpu"
        device: TracedDevice = Cuda(self._gpu, is_labelled_cpu=is_labelled_cpu)
        kernels: AbstractContextManager[Any] = (
            cuda_kernels(self._gpu) if is_labelled_cpu else contextlib.nullcontext()
        )
        with self._following(size), kernels, self._sharded() as around:
            batches = (self._batch(size) for _ in range(STEPS))
            return trace_from_start(
                self._step,
                batches,
                size,
                fake_values=self.fake_values,
                device=device,
                around=around,
            )

    @contextlib.contextmanager
    def _sharded(self) -> Iterator[Around]:
        """Shard the fake model, if it is to be sharded, and yield what surrounds the trace."""
        if self._sharding is None:
            yield contextlib.nullcontext
            return
        with fake_ranks(self._sharding.ranks) as mesh:
            self._sharding.apply(self._step.step, mesh)
            self.num_communicators = num_groups()
            yield following_storages

    def _copy(self) -> None:
        self._copies = FakeCopies(self._label)
        try:
            with copied_unsharded(self._real_step.step.model):
                self._step = self._copies.step(self._real_step)
        except Exception as error:  # copying a user's model may raise anything
            raise FitError.cannot(
                "copy a model with fake tensors",
                why=f"copy.deepcopy of the model fails: {first_line(error)}",
                instead="probe with real steps, or give modules a __deepcopy__",
            ) from error

    def _batch(self, size: int) -> Any:
        return move_batch(self._copies.batch(self._make_batch(size)), self._label)

    @contextlib.contextmanager
    def _following(self, size: int) -> Iterator[None]:
        """Activate the fake mode, and explain errors."""
        self.num_steps += 1
        state = RandomState.now()
        try:
            with (
                self._copies.entered(),
                torch.compiler.set_stance("force_eager"),
                patch.object(_FAKE_LOG, "disabled", new=True),  # the error is raised as well
            ):
                yield
        except StrettoError:
            raise
        except Exception as error:  # a user's model may raise anything
            raise FitError.cannot(
                f"follow a step of {size} samples on fake tensors",
                why=first_line(error),
                instead="probe with real steps"
                if self._gpu is None
                else "leave device_memory out, on a machine with that GPU",
            ) from error
        finally:
            state.restore()
