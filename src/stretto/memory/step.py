"""One whole optimizer step, which is tried, and its copy without memory."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard, final

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.errors import FitError, first_line
from stretto.runtime import TrainStep
from stretto.runtime.losses import detached
from stretto.runtime.micro_gradients import MicroGradients
from stretto.runtime.modes import train_mode

_NOTHING = contextlib.nullcontext()
_MOST_BYTES = 4 << 20
"""Larger tensors of integers travel without their elements."""


def makes_step(given: object) -> TypeGuard[Callable[[], TrainStep]]:
    """Return whether something is a function that makes a step, instead of the step itself."""
    return callable(given) and not isinstance(given, (TrainStep, WholeStep, nn.Module))


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
        cls,
        step: TrainStep | WholeStep | Callable[[], TrainStep],
        *,
        accumulation: int = 1,
        measures_noise: bool = False,
    ) -> WholeStep:
        """Return a step of this rank alone, without communication.

        A function that makes it is called with `torch.device("meta")`.

        >>> from stretto.runtime import SupervisedStep
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> step = WholeStep.of(SupervisedStep(model, optimizer, lambda m, x: m(x).mean()))
        >>> step.run(torch.ones(2, 4))
        >>> model.weight.grad is None
        True
        """
        if makes_step(step):
            with torch.device("meta"):
                step = step()
        if isinstance(step, WholeStep):
            return step
        if not isinstance(step, TrainStep):
            raise FitError.cannot(
                f"follow a step of a {type(step).__name__}",
                why="memory is that of a whole training step: forward, backward and update",
                instead="pass SupervisedStep(model, optimizer, loss)",
            )
        alone = copy.copy(step)
        alone.averaging = None
        for name, value in list(vars(alone).items()):
            if isinstance(value, nn.parallel.DistributedDataParallel):
                setattr(alone, name, value.module)
        return cls(alone, accumulation, measures_noise)

    def run(self, batch: Any) -> None:
        """Run the step, with `batch`, on the device of the model, as every micro-batch.

        The model is put into the mode in which a run trains it.
        """
        step = self.step
        train_mode(step.model)
        weight = 1.0 if step.loss_reduction == "sum" else 1 / self.accumulation
        losses = []
        gradients = MicroGradients(self.step.parameters)
        for number in range(self.accumulation):
            micro = batch
            for transform in step.transforms:
                micro = transform(micro)
            is_last = number == self.accumulation - 1
            with gradients.watch(is_last=is_last) if self.measures_noise else _NOTHING:
                losses.append(detached(step.forward_backward(micro, weight)))
            del micro
        step.update()
        step.clear()

    @property
    def model(self) -> nn.Module:
        """The module that runs, compiled if the step compiles it."""
        return self.step.model if self.step.forward_model is None else self.step.forward_model

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.step.device

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors of the state of the optimizers."""
        states = (state for one in self.step.optimizers for state in one.state.values())
        values = (value for one in states if isinstance(one, dict) for value in one.values())
        return [value for value in values if isinstance(value, Tensor)]

    def tensors(self) -> list[Tensor]:
        """Return the static tensors: parameters, buffers and the state of the optimizers."""
        return [*self.model.parameters(), *self.model.buffers(), *self.state_tensors()]


