"""One optimizer step: the gradient of the whole batch over all ranks and micro-batches.

With N units in the batch over all W ranks, a micro-batch of n units with mean loss l contributes
the gradient of l * n * W / N, and gradients are averaged over ranks. The sum is the gradient of the
mean over N, never a mean of means. Units are samples, target tokens, or what a function counts. If
N is known only after the ranks have exchanged their counts (tokens on several ranks), gradients are
multiplied once after the last pass, before clipping.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from stretto.batching import Signals
from stretto.batching.following import LOSS, NOISE
from stretto.data import DataSpec, MicroBatch, Step, move_batch
from stretto.data.weights import nothing_to_learn, unit_counter
from stretto.distributed.logged import MicroLoss
from stretto.distributed.strategy import Strategy
from stretto.errors import StrettoError, TrainingError, first_line
from stretto.noise import NoiseMeter, NoiseSums
from stretto.runtime import SupervisedStep, TrainStep
from stretto.runtime.losses import scalar
from stretto.runtime.out_of_memory import is_out_of_memory, out_of_memory_text
from stretto.runtime.rewind import kept_buffers
from stretto.runtime.sharded import local_part
from stretto.runtime.step import Info
from stretto.settings import Stepping
from stretto.training.checkpointing.records import UNFIT, unfit
from stretto.training.criterion import HINT
from stretto.training.stepping.finite import FiniteCheck, Gradient
from stretto.training.stepping.reduction import adds_up, has_sum, is_sum
from stretto.training.stepping.retry import Retry


class Measured(NamedTuple):
    """Sums of what a step measured for the policy and for callbacks; ranks add them up."""

    loss: float = 0.0
    """The sum of the losses."""
    units: float = 0.0
    """The units that the losses are weighted by."""
    weighted: float = 0.0
    groups: float = 0.0
    noise_units: float = 0.0
    whole: float = 0.0
    """These four are `NoiseSums`."""

    def signals(self, num_samples: int) -> Signals:
        """Return the signals of a step, from the sums of all ranks."""
        signals = NoiseSums(*self[2:]).signals(num_samples)
        return replace(signals, loss=self.loss / self.units) if self.units else signals


@final
class Stepper:
    """Runs a `TrainStep` on the micro-batches of a batch and checks the result.

    Args:
        step: computes gradients and updates the weights.
        spec: the data: cuts batches and counts tokens.
        settings: the units of the loss, what to do if it is not finite, when to measure the noise.
        strategy: wraps the model and averages gradients over ranks.
        reads: the signals that the batch size policy reads.
        measures_noise: whether a callback reads the gradient noise.
        micro_batch_size: the most samples of a micro-batch; None: the whole share of a rank.
        is_found: whether that size was found by a search.
    """

    def __init__(
        self,
        step: TrainStep,
        spec: DataSpec,
        *,
        settings: Stepping,
        strategy: Strategy,
        reads: frozenset[str] = frozenset(),
        measures_noise: bool = False,
        micro_batch_size: int | None = None,
        is_found: bool = False,
    ) -> None:
        self._step = step
        self._strategy, self._ranks = strategy, strategy.ranks
        # If nobody changes the batches, the loader has counted their tokens.
        self._count_tokens = spec.count_tokens if spec.tokens_vary else None
        is_called = step.forward_model is not None
        called = step.model if step.forward_model is None else step.forward_model
        model = strategy.wrap(called, is_called=is_called)
        if is_called:
            step.forward_model = model
        step.averaging = strategy.average
        self._averages_in_passes = strategy.averaging in ("last", "each")
        self._layers_meet = strategy.ranks.dp_world_size > 1 and has_meeting_layers(step.model)
        self._passes_meet = self._averages_in_passes or self._layers_meet
        # A dummy must leave no trace in the buffers of a loss either.
        held = (*vars(step).values(), getattr(step.loss, "criterion", None))
        self._modules = nn.ModuleList([one for one in held if isinstance(one, nn.Module)])
        self.count = unit_counter(settings)
        self._is_sum = step.loss_reduction == "sum"
        self._parameters = step.parameters
        self.resumed_from: Path | None = None
        """The checkpoint that was loaded, until the first update after it."""
        self.retry = Retry(step.model, spec, self._ranks, size=micro_batch_size, is_found=is_found)
        """Repeats steps that run out of memory."""
        self._reads_loss = LOSS in reads
        self.meter: NoiseMeter | None = None
        """Measures the gradient noise; None: it is not needed."""
        if NOISE in reads or measures_noise:
            every = settings.steps_between_noise
            self.meter = NoiseMeter(self._parameters, spec=spec, strategy=strategy, every=every)
        # With loss scaling, the gradient may overflow; the scaler handles that.
        watched = [] if step.scaler is not None else self._parameters
        self._moves = self._ranks.device.type != "cpu"
        is_late = settings.non_finite == "stop" and self._moves
        checks = settings.non_finite != "ignore"
        self._check = FiniteCheck(watched, is_late=is_late) if checks else None
        self._divides_late = (
            self.count is not None and strategy.ranks.dp_world_size > 1 and self._averages_in_passes
        )
        """Whether gradients are divided by the units of all ranks after the last pass. Not for a
        step of your own without DDP, whose `update` may use the weights, too."""
        is_alone = strategy.averaging == "none"
        self._is_plain = is_alone and self.count is None and not self._is_sum
        """Whether the weights of the loader are final, and there is no other rank."""
        self._supervised = step if isinstance(step, SupervisedStep) else None
        self._spec, self._world_size = spec, strategy.ranks.dp_world_size
        self._has_gradient: Sequence[bool] = ()
        """Which parameters had a gradient before the average gave all of them one."""
        self._is_seen = self._is_sum or self.count is not None
        """Whether it is known that the loss is a mean, as far as it can be."""
        self._looks = False
        """Whether the next pass looks whether it is one."""
        self._is_warm = False
        self._is_new = True
        """Whether no step was taken yet."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Scales the loss; None: it is not scaled."""
        return self._step.scaler

    def gradient(self, step: Step) -> Gradient:
        """Accumulate the gradient of `step`; `finish` completes it.

        Raises:
            TrainingError: the loss is not a scalar, or the batch has no units.
        """
        if not self._is_warm:
            self._warm_up()
        retry = self.retry
        if self._ranks.world_size == 1:
            retry.rewind.save()
        while True:
            pieces = step.micro_batches if retry.size is None else retry.pieces(step)
            self._looks = not self._is_seen and len(pieces) * self._world_size > 1
            try:
                return self._gradient(step, pieces)
            except Exception as error:  # noqa: BLE001  others are raised again
                if self._is_new and isinstance(error, (TypeError, AttributeError)):
                    error.add_note(HINT)
                message = out_of_memory_text(error)
            most = max(micro.num_samples for micro in pieces)
            retry.fall_back(step, most, message, clear=self.clear)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the out-of-memory retry as JSON."""
        return {"retry": self.retry.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        if state.get("retry") is not None:
            self.retry.load_state_dict(state["retry"])

    def _warm_up(self) -> None:
        """Average gradients once, before the first step.

        After its first pass, `DistributedDataParallel` changes the layout of its buckets. With
        three ranks or more, the layout decides the order of summation. After this extra pass, a
        resumed run sums in the same order as one that never stopped.
        """
        self._is_warm = True
        self._strategy.average()
        self.clear()

    def _gradient(self, step: Step, micro_batches: Sequence[MicroBatch]) -> Gradient:
        num_micro_batches, meter = len(micro_batches), self.meter
        if self._is_plain and meter is None and not self._step.transforms:
            own = []
            for micro in micro_batches:
                units = micro.num_samples
                own.append(MicroLoss(self._pass(micro, micro.weight), units, units))
            return Gradient(own, 0, None, num_micro_batches)
        if meter is not None:
            meter.has_finite_gradient = False  # a failed step may have set it
            meter = meter if meter.is_due(step) else None
        if meter is not None:
            micro_batches = meter.begin(step, micro_batches)
        micro_batches = self._needed(micro_batches, is_measured=meter is not None)
        if self._step.transforms:
            micro_batches = [self._transformed(micro) for micro in micro_batches]
        counts = self._counts(micro_batches)
        whole = step.num_samples if self.count is None else self._whole(step, counts)
        if not whole:
            raise nothing_to_learn(step)
        losses = []
        for index, (micro, units) in enumerate(zip(micro_batches, counts, strict=True)):
            is_last = index == len(micro_batches) - 1
            measured: AbstractContextManager[None] = _NOTHING
            if meter is not None:
                measured = meter.watch(micro, is_last=is_last, units=units, divisor=whole)
            factor = 1 if self._is_sum else units
            averages = is_last or (meter is not None and meter.averages_each)
            with self._strategy.sync(averages=averages, is_empty=not units), measured:
                if units:
                    loss = self._pass(micro, factor * self._world_size / whole)
                    losses.append(MicroLoss(loss, factor, units))
                elif self._passes_meet:  # other ranks wait for it
                    with kept_buffers(self._modules):
                        self._step.forward_backward(self._moved(micro.batch), 0.0)
        if self._strategy.averaging == "after":
            self._has_gradient = [one.grad is not None for one in self._parameters]
            self._strategy.average()
        own_units = sum(counts) if self._divides_late else 0
        tokens = self._tokens(micro_batches) if self._step.transforms else None
        return Gradient(losses, own_units, tokens, num_micro_batches)

    def _needed(
        self, micro_batches: Sequence[MicroBatch], *, is_measured: bool
    ) -> Sequence[MicroBatch]:
        """Return the micro-batches that are run: dummies only where other ranks wait for them.

        If ranks only meet in the last pass, it may be any pass of each.
        """
        strategy = self._strategy
        each_meets = strategy.is_sharded or strategy.averaging == "each"
        if is_measured or self._layers_meet or each_meets:
            return micro_batches
        return [micro for micro in micro_batches if micro.weight] or micro_batches[-1:]

    def _whole(self, step: Step, counts: Sequence[int]) -> float:
        """Return the units that the losses are divided by."""
        if self._divides_late:
            return step.num_samples
        own = sum(counts)
        return own if self._world_size == 1 else self._ranks.agree(self._ranks.counted((own,)))[0]

    def _pass(self, micro: MicroBatch, weight: float) -> Tensor:
        """Run the step on one micro-batch, and return its loss."""
        # Moved one at a time, so that only one micro-batch is on the device.
        batch = self._moved(micro.batch) if self._moves else micro.batch
        loss = self._step.forward_backward(batch, weight)
        if type(loss) is not Tensor or loss.dim():  # a subclass, or an error
            loss = scalar(loss)
        if self._looks:
            self._look(loss, micro)
        loss = loss.detach()  # what `detached` does, without a call for each micro-batch
        return loss.clone() if loss.untyped_storage().nbytes() > loss.nbytes else loss

    def _look(self, loss: Tensor, micro: MicroBatch) -> None:
        """Warn of a loss that is a sum, when a batch is cut for the first time."""
        self._looks, self._is_seen = False, True
        found = is_sum(loss, micro.num_samples)
        # Layers that meet other ranks would wait for them; transforms change what the loss sees.
        is_own = self._supervised if not (self._layers_meet or self._step.transforms) else None
        if is_own is not None and not found and has_sum(loss):
            found = adds_up(is_own, self._spec, micro)
        if self._ranks.is_first and found:
            warnings.warn(
                "the loss is a sum over the samples, so the gradient depends on how a batch is "
                "cut; return the mean, or write Stepping(loss_reduction='sum')",
                UserWarning,
                stacklevel=2,
            )

    def is_finite(self, gradient: Gradient) -> bool:
        """Return whether losses and gradient are finite on this rank, as far as the host knows.

        True if it is not checked. Call it after the noise is measured, which reads the gradient.
        """
        if self._check is None:
            return True
        is_known = self.meter is not None and self.meter.has_finite_gradient
        losses = list(map(_LOSS, gradient.losses))
        return self._check.passes(losses, is_gradient_known=is_known)

    @property
    def may_skip(self) -> bool:
        """Whether an update may leave the weights as they were."""
        return self.scaler is not None or not isinstance(self._step, SupervisedStep)

    @property
    def is_checked_late(self) -> bool:
        """Whether `settle` may find a step that `is_finite` has let pass."""
        return self._check is not None and self._check.is_late

    def settle(self) -> bool:
        """Wait for the device; return whether all steps so far were finite on this rank."""
        return self._check is None or self._check.settle()

    @property
    def measures(self) -> bool:
        """Whether a policy or a callback reads what steps measure."""
        return self._reads_loss or self.meter is not None

    def measured(self, gradient: Gradient) -> Measured:
        """Return this rank's sums; call it before `finish` and `update`, on every rank."""
        loss = units = 0.0
        if self._reads_loss and gradient.losses and self._ranks.is_loss_rank:
            losses = torch.stack([one.loss for one in gradient.losses]).double().tolist()
            pairs = zip(losses, gradient.losses, strict=True)
            loss = sum(one * micro.factor for one, micro in pairs)
            units = sum(one.weight for one in gradient.losses)
        if self.meter is None:
            return Measured(loss, units)
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        return Measured(loss, units, *self.meter.sums(scale))

    def flags(self, gradient: Gradient) -> Sequence[float]:
        """Return what `finish` needs of all ranks, who add it up.

        Where gradients are averaged after the passes, a parameter that no rank has a gradient of
        gets one of zeros, which the optimizer would use.
        """
        if self._strategy.averaging != "after":
            return ()
        return bool(gradient.losses) and not any(self._has_gradient), *self._has_gradient

    def finish(self, step: Step, units: float, flags: Sequence[float] = ()) -> None:
        """Divide the gradient by the `units` of all ranks, if the passes did not.

        Args:
            step: the step.
            units: those of all ranks.
            flags: the sums of `flags`.

        Raises:
            TrainingError: no rank has any units; or in the first step, a rank has no gradient.
        """
        for parameter, count in zip(self._parameters, flags[1:], strict=False):
            if not count:
                parameter.grad = None
        if self._is_new and flags and flags[0]:
            raise self._no_gradient(f"in the first step, {flags[0]:.0f} ranks have no gradient")
        if not self._divides_late:
            return
        if units == 0:
            raise nothing_to_learn(step)
        self._multiply(step.num_samples / units)

    def show(self, look: Callable[[], None]) -> None:
        """Call `look` while the gradient is unscaled.

        The scale is a power of two, so nothing is lost, and the scaler finds infinite values that
        `look` has set.
        """
        if self.scaler is None:
            look()
            return
        scale = self.scaler.get_scale()
        self._multiply(1 / scale)
        look()
        self._multiply(scale)

    def _multiply(self, factor: float) -> None:
        gradients = [local_part(p.grad) for p in self._parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)  # no public spelling of it

    def update(self, *, measures_norm: bool = False) -> Info | None:
        """Update the weights, clear the gradients and return the step's values for the log.

        `measures_norm` asks a `SupervisedStep` for the norm of the gradient.

        None: the weights did not change, because the gradient overflowed under loss scaling.

        Raises:
            TrainingError: no parameter has a gradient; or memory ran out. Some weights may have
                changed, so it is not repeated.
            CheckpointError: an optimizer cannot use the state that was loaded into it.
        """
        versions = [one._version for one in self._parameters] if self._is_new else None
        had_gradients = self._is_new and self._has_gradients()
        if self._supervised is not None:
            self._supervised.measures_norm = measures_norm
        try:
            info: Info | None = self._step.update()
        except Exception as error:
            explained = self._explained(error)
            if explained is None:
                raise
            raise explained from error
        self.resumed_from = None
        if versions is not None and info is not TrainStep.SKIPPED:
            self._is_new = False
            is_same = versions == [one._version for one in self._parameters]
            if is_same and not (had_gradients or self._has_gradients()):
                raise self._no_gradient(
                    "after the first step, no parameter of its optimizers has a gradient"
                )
        self._step.clear()
        if self.meter is not None:
            self.meter.forget()
        if info is not TrainStep.SKIPPED:
            return {} if info is None else info
        return None if self._check is not None else {}

    def _explained(self, error: Exception) -> StrettoError | None:
        """Return what to raise instead of an error of the update; None: the error itself."""
        optimizers = " and ".join(type(one).__name__ for one in self._step.optimizers)
        if is_out_of_memory(error):
            return TrainingError.cannot(
                f"update the weights with {optimizers}",
                why=f"memory ran out, and some weights may have changed ({first_line(error)})",
                instead="resume with foreach=False in the optimizer or a smaller micro_batch_size",
            )
        if self.resumed_from is not None and isinstance(error, UNFIT):
            return unfit(self.resumed_from, optimizers, error)
        return None

    def _no_gradient(self, why: str) -> TrainingError:
        return TrainingError.cannot(
            f"train with {type(self._step).__qualname__}",
            why=why,
            instead="call (loss * weight).backward(), and optimize what the loss depends on",
        )

    def _has_gradients(self) -> bool:
        trained = [one for one in self._parameters if one.requires_grad]
        return not trained or any(one.grad is not None for one in trained)

    def clear(self) -> None:
        """Clear the gradients."""
        self._step.clear()
        if self.meter is not None:
            self.meter.forget()

    def _tokens(self, micro_batches: Sequence[MicroBatch]) -> int | None:
        if self._count_tokens is None:
            return None
        counts = [self._count_tokens(micro.batch) for micro in micro_batches if micro.weight]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _counts(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        """Count the units of each micro-batch; none in a dummy."""
        if self.count is None:
            return [micro.num_samples if micro.weight else 0 for micro in micro_batches]
        return [self.count(micro.batch) if micro.weight else 0 for micro in micro_batches]

    def _transformed(self, micro: MicroBatch) -> MicroBatch:
        batch = self._moved(micro.batch)
        for transform in self._step.transforms:
            batch = transform(batch)
        return replace(micro, batch=batch)

    def _moved(self, batch: Any) -> Any:
        return move_batch(batch, self._ranks.device) if self._moves else batch


_LOSS = attrgetter("loss")
_NOTHING = nullcontext()


def has_meeting_layers(model: nn.Module) -> bool:
    """Return whether ranks communicate in layers of a model.

    >>> has_meeting_layers(nn.BatchNorm1d(2)), has_meeting_layers(nn.SyncBatchNorm(2))
    (False, True)
    """
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
