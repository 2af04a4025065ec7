"""One whole optimizer step as plain data: what the memory of a run is the memory of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.noise import MicroGradients

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NOTHING = contextlib.nullcontext()


def _ignore(_phase: str) -> None:
    """Do nothing."""


@final
@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One optimizer step on one rank: forward, backward, clipping, update.

    It computes what a step of the `Trainer` computes, in the same order, so that it holds the same
    memory at each moment; the values do not matter. The batch it gets is one micro-batch.

    >>> model = nn.Linear(4, 1)
    >>> step = TrainingStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).mean())
    >>> step.run(torch.ones(2, 4))
    >>> model.weight.grad is None
    True
    """

    model: nn.Module
    """The model; on the meta device where it is too large for this machine."""
    optimizer: Optimizer
    """Updates the model's parameters."""
    loss: Callable[[Any, Any], Tensor]
    """`loss(model, batch)`, a scalar."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What the model computes in: fp32 as it is, or autocast."""
    clip_norm: float | None = None
    """The norm that gradients are clipped to."""
    accumulation: int = 1
    """Micro-batches of a step. From the second on, the gradients are there during the forward."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """What the loss is over a micro-batch."""
    measures_noise: bool = False
    """Whether the gradient of each micro-batch is looked at by itself, before it is added."""

    def run(self, batch: Any, *, enter: Callable[[str], object] = _ignore) -> None:
        """Take the step, with the micro-batch `batch` as often as there are micro-batches.

        Args:
            batch: a micro-batch, on the device of the model.
            enter: called with the name of each phase as it begins: `forward`, `backward`,
                `optimizer`.
        """
        device = self.device.type
        scaler = torch.amp.GradScaler(device) if self.precision == "fp16" else None
        weight = 1.0 if self.loss_reduction == "sum" else 1 / self.accumulation
        losses = []
        gradients = MicroGradients(cast("list[nn.Parameter]", self.parameters))
        for number in range(self.accumulation):
            enter("forward")
            with self._autocast(device):
                loss = self.loss(self.model, batch)
            enter("backward")
            scaled = loss if weight == 1.0 else loss * weight
            scaled = scaled if scaler is None else scaler.scale(scaled)
            is_last = number == self.accumulation - 1
            with gradients.watch(is_last=is_last) if self.measures_noise else _NOTHING:
                scaled.backward()
            losses.append(loss.detach())
        del loss, scaled
        enter("optimizer")
        self._update(scaler)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.parameters)).device

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _update(self, scaler: torch.amp.GradScaler | None) -> None:
        if self.clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad()

    def _autocast(self, device: str) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return _NOTHING
        return torch.autocast(device, dtype=_DTYPES[self.precision])