@final
@dataclass(frozen=True, slots=True)
class _Spec:
    """What a tensor is, without its elements."""

    key: int
    """Tensors with the same key share a storage."""
    count: int
    """The elements of that storage."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_parameter: bool
    requires_grad: bool
    device: str
    elements: bytes | None
    """Of a small tensor that decides what is computed: the step count of an optimizer, a mask, an
    index. None: zeros."""


class _Writer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles anything; of tensors, only what they are like."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._kept: list[Any] = []  # ids are unique only while the objects are alive

    def reducer_override(self, thing: Any) -> Any:
        """Pickle the attributes of an optimizer that `Optimizer.__getstate__` leaves out."""
        if getattr(type(thing), "__getstate__", None) is not Optimizer.__getstate__:
            return super().reducer_override(thing)
        # A scheduler replaces `step` by a function with a weak reference.
        kept = {k: v for k, v in vars(thing).items() if k != "step" and "_hooks" not in k}
        return copyreg.__newobj__, (type(thing),), kept  # type: ignore[attr-defined]

    def persistent_id(self, thing: Any) -> tuple[int, _Spec] | None:
        if not isinstance(thing, Tensor):
            return None
        if type(thing) not in (Tensor, nn.Parameter) or thing.layout is not torch.strided:
            raise TypeError(f"there is a tensor of the kind {type(thing).__name__} in it")
        storage = thing.untyped_storage()
        self._kept += [thing, storage]
        spec = _Spec(
            key=id(storage),
            count=storage.nbytes() // thing.element_size(),
            dtype=thing.dtype,
            size=tuple(thing.shape),
            stride=thing.stride(),
            offset=int(thing.storage_offset()),
            is_parameter=isinstance(thing, nn.Parameter),
            requires_grad=thing.requires_grad and thing.is_leaf,
            device=thing.device.type,
            elements=_elements(thing),
        )
        return id(thing), spec


class _Reader(pickle.Unpickler):
    """Makes what was written, with new tensors of zeros."""

    def __init__(self, file: io.BytesIO, device: str, parameters: str) -> None:
        super().__init__(file)
        self._device, self._parameters = device, parameters
        self._storages: dict[tuple[int, str], Tensor] = {}
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: tuple[int, _Spec]) -> Tensor:
        key, spec = pid
        if key not in self._tensors:
            self._tensors[key] = self._made(spec)
        return self._tensors[key]

    def _made(self, spec: _Spec) -> Tensor:
        if spec.elements is not None:
            made = torch.frombuffer(bytearray(spec.elements), dtype=spec.dtype).reshape(spec.size)
            # A count of an optimizer stays on the host, whatever the device.
            return made if made.numel() == 1 else made.to(self._device)
        device = self._parameters if spec.is_parameter else self._device
        key = spec.key, device
        if key not in self._storages:
            self._storages[key] = torch.zeros(spec.count, dtype=spec.dtype, device=device)
        with torch.no_grad():
            base = self._storages[key]
            base = base if base.dtype == spec.dtype else base.view(spec.dtype)
            made = base.as_strided(spec.size, spec.stride, spec.offset).detach()
        if spec.is_parameter:
            return nn.Parameter(made, requires_grad=spec.requires_grad)
        return made.requires_grad_(spec.requires_grad)


def _elements(tensor: Tensor) -> bytes | None:
    """Return what a tensor holds, if it is on the host and decides what is computed."""
    if tensor.device.type != "cpu":
        return None
    is_count = tensor.numel() == 1 and not tensor.requires_grad
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    if not is_count and not (is_whole and tensor.nbytes <= _MOST_BYTES):
        return None
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def step_bytes(thing: object) -> bytes:
    """Return an object as bytes, without the elements of its tensors.

    Tensors that are shared or tied stay so. A model of 7 billion parameters takes a few kilobytes.

    >>> len(step_bytes(nn.Linear(4096, 4096))) < 10_000
    True

    Raises:
        FitError: a part of it cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _Writer(file).dump(thing)
    except Exception as error:  # a user's class may raise anything
        raise FitError.cannot(
            f"copy a {type(thing).__name__} without its memory",
            why=f"it cannot be pickled: {first_line(error)}",
            instead="pass a function that makes it, or leave gpu out, on the device",
        ) from error
    return file.getvalue()


def read_step(data: bytes, device: str, *, parameters: str | None = None) -> Any:
    """Return what `step_bytes` wrote, with tensors of zeros on a device, parameters on another.

    >>> layer = read_step(step_bytes(nn.Linear(2, 3)), "meta")
    >>> layer.weight.shape, layer.weight.device.type
    (torch.Size([3, 2]), 'meta')
    """
    return _Reader(io.BytesIO(data), device, parameters or device).load()
