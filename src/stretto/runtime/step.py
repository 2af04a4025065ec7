"""One optimizer step as one object: what the trainer runs, and whose memory is predicted."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.runtime.losses import scalar
from stretto.runtime.sharded import is_fully_sharded, is_spread, touching_all
from stretto.settings import Precision

Info: TypeAlias = Mapping[str, float | Tensor]
"""What an update tells about itself, by name; it is logged."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PLAIN = contextlib.nullcontext()
_NOTHING: Info = MappingProxyType({})


class TrainStep(ABC):
    """How one optimizer step is computed: the gradients of micro-batches, then an update.

    Subclass it for what a loss and an optimizer cannot say: several optimizers, several losses, a
    second pass. Set `model` and `optimizers` in `__init__`, and write `forward_backward` and
    `update`. The trainer decides which samples come, in which micro-batches and with which weight.
    It repeats a step that runs out of memory, and averages gradients over ranks.

    >>> class SignStep(TrainStep):
    ...     def __init__(self, model, optimizer):
    ...         self.model, self.optimizers = model, [optimizer]
    ...     def forward_backward(self, batch, weight):
    ...         loss = self.model(batch).square().mean()
    ...         (loss * weight).backward()
    ...         return loss
    ...     def update(self):
    ...         for parameter in self.parameters:
    ...             parameter.grad.sign_()
    ...         self.optimizers[0].step()
    ...         return {}
    >>> model = nn.Linear(1, 1, bias=False)
    >>> step = SignStep(model, torch.optim.SGD(model.parameters(), lr=0.5))
    >>> before = model.weight.item()
    >>> _ = step.forward_backward(torch.ones(4, 1), 1.0), step.update(), step.clear()
    >>> round(abs(model.weight.item() - before), 6)
    0.5
    """

    SKIPPED: ClassVar[Info] = MappingProxyType({"skipped": 1.0})
    """What `update` returns, this very object, when it left the weights as they were."""

    model: nn.Module
    """What is trained, evaluated and saved; several models in an `nn.ModuleDict`."""
    optimizers: Sequence[Optimizer]
    """What updates it. Schedules and checkpoints see the parameter groups of all, in order."""
    loss: Callable[[Any, Any], Tensor] | None = None
    """`loss(model, batch)`: what an evaluation without a loss of its own measures."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """What the returned loss is over a micro-batch. With a sum, `weight` is that of one sample."""
    scaler: torch.amp.GradScaler | None = None
    """What has multiplied the gradients until `update`. It answers to overflows; no other check of
    the gradient is made."""
    forward_model: nn.Module | None = None
    """On several ranks, wrapped in `DistributedDataParallel`: `forward_backward` calls it once for
    each micro-batch. None: gradients are averaged once, after the last micro-batch."""
    transforms: Sequence[Callable[[Any], Any]] = ()
    """What changes a micro-batch before it is weighed and used; the trainer sets its callbacks'."""
    averaging: Callable[[], None] | None = None
    """What `average_gradients` calls; the trainer sets it on several ranks."""

    @abstractmethod
    def forward_backward(self, batch: Any, weight: float) -> Tensor:
        """Add `weight` times the gradient of a micro-batch's loss, and return the loss.

        Args:
            batch: a micro-batch, on the device of the model.
            weight: its share of the step, times the number of ranks.

        Returns:
            The loss itself, without the weight: a scalar.
        """

    @abstractmethod
    def update(self) -> Info:
        """Change the weights by what was accumulated.

        Returns:
            Numbers to log, as means since the last log; or `TrainStep.SKIPPED`.
        """

    def clear(self) -> None:
        """Forget what was accumulated: after an update, and before a step is repeated."""
        for optimizer in self.optimizers:
            if type(optimizer).zero_grad is not Optimizer.zero_grad:
                optimizer.zero_grad()
                continue
            # What torch's own does, without its label for the profiler: 3 us instead of 25.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def average_gradients(self) -> None:
        """Average the gradients over ranks, for a second pass within `update`."""
        if self.averaging is not None:
            self.averaging()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the model is evaluated."""
        return _PLAIN

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the model and the optimizers: tensors and JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  most have none
        """Go on from what `state_dict` returned."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimizers update."""
        return [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0].device


