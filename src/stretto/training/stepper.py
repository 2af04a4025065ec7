"""One optimizer step: the gradient of the whole batch over all ranks and micro-batches.

With N units in the batch over all W ranks, a micro-batch of n units with mean loss l contributes
the gradient of l * n * W / N, and gradients are averaged over ranks. The sum is the gradient of the
mean over N, never a mean of means. Units are samples, target tokens, or what a function counts. If
N is known only after the ranks have exchanged their counts (tokens on several ranks), gradients are
multiplied once after the last pass, before clipping.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, is_not
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from stretto.batching import NO_SIGNALS, Signals, Tokens, checked_size
from stretto.batching.metrics import LOSS, NOISE
from stretto.batching.split import in_rows
from stretto.data import DataSpec, MicroBatch, Step, move_batch
from stretto.data.containers import count_rows, count_samples
from stretto.data.tokens import longest_sequence
from stretto.data.weights import TargetTokens, nothing_to_learn, unit_counter
from stretto.distributed.logged import MicroLoss
from stretto.distributed.strategy import Strategy
from stretto.errors import DataError, StrettoError, TrainingError, first_line
from stretto.noise import NoiseMeter, NoiseSums
from stretto.ordering import evenly
from stretto.runtime import SupervisedStep, TrainStep
from stretto.runtime.agreement import plain
from stretto.runtime.losses import SUM, MeanCheck, scalar
from stretto.runtime.out_of_memory import is_out_of_memory, out_of_memory_text, release_memory
from stretto.runtime.packing import count
from stretto.runtime.ranks import Ranks
from stretto.runtime.rewind import Rewind, kept_buffers
from stretto.runtime.sharded import local_part
from stretto.runtime.step import Info
from stretto.settings import Stepping
from stretto.timing import Timestamp
from stretto.training.checkpointing.state import MISFITS, unfit
from stretto.training.criterion import HINT
from stretto.training.further import Further

_ASK = (
    "write what it is a mean over, Stepping(loss_weight=...): 'tokens', or a function that counts "
    "it, such as lambda batch: len(batch[0]); if it compares samples, have micro-batches as large "
    "as the batch"
)
"""What to write about a loss that is not known to be a mean over samples."""


@final
@dataclass(slots=True)
class StepResult:
    """All that is known of one step on this rank; the gradient itself is in the parameters."""

    at: Timestamp
    """The clock before it."""
    size: int
    batch_size: int
    """The size in force; the end of an epoch may have cut the batch."""
    losses: list[MicroLoss]
    """Those of this rank; none if the step was skipped."""
    num_micro_batches: int
    """Of this rank; more than the loader made if memory ran out."""
    units: int = 0
    """Units of this rank if they are summed over ranks later; otherwise 0."""
    tokens: int | None = None
    """Tokens of all ranks once these have met; None: the loader has counted them."""
    seconds: float | None = None
    """The seconds since the step before, if the first rank says so; None: as on this rank."""
    is_finite: bool = True
    """Whether losses and gradients are finite, on all ranks once these have met."""
    signals: Signals = NO_SIGNALS
    """What all ranks have measured."""
    saving: Sequence[float] = (0, 0)
    """The progress of a checkpoint on all ranks."""
    after: Timestamp | None = None
    """The clock after it."""
    values: Sequence[float] = ()
    """The hyper-parameters in force."""


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
        self._strategy, self._ranks, self.check_weights = strategy, strategy.ranks, strategy.check
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
        self.count = unit_counter(settings.loss_weight, shifts_labels=settings.shifts_labels)
        self._is_sum = step.loss_reduction == "sum"
        self._parameters = step.parameters
        self.resumed_from: Path | None = None
        """The checkpoint that was loaded, until the first update after it."""
        self.retry = Retry(step.model, spec, self._ranks, size=micro_batch_size, is_found=is_found)
        """Repeats steps that run out of memory."""
        self.further = Further(self._ranks.device, strategy.ranks.dp_world_size)
        self._reads_loss = LOSS in reads
        self.meter: NoiseMeter | None = None
        """Measures the gradient noise; None: it is not needed."""
        if NOISE in reads or measures_noise:
            every = settings.steps_between_noise
            self.meter = NoiseMeter(self._parameters, spec=spec, strategy=strategy, every=every)
            _warn_of_lengths(micro_batch_size, is_read=NOISE in reads)
        # With loss scaling, the gradient may overflow; the scaler handles that.
        watched = [] if step.scaler is not None else self._parameters
        self._moves = self._ranks.device.type != "cpu"
        is_late = settings.non_finite == "stop" and self._moves
        checks = settings.non_finite != "ignore"
        self.check = FiniteCheck(watched, is_late=is_late) if checks else None
        """Looks whether steps are finite; None: nobody does."""
        self._divides_late = (
            self.count is not None and strategy.ranks.dp_world_size > 1 and self._averages_in_passes
        )
        """Whether gradients are divided by the units of all ranks after the last pass. Not for a
        step of your own without DDP, whose `update` may use the weights, too."""
        is_alone = strategy.averaging == "none"
        self._is_plain = is_alone and self.count is None and not self._is_sum
        """Whether the weights of the loader are final, and there is no other rank."""
        self._supervised = step if isinstance(step, SupervisedStep) else None
        self._world_size = strategy.ranks.dp_world_size
        self._has_gradient: Sequence[bool] = ()
        """Which parameters had a gradient before the average gave all of them one."""
        is_said = self._is_sum or self.count is not None
        self._mean = None if is_said else MeanCheck(None if self._supervised is None else _ASK)
        """Checks that the loss is a mean over samples; None: it is known, or doubted already."""
        self._looks = False
        """Whether the passes of the present step are looked at."""
        # Whether gradients were averaged once, and whether no step was taken yet.
        self._is_warm, self._is_new = False, True

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Scales the loss; None: it is not scaled."""
        return self._step.scaler

    def gradient(self, step: Step) -> StepResult:
        """Accumulate the gradient of `step`; `finish` completes it.

        Raises:
            TrainingError: the loss is not a scalar, or the batch has no units.
        """
        if not self._is_warm:
            self._warm_up()
        retry = self.retry
        if self._ranks.world_size == 1:
            retry.rewind.save()
        is_plain = self._is_plain and self.meter is None and not self._step.transforms
        gradient = self._plain_gradient if is_plain else self._gradient
        while True:
            pieces = step.micro_batches if retry.size is None else retry.pieces(step)
            if self._mean is not None and len(pieces) * self._world_size > 1:
                self._looks = self._mean.begin(len(pieces))
            try:
                return gradient(step, pieces)
            except Exception as error:  # noqa: BLE001  others are raised again
                if self._is_new and isinstance(error, (TypeError, AttributeError)):
                    error.add_note(HINT)
                message = out_of_memory_text(error)
            retry.fall_back(step, pieces, message, clear=self.clear)

    def _warm_up(self) -> None:
        """Average gradients once, before the first step.

        After its first pass, `DistributedDataParallel` changes the layout of its buckets. With
        three ranks or more, the layout decides the order of summation. After this extra pass, a
        resumed run sums in the same order as one that never stopped.
        """
        self._is_warm = True
        self._strategy.average()
        self.clear()

    def _plain_gradient(self, step: Step, micro_batches: Sequence[MicroBatch]) -> StepResult:
        losses, number = list[MicroLoss](), len(micro_batches)
        watched: Iterable[MicroBatch] = micro_batches
        if number > 1:  # one tells nothing of further ones
            watched = self.further.watched(step.timestamp.batch, self.retry.size, micro_batches)
        for micro in watched:
            units = micro.num_samples
            losses.append(MicroLoss(self._pass(micro, micro.weight), units, units))
        return StepResult(step.timestamp, step.num_samples, step.batch_size, losses, number)

    def _gradient(self, step: Step, micro_batches: Sequence[MicroBatch]) -> StepResult:
        meter, losses = self.meter, list[MicroLoss]()
        at, size, number = step.timestamp, step.num_samples, len(micro_batches)
        result = StepResult(at, size, step.batch_size, losses, number)
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
        watched = self.further.watched(at.batch, self.retry.size, micro_batches)
        for index, (micro, units) in enumerate(zip(watched, counts, strict=True)):
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
        result.units = sum(counts) if self._divides_late else 0
        result.tokens = self._tokens(micro_batches) if self._step.transforms else None
        return result

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
        forward_backward = self._looking(micro) if self._looks else self._step.forward_backward
        loss = forward_backward(batch, weight)
        if type(loss) is not Tensor or loss.dim():  # a subclass, or an error
            loss = scalar(loss)
        loss = loss.detach()  # what `detached` does, without a call for each micro-batch
        return loss.clone() if loss.untyped_storage().nbytes() > loss.nbytes else loss

    def _looking(self, micro: MicroBatch) -> Callable[[Any, float], Tensor]:
        """Return `forward_backward`; it warns of a loss that is not known to be a mean."""
        step = self._supervised
        if step is None:  # its graph is seen when it is used
            return lambda *given: self._look(self._step.forward_backward(*given), micro)
        own = step.loss

        def forward_backward(batch: Any, weight: float) -> Tensor:
            step.loss = lambda *given: self._look(own(*given), micro)
            try:
                return step.forward_backward(batch, weight)
            finally:
                step.loss = own

        return forward_backward

    def _look(self, loss: Any, micro: MicroBatch) -> Any:
        """Warn of a loss that is not known to be a mean over samples; return it."""
        if self._mean is None or not isinstance(loss, Tensor) or loss.dim():
            return loss
        rows = count_rows(micro.batch, micro.num_rows)
        doubt = self._mean.look(loss, rows, micro.num_samples, is_last=False)
        if doubt is not None:
            self._mean, self._looks = None, False
            said = f"the loss is not known to be a mean over the samples, as {doubt.why}; {_ASK}"
            if doubt.why == SUM:
                said = (
                    "the loss is a sum over the samples, so the gradient depends on how a batch is "
                    "cut; return the mean, or write Stepping(loss_reduction='sum')"
                )
            if self._ranks.is_first:
                warnings.warn(said, UserWarning, stacklevel=2)
        return loss

    def is_finite(self, result: StepResult) -> bool:
        """Return whether losses and gradient are finite on this rank, as far as the host knows.

        True if it is not checked. Call it after the noise is measured, which reads the gradient.
        """
        if self.check is None:
            return True
        is_known = self.meter is not None and self.meter.has_finite_gradient
        return self.check.passes(list(map(LOSS_OF, result.losses)), is_gradient_known=is_known)

    @property
    def may_skip(self) -> bool:
        """Whether an update may leave the weights as they were."""
        return self.scaler is not None or not isinstance(self._step, SupervisedStep)

    @property
    def is_checked_late(self) -> bool:
        """Whether `settle` may find a step that `is_finite` has let pass."""
        return self.check is not None and self.check.is_late

    def settle(self) -> bool:
        """Wait for the device; return whether all steps so far were finite on this rank."""
        return self.check is None or self.check.settle()

    @property
    def measures(self) -> bool:
        """Whether a policy or a callback reads what steps measure."""
        return self._reads_loss or self.meter is not None

    def measured(self, result: StepResult) -> Sequence[float]:
        """Return this rank's sums for `signals`; call it before `finish` and `update`.

        Every rank must call it.
        """
        loss = units = 0.0
        if self._reads_loss and result.losses and self._ranks.is_loss_rank:
            losses = torch.stack([one.loss for one in result.losses]).double().tolist()
            pairs = zip(losses, result.losses, strict=True)
            loss = sum(one * micro.factor for one, micro in pairs)
            units = sum(one.weight for one in result.losses)
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        noise = NoiseSums() if self.meter is None else self.meter.sums(scale)
        return loss, units, *noise

    def signals(self, sums: Sequence[float], num_samples: int) -> Signals:
        """Return the signals of a step, from the sums of all ranks."""
        loss, units, *noise = sums
        signals = NoiseSums(*noise).signals(num_samples)
        return replace(signals, loss=loss / units) if units else signals

    def flags(self, result: StepResult) -> Sequence[float]:
        """Return what `finish` needs of all ranks, who add it up.

        Where gradients are averaged after the passes, a parameter that no rank has a gradient of
        gets one of zeros, which the optimizer would use.
        """
        if self._strategy.averaging != "after":
            return ()
        return bool(result.losses) and not any(self._has_gradient), *self._has_gradient

    def finish(self, step: Step, units: float, flags: Sequence[float] = ()) -> None:
        """Divide the gradient by the `units` of all ranks, if the passes did not.

        Args:
            step: the step.
            units: those of all ranks.
            flags: the sums of `flags`.

        Raises:
            TrainingError: no rank has any units; or in the first step, a rank has no gradient.
        """
        for parameter, ranks in zip(self._parameters, flags[1:], strict=False):
            if not ranks:
                parameter.grad = None
        if self._is_new and flags and flags[0]:
            raise self._no_gradient(f"in the first step, {flags[0]:.0f} ranks have no gradient")
        if not self._divides_late:
            return
        if units == 0:
            raise nothing_to_learn(step)
        self._multiply(step.num_samples / units)

    def rehearse(self, step: Step) -> None:
        """Run a whole step that nothing remembers but the weights; every rank must call it."""
        result = self.gradient(step)
        if self._ranks.world_size > 1 or self.measures:
            own = (*self._ranks.counted((result.units,)), *self.measured(result))
            sums = self._ranks.agree((*own, *self.flags(result)))
            self.finish(step, sums[0], sums[len(own) :])
        self.update()

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
        return None if self.check is not None else {}

    def _explained(self, error: Exception) -> StrettoError | None:
        """Return what to raise instead of an error of the update; None: the error itself."""
        optimizers = " and ".join(type(one).__name__ for one in self._step.optimizers)
        if is_out_of_memory(error):
            return TrainingError.cannot(
                f"update the weights with {optimizers}",
                why=f"memory ran out, and some weights may have changed ({first_line(error)})",
                instead="resume with foreach=False in the optimizer or a smaller micro_batch_size",
            )
        if self.resumed_from is not None and isinstance(error, MISFITS):
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
        if isinstance(self.count, TargetTokens) and self.count.is_open:
            self.count.look((one.batch for one in micro_batches if one.weight), self._ranks)
        return [self.count(micro.batch) if micro.weight else 0 for micro in micro_batches]

    def _transformed(self, micro: MicroBatch) -> MicroBatch:
        batch = self._moved(micro.batch)
        for transform in self._step.transforms:
            batch = transform(batch)
        return replace(micro, batch=batch)

    def _moved(self, batch: Any) -> Any:
        return move_batch(batch, self._ranks.device) if self._moves else batch


def _warn_of_lengths(micro_batch_size: int | None, *, is_read: bool) -> None:
    """Warn if noise is measured on micro-batches that were chosen by length.

    Those of a policy that reads the noise are not.
    """
    if isinstance(micro_batch_size, Tokens) and not is_read:
        warnings.warn(
            "the gradient noise is measured by comparing micro-batches, and those with a budget of "
            "tokens are not random: they are chosen by length; write micro_batch_size as a number "
            "of samples to measure it",
            UserWarning,
            stacklevel=5,  # who makes the trainer
        )


LOSS_OF = attrgetter("loss")
_NOTHING = nullcontext()


def has_meeting_layers(model: nn.Module) -> bool:
    """Return whether ranks communicate in layers of a model.

    >>> has_meeting_layers(nn.BatchNorm1d(2)), has_meeting_layers(nn.SyncBatchNorm(2))
    (False, True)
    """
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


@final
class Retry:
    """Cuts steps into micro-batches of at most `size`, and halves it if memory runs out.

    The size is a number of samples, or a budget of tokens: then a sample alone may exceed it.
    On several ranks, the others wait for the rank that ran out of memory in the middle of the step,
    so the run ends with an error there.

    Args:
        model: its buffers are restored.
        spec: cuts batches.
        ranks: the processes of the run.
        size: the most samples of a micro-batch, or `Tokens`; None: the whole share of a rank.
        is_found: whether `size` was found by a search; a resumed run then keeps the saved one.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: DataSpec,
        ranks: Ranks,
        *,
        size: int | None,
        is_found: bool = False,
    ) -> None:
        self.rewind = Rewind(model)
        """Restores random state and buffers."""
        self._spec, self._ranks = spec, ranks
        self.largest = size
        """The size that was given or found; None: the whole share of a rank."""
        self.is_found = is_found
        """Whether `largest` was found by a search."""
        self.size = size
        """The size in force; None: the whole share of a rank."""
        self.splits = 0
        """How often memory ran out."""
        self.on_fall_back: Callable[[Timestamp, int, int], None] = lambda *_: None
        """Called with the clock, the size that ran out of memory, and the next one."""

    def pieces(self, step: Step) -> Sequence[MicroBatch]:
        """Return the micro-batches of a step."""
        try:
            return [piece for micro in step.micro_batches for piece in self._cut(micro)]
        except DataError as error:
            error.add_note("memory ran out, so the batch had to be cut into smaller micro-batches")
            raise

    def _cut(self, micro: MicroBatch) -> list[MicroBatch]:
        number, most = micro.num_rows, self._most(micro)
        if number <= most or not micro.weight:
            return [micro]
        pieces, start = [], 0
        for size in evenly(number, most=most):
            pieces.append(self._spec.cut(micro, slice(start, start + size)))
            start += size
        return pieces

    def largest_piece(self, step: Step | None) -> int:
        """Return the samples of the largest micro-batch of a step on this rank; 0 if unknown."""
        micro_batches = () if step is None else step.micro_batches
        own = [one for one in micro_batches if one.weight]
        each = (evenly(one.num_rows, most=self._most(one)) for one in own)
        return max((rows[0] * one.row for one, rows in zip(own, each, strict=True)), default=0)

    def _most(self, micro: MicroBatch) -> int:
        """Return how many rows of a micro-batch are run at once."""
        if isinstance(self.size, Tokens) and self.size != self.largest:
            return max(1, self.size * micro.num_samples // _price(micro))
        # Those of the largest budget are as the loader has cut them.
        most = None if isinstance(self.size, Tokens) else in_rows(1, self.size, micro.row)[1]
        return micro.num_rows or 1 if most is None else most

    def fall_back(
        self, step: Step, pieces: Sequence[MicroBatch], message: str, *, clear: Callable[[], None]
    ) -> None:
        """Undo a step that ran out of memory in these pieces, and halve the largest.

        Raises:
            TrainingError: not even one sample fits, or other ranks wait.
        """
        at, brief = step.timestamp.get("sp"), " ".join(message.split())[:200]
        most: int = max(micro.num_samples for micro in pieces)
        is_single = most == step.micro_batches[0].row
        if isinstance(self.size, Tokens) and not is_single:
            most = Tokens(max(_price(micro) for micro in pieces if micro.num_samples > 1))
        smaller = type(most)((most + 1) // 2)
        if is_single:
            why, instead = "with one sample", "use shorter samples or a smaller model"
        else:
            why = f"on rank {self._ranks.rank}, and the others wait for it"
            instead = f"resume from the last checkpoint with micro_batch_size={smaller!r}"
        if is_single or self._ranks.world_size > 1:
            raise TrainingError.cannot(
                f"compute the step at {at} in micro-batches of {most:,}",
                why=f"memory ran out {why} ({brief})",
                instead=instead,
            )
        clear()
        release_memory()
        self.rewind.restore()
        self.size = smaller
        self.splits += 1
        self.on_fall_back(step.timestamp, most, smaller)
        warnings.warn(
            f"memory ran out in the step at {at} with micro-batches of {most:,}; the step is "
            f"repeated with micro-batches of {smaller:,}, and the batch size does not change",
            RuntimeWarning,
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the present size."""
        return {
            "largest": plain(self.largest),
            "is_found": self.is_found,
            "size": plain(self.size),
            "splits": self.splits,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the saved size, unless another one was configured since."""
        kept = (state["largest"], state["size"])
        largest, size = (None if one is None else checked_size(one) for one in kept)
        if self.is_found and state["is_found"]:
            self.largest = self.size = largest
        if repr(self.largest) == repr(largest):  # 4096 is neither of the two in the other unit
            self.size = size
        self.splits = count(state, "splits")


def _price(micro: MicroBatch) -> int:
    """Return the tokens of a micro-batch as it is run, with its padding."""
    rows = count_samples(micro.batch) or micro.num_samples  # 1 if it is packed
    return max(rows * (longest_sequence(micro.batch) or 0), micro.num_tokens, 1)


_GRADIENT, _IS_GIVEN = attrgetter("grad"), partial(is_not, None)


class _Flag(NamedTuple):
    """Whether anything on a device was not finite: 0 or 1, in float32 as the kernel wants it."""

    value: Tensor
    one: Tensor
    host: Tensor
    """Where the host reads it: itself on a CPU, else a copy that is made without waiting."""
    seen: Any
    """The same memory as a NumPy array, which is read without an operation of torch."""

    @classmethod
    def on(cls, device: torch.device) -> _Flag:
        value = torch.zeros(1, dtype=torch.float32, device=device)
        pins = device.type == "cuda"
        host = value if device.type == "cpu" else torch.zeros(1, pin_memory=pins)
        return cls(value, torch.ones_like(value), host, host.numpy())


@final
class FiniteCheck:
    """Checks the losses and the gradient of a step on this rank.

    The host waits for no device if `is_late`: then a step that is not finite is found one or more
    steps later, at the latest by `settle`. On a CPU it is always found at once.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([1.0, float("inf")])
    >>> FiniteCheck([weight]).passes([torch.tensor(0.5)])
    False

    Args:
        parameters: those whose gradients are checked.
        is_late: whether a step may be found not to be finite after the weights have changed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, is_late: bool = False) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        self._is_plain = True
        """Whether gradients are dense and real, as far as known before the first pass."""
        for one in parameters:
            groups.setdefault((one.device, one.dtype), []).append(one)
            self._is_plain &= not (one.is_complex() or hasattr(one, "to_local"))
        self._groups = list(groups.items())
        self._flags: dict[torch.device, _Flag] = {}
        self.is_late = is_late
        self._waits = False
        """Whether the host has to wait for a device: results are needed in each step."""

    def passes(self, losses: list[Tensor], *, is_gradient_known: bool = False) -> bool:
        """Return whether every loss and every element of the gradient is finite.

        Args:
            losses: scalars.
            is_gradient_known: whether the gradient is known to be finite.
        """
        found = torch.stack(losses) if losses else None  # a copy: the kernel multiplies by one
        checked: list[tuple[torch.device, list[Tensor]]] = []
        for place, parameters in () if is_gradient_known else self._groups:
            tensors = list(filter(_IS_GIVEN, map(_GRADIENT, parameters)))
            if found is not None and (found.device, found.dtype) == place:
                tensors.append(found)
                found = None
            checked.append((place[0], tensors))
        if found is not None:
            checked.append((found.device, [found]))
        for device, tensors in checked:
            if not tensors:
                continue
            flag = self._flags.get(device) or self._flag(device)
            if self._is_plain:
                try:
                    _mark_infinite(tensors, flag.value, flag.one)
                    continue
                except NotImplementedError:
                    pass  # one of them is sparse
            _mark_infinite([_local(tensor) for tensor in tensors], flag.value, flag.one)
        are_finite = True
        for flag in self._flags.values():
            if flag.host is not flag.value:
                flag.host.copy_(flag.value, non_blocking=True)
            if flag.seen[0]:
                are_finite = False
        return self.settle() if not are_finite or self._waits else True

    def settle(self) -> bool:
        """Wait for the device; return whether all steps since the last call were finite."""
        are_finite = True
        for flag in self._flags.values():
            if flag.seen[0] if flag.host is flag.value else flag.value.item():
                flag.value.zero_()
                are_finite = False
        return are_finite

    def _flag(self, device: torch.device) -> _Flag:
        self._waits |= device.type != "cpu" and not self.is_late
        return self._flags.setdefault(device, _Flag.on(device))


def not_finite(at: Timestamp, *, is_late: bool = False) -> TrainingError:
    """Return the error for a step that is not finite, or for one before `at`."""
    where = "have changed" if is_late else "are still those before it"
    return TrainingError.cannot(
        f"train {'beyond' if is_late else 'the step at'} {at.get('sp')}",
        why=f"its loss or gradient is nan or infinite; the weights {where}",
        instead="resume from the last checkpoint, and lower the learning rate, clip with "
        "clip_norm=1.0, or skip such steps with non_finite='skip'",
    )


def skipped_alone(at: Timestamp, ranks: Sequence[int]) -> TrainingError:
    """Return the error for a step that only some ranks have skipped."""
    return TrainingError.cannot(
        f"continue after {at.get('sp')}",
        why=f"update() returned SKIPPED on rank {', '.join(map(str, ranks))} alone",
        instead="decide on all ranks together, and resume from the last checkpoint",
    )


# What loss scaling asks for every step, in one kernel; a scale of 1 leaves the gradient alone.
_mark_infinite = torch._amp_foreach_non_finite_check_and_unscale_


def _local(gradient: Tensor) -> Tensor:
    """Return the local part of a gradient as a dense real tensor."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    elif hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
