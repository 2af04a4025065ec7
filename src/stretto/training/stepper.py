"""One optimizer step: the gradient of the whole batch, whatever ranks and micro-batches it is in.

The gradient contract: with N units in the batch over all W ranks, a micro-batch of n units whose
mean loss is l contributes the gradient of l * n * W / N, and the ranks are averaged. So the sum is
the gradient of the mean over N, never a mean of means. Units are samples, or target tokens, or
whatever a function counts. Where N is known only after the ranks have spoken (tokens on several
ranks), the division comes late: gradients are multiplied once, before clipping.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.data import DataSpec, MicroBatch, Step, move_batch
from stretto.memory.recognise import is_out_of_memory
from stretto.noise import NoiseSums
from stretto.training.allocation import allocate_state, no_memory
from stretto.training.finite import FiniteCheck
from stretto.training.fully_sharded import is_fully_sharded, sync_gradients, zero_gradient
from stretto.training.losses import nothing_to_learn, scalar
from stretto.training.noise_meter import Measured, NoiseMeter, Pass
from stretto.training.ranks import Ranks, sparse_tables, touching_all
from stretto.training.records import UNFIT, unfit
from stretto.training.safety_net import SafetyNet
from stretto.training.settings import LossFunction, Stepping
from stretto.training.units import unit_counter

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MicroLoss(NamedTuple):
    """The loss of one micro-batch: its sum over units is `loss * factor`, its units `weight`."""

    loss: Tensor
    factor: float
    weight: float


class Gradient(NamedTuple):
    """What one step computed on this rank."""

    losses: list[MicroLoss]
    units: int
    """Units of this rank, where they are summed over ranks; else 0."""
    tokens: int | None
    """Tokens of this rank, where the batches were changed on their way; else the loader knows."""
    num_micro_batches: int
    """Into how many the step was cut on this rank: more than the loader made if memory ran out."""


@final
class Stepper:
    """Computes gradients and updates weights.

    Args:
        model: the model as the loss function gets it (compiled, averaged over ranks).
        optimizer: updates the model's parameters.
        loss: `loss(model, batch)`, a mean or a sum as `settings` says.
        settings: how a step is computed.
        ranks: the processes of the run.
        transforms: functions that change a micro-batch before it is used.
        count_tokens: counts the tokens of what they return.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: LossFunction,
        settings: Stepping,
        ranks: Ranks,
        transforms: Sequence[Callable[[Any], Any]] = (),
        count_tokens: Callable[[Any], int | None] | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._ranks = ranks
        self._transforms = transforms
        self._count_tokens = count_tokens
        self.count = unit_counter(settings)
        self._is_sum = settings.loss_reduction == "sum"
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._clip_norm = settings.clip_norm
        self.resumed_from: Path | None = None
        """The checkpoint whose state no update has used yet."""
        self._dtype = _DTYPES.get(settings.precision)
        self.net: SafetyNet | None = None
        """What is done where memory runs out; None: nothing."""
        self.meter: NoiseMeter | None = None
        """Measures the noise of the gradient; None: nobody asks for it."""
        self.scaler = (
            torch.amp.GradScaler(ranks.device.type) if settings.precision == "fp16" else None
        )
        # With loss scaling the gradient may overflow; the scaler sees to that.
        watched = [] if self.scaler is not None else self._parameters
        self._check = FiniteCheck(watched) if settings.non_finite != "ignore" else None
        self._moves = ranks.device.type != "cpu"
        self._is_sharded = ranks.world_size > 1 and is_fully_sharded(model)
        self._is_settled = False

    def gradient(self, step: Step) -> Gradient:
        """Accumulate the gradient of `step`; it is complete but for `finish`.

        Raises:
            TrainingError: the loss is no scalar, or there is no unit to learn from.
        """
        if not self._is_settled:
            self._settle()
        if self.net is None:
            return self._gradient(step, step.micro_batches, averages=True)
        return self.net.take(
            step,
            compute=lambda pieces, averages: self._gradient(step, pieces, averages=averages),
            clear=self.clear,
            prepare=lambda: self._ranks.share_buffers(self._model),
            average=lambda: self._ranks.average(self._model),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a run must remember beside its weights, as JSON."""
        return {
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "net": None if self.net is None else self.net.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.net is not None and state.get("net") is not None:
            self.net.load_state_dict(state["net"])

    def _settle(self) -> None:
        """Allocate the optimizer's state, and have the ranks average once, before the first step.

        After its first pass `DistributedDataParallel` lays gradients out anew, and with three ranks
        or more it is the layout that says in which order they are summed. With that pass behind it
        a run that goes on sums to the last bit as one that never stopped.
        """
        self._is_settled = True
        allocate_state(self._optimizer, leave_out=sparse_tables(self._model))
        self._ranks.average(self._model)
        self.clear()

    def _gradient(
        self, step: Step, micro_batches: Sequence[MicroBatch], *, averages: bool
    ) -> Gradient:
        num_micro_batches = len(micro_batches)
        if self.meter is not None:
            self.meter.has_finite_gradient = False  # a step that failed may have left it
        meter = self.meter if self.meter is not None and self.meter.is_due(step) else None
        if meter is not None:
            micro_batches = meter.begin(micro_batches)
        micro_batches = [self._transformed(micro) for micro in micro_batches]
        counts = self._counts(micro_batches)
        # The unit weights of all ranks are known only for samples, or where there is one rank.
        late = self.count is not None and self._ranks.world_size > 1
        whole = step.size if self.count is None or late else sum(counts)
        if not whole:
            raise nothing_to_learn(step)
        losses = []
        for index, (micro, units) in enumerate(zip(micro_batches, counts, strict=True)):
            is_last = index == len(micro_batches) - 1
            meets = averages and is_last
            one = Pass(micro, units, divisor=whole, is_last=is_last, is_averaged=meets)
            measured = _NOTHING if meter is None else meter.measure(one)
            with self._without_sync(is_last=meets, meter=meter), measured:
                with self.autocast(), self._muted(units):
                    loss = scalar(self._loss(self._model, self._moved(micro.batch)))
                self._backward(loss, units, whole)
            if units:
                factor = 1.0 if self._is_sum else float(units)
                losses.append(MicroLoss(loss.detach(), factor, float(units)))
        own_units = sum(counts) if late else 0
        return Gradient(losses, own_units, self._tokens(micro_batches), num_micro_batches)

    def is_finite(self, gradient: Gradient) -> bool:
        """Return whether losses and gradient are finite on this rank; true where nobody looks.

        What measured the noise of the gradient has read it already; so ask that first.
        """
        if self._check is None:
            return True
        is_known = self.meter is not None and self.meter.has_finite_gradient
        losses = (micro.loss for micro in gradient.losses)
        return self._check.passes(losses, is_gradient_known=is_known)

    def measure_noise(self, spec: DataSpec, *, every: int) -> None:
        """Measure the noise of the gradient in one of `every` steps from now on."""
        run = Measured(
            model=self._model,
            parameters=self._parameters,
            spec=spec,
            ranks=self._ranks,
            every=every,
            is_sharded=self._is_sharded,
        )
        self.meter = NoiseMeter(run)

    def noise(self) -> NoiseSums:
        """Return what this rank knows of the noise of the gradient; before `finish` and `update`.

        Every rank must call it, where there is a meter.
        """
        assert self.meter is not None, "nobody asks for it"
        return self.meter.sums(1.0 if self.scaler is None else self.scaler.get_scale())

    def finish(self, step: Step, units: float) -> None:
        """Divide the gradient by the `units` of all ranks, where that had to wait for them.

        Raises:
            TrainingError: no rank had any unit to learn from.
        """
        if self.count is None or self._ranks.world_size == 1:
            return
        if units == 0:
            raise nothing_to_learn(step)
        self._multiply(step.size / units)

    def show(self, look: Callable[[], None]) -> None:
        """Call `look` while the gradient is without the loss scale, if there is one.

        The scale is a power of two, so nothing is lost; and what `look` makes infinite is found.
        """
        if self.scaler is None:
            look()
            return
        scale = self.scaler.get_scale()
        self._multiply(1 / scale)
        look()
        self._multiply(scale)

    def _multiply(self, factor: float) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)  # no public spelling of it

    def update(self) -> bool:
        """Clip, step and clear the gradients; return whether the weights have moved.

        They have not where the gradient overflowed under loss scaling.

        Raises:
            TrainingError: memory ran out. Some weights may have moved, so nothing is tried again.
            CheckpointError: the optimizer cannot compute with the state that it was resumed with.
        """
        has_moved = True
        try:
            if self.scaler is not None:
                has_moved = self._scaled_update(self.scaler)
            else:
                if self._clip_norm is not None:
                    nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
                self._optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                if self.resumed_from is not None and isinstance(error, UNFIT):
                    raise unfit(self.resumed_from, self._optimizer, error) from error
                raise
            raise no_memory(
                f"update the weights with {type(self._optimizer).__name__}",
                "memory ran out, and some weights may have changed already",
                error,
                instead="resume from the last checkpoint with foreach=False in the optimizer, an "
                "optimizer that keeps less state, or a smaller micro_batch_size",
            ) from error
        self.resumed_from = None
        self.clear()
        return has_moved

    def clear(self) -> None:
        """Clear the gradients."""
        self._optimizer.zero_grad()
        if self.meter is not None:
            self.meter.forget()

    def _scaled_update(self, scaler: torch.amp.GradScaler) -> bool:
        if all(parameter.grad is None for parameter in self._parameters):
            return True  # all is frozen: the scaler refuses to step without a gradient
        if self._clip_norm is not None:
            scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        scale = scaler.get_scale() if self._check is not None else 0.0
        scaler.step(self._optimizer)
        scaler.update()
        return self._check is None or scaler.get_scale() >= scale

    def _tokens(self, micro_batches: Sequence[MicroBatch]) -> int | None:
        if not self._transforms or self._count_tokens is None:
            return None
        counts = [self._count_tokens(micro.batch) for micro in micro_batches if micro.weight]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _counts(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        if self.count is None:
            return [micro.num_samples if micro.weight else 0 for micro in micro_batches]
        return [self.count(micro.batch) if micro.weight else 0 for micro in micro_batches]

    def _backward(self, loss: Tensor, units: int, whole: int) -> None:
        if units == 0:
            if self._ranks.world_size == 1:
                return
            # Every rank must take part in the averaging; 0 * nan would spoil it (see `_muted`).
            if not self._is_sharded:
                loss = touching_all(self._model, loss.new_zeros(()))
            weight = 0.0
        else:
            weight = (1 if self._is_sum else units) * self._ranks.world_size / whole
        # A weight of exactly 1 leaves the loss alone: to the last bit a plain loop's.
        scaled = loss if weight == 1.0 else loss * weight
        scaled = scaled if self.scaler is None else self.scaler.scale(scaled)
        scaled.backward()

    def _transformed(self, micro: MicroBatch) -> MicroBatch:
        if not self._transforms:
            return micro
        batch = self._moved(micro.batch)
        for transform in self._transforms:
            batch = transform(batch)
        return replace(micro, batch=batch)

    def _moved(self, batch: Any) -> Any:
        # One micro-batch at a time, so that no more of them lie on the device than are used.
        return move_batch(batch, self._ranks.device) if self._moves else batch

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the model runs, in training as in evaluation."""
        if self._dtype is None:
            return _NOTHING
        return torch.autocast(self._ranks.device.type, dtype=self._dtype)

    def _muted(self, units: int) -> AbstractContextManager[Any]:
        """Where the model's own passes are what ranks meet in, one without units runs as well."""
        return zero_gradient(self._model) if self._is_sharded and not units else _NOTHING

    def _without_sync(
        self, *, is_last: bool, meter: NoiseMeter | None
    ) -> AbstractContextManager[Any]:
        if self._is_sharded:
            each = meter is not None and meter.averages_each
            sync_gradients(self._model, is_last=is_last or each)
        if is_last or self._is_sharded or self._ranks.world_size == 1:
            return _NOTHING
        return self._model.no_sync()  # type: ignore[operator,no-any-return]


_NOTHING = contextlib.nullcontext()