@final
class SupervisedStep(TrainStep):
    """One model, one loss, one optimizer: the step of a `Trainer` that is given no other.

    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).square().mean(), clip_norm=1.0)
    >>> _ = step.forward_backward(torch.ones(2, 4), 1.0)
    >>> list(step.update())
    ['grad_norm']

    Args:
        model: the model; on the meta device if it is too large for this machine.
        optimizer: updates the model's parameters.
        loss: `loss(model, batch)`, a scalar.
        precision: what the model computes in: fp32 as it is, or autocast.
        clip_norm: the largest norm of the gradient; None: it is not clipped.
        loss_reduction: what the loss is over a micro-batch.
        compile: whether the model runs through `torch.compile`.
        device: the type of device that the model computes on; None: where its parameters are.
    """

    loss: Callable[[Any, Any], Tensor]
    forward_model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Tensor],
        *,
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        compile: bool = False,  # noqa: A002  as in Stepping
        device: str | None = None,
    ) -> None:
        self.model = model
        self.forward_model = cast(nn.Module, torch.compile(model)) if compile else model
        self.optimizers = (optimizer,)
        self.loss = loss
        self.loss_reduction = loss_reduction
        self._device_type = device
        self.dtype = _DTYPES.get(precision)
        """What autocast computes in; None: there is no autocast."""
        self._clip_norm = clip_norm
        self._optimizer = optimizer
        self._clipped: dict[Any, list[nn.Parameter]] = {}
        """What is clipped, by its mesh: torch computes the norm of one mesh at a time."""
        for parameter in [] if clip_norm is None else self.parameters:
            self._clipped.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        self.measures_norm = False
        """Whether the next update returns the norm of a gradient that is not clipped, too."""
        if precision == "fp16":
            self.scaler = torch.amp.GradScaler(device or self.device.type)

    def forward_backward(self, batch: Any, weight: float) -> Tensor:
        """Add `weight` times the gradient of a micro-batch's loss, and return the loss.

        Raises:
            TrainingError: the loss is no scalar.
        """
        if self.dtype is None:
            loss = self.loss(self.forward_model, batch)
        else:
            with self.autocast():
                loss = self.loss(self.forward_model, batch)
        if type(loss) is not Tensor or loss.dim():  # a subclass, or an error
            loss = scalar(loss)
        # A weight of exactly 1 leaves the loss alone: to the last bit a plain loop's.
        scaled = loss if weight == 1.0 else self._weighted(loss, weight)
        if scaled is not None:
            scaled = scaled if self.scaler is None else self.scaler.scale(scaled)
            scaled.backward()
        return loss

    def update(self) -> Info:
        """Clip and step; return the norm of the gradient if it is clipped or asked for."""
        if self.scaler is not None:
            return self._scaled_update(self.scaler)
        if self._clip_norm is not None:
            info = self._clip(self._clip_norm)
        else:
            info = self._measured(1.0) if self.measures_norm else _NOTHING
        self._optimizer.step()
        return info

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the model runs, in training as in evaluation."""
        if self.dtype is None:
            return _PLAIN
        kind = self._device_type or self.device.type
        # The cache would keep the cast weights of every block that FSDP2 frees.
        is_cached = not is_fully_sharded(self.model)
        return torch.autocast(kind, dtype=self.dtype, cache_enabled=is_cached)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale."""
        return {"scaler": None if self.scaler is None else self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved loss scale, if this step scales its loss."""
        saved = state["scaler"] or {}
        for name, value in saved.items():
            if not isinstance(value, (int, float)):
                raise ValueError(f"{name!r} is {value!r}, and not a number")
        if self.scaler is not None and saved:
            self.scaler.load_state_dict(saved)

    def _weighted(self, loss: Tensor, weight: float) -> Tensor | None:
        """Return what to go backward from; None: nothing."""
        if weight == 0.0 and not is_spread(self.forward_model):
            # 0 * nan would be nan, and other ranks may wait for the gradient of each parameter.
            nothing = 0.0 * touching_all(self.forward_model, loss.new_zeros(()))
            return nothing if nothing.requires_grad else None
        return loss * weight

    def _clip(self, most: float) -> Info:
        groups = list(self._clipped.values())
        if len(groups) == 1:
            return {"grad_norm": _whole(nn.utils.clip_grad_norm_(groups[0], most))}
        norms = [
            _whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]))
            for group in groups
        ]
        norm = torch.linalg.vector_norm(torch.stack([part.to(norms[0].device) for part in norms]))
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, most, norm)
        return {"grad_norm": norm}

    def _measured(self, scale: float) -> Info:
        """Return the norm of the gradient; nothing if it is sparse or sharded."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not all(type(grad) is Tensor and grad.layout is torch.strided for grad in gradients):
            return _NOTHING
        return {"grad_norm": nn.utils.get_total_norm(gradients) / scale} if gradients else _NOTHING

    def _scaled_update(self, scaler: torch.amp.GradScaler) -> Info:
        if all(parameter.grad is None for parameter in self.parameters):
            return _NOTHING  # all is frozen: the scaler refuses to step without a gradient
        info, scale = _NOTHING, scaler.get_scale()
        if self._clip_norm is not None:
            scaler.unscale_(self._optimizer)
            info = self._clip(self._clip_norm)
        elif self.measures_norm:
            info = self._measured(scale)
        scaler.step(self._optimizer)
        scaler.update()
        return info if scaler.get_scale() >= scale else self.SKIPPED


def _whole(norm: Tensor) -> Tensor:
    """Return a norm over all ranks that have a part of it."""
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole
