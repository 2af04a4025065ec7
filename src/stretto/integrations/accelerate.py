"""`attach(accelerator, batch_size, schedules, data=..., optimizer=...)`: in loops of Accelerate.

The loop with `accelerator.accumulate(model)`, `accelerator.backward(loss)` and `optimizer.step()`
stays as it is. Before each micro-batch, two public attributes of the accelerator are set:
`gradient_accumulation_steps`, by which it divides the loss, is one over the weight of the
micro-batch, and `step` says whether gradients are averaged and the optimizer steps.

It cannot follow: an accelerator with gradient accumulation of its own, DeepSpeed, Megatron-LM, and
a dataloader that `accelerator.prepare` has returned already.

Tested with accelerate 1.15.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, final

from accelerate import Accelerator, DistributedType
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stretto.batching import NO_SIGNALS, PolicyLike, RuleLike
from stretto.data import Step, count_target_tokens, move_batch
from stretto.data.weights import Units, unit_counter
from stretto.errors import DataError
from stretto.integrations.counts import micro_batches_in_epoch
from stretto.integrations.loss_checks import WEIGH, StepChecks, has_gradient, warn_of_batch_norm
from stretto.integrations.shared import (
    BY_SIZE,
    ClockScheduler,
    Pass,
    StepMeter,
    check_call,
    counted_as_collated,
    refuse,
    with_lengths,
)
from stretto.run import Run, prepare
from stretto.settings import Loading
from stretto.timing import TimeLike, Trigger


def attach(
    accelerator: Accelerator,
    batch_size: PolicyLike,
    schedules: Mapping[str, Any] | None = None,
    *,
    data: Any,
    optimizer: Optimizer | Sequence[Optimizer],
    max_duration: TimeLike,
    rule: RuleLike | None = None,
    units: Units | None = None,
    every: Mapping[str, Trigger | TimeLike] | None = None,
    micro_batch_size: int | str | None = None,
    loading: Loading | None = None,
    model: nn.Module | None = None,
    **facts: Any,
) -> tuple[AccelerateLoader, ClockScheduler]:
    """Return a loader of micro-batches and a scheduler, for a loop that accumulates gradients.

    The loader is registered for `accelerator.save_state()` and `load_state()`.

    Args:
        accelerator: the accelerator.
        batch_size: samples or tokens of one step over all ranks: a number, a text, a policy.
        schedules: by hyper-parameter.
        data: a `DataLoader` that is not prepared, or what else `StepLoader` takes.
        optimizer: the prepared one; or several, of which the last to step in the loop is the last.
        max_duration: how long the run is.
        rule: how learning rates follow the batch size.
        units: what the loss is a mean over: "samples", "tokens" (targets), or a function that
            counts them. None: samples; a loss that is not known to be a mean over them is refused.
        every: by a name of yours, when `loader.due` has that name.
        micro_batch_size: the most samples of a micro-batch, or its most tokens, such as `"8Ktok"`;
            None: the batch size of a `DataLoader`.
        loading: how data are loaded.
        model: the prepared model, for sizes that follow the noise of the gradient.
        facts: fields of `DataSpec`, such as `lengths`.

    Raises:
        StrettoError: the arguments do not fit; the message says what to write instead.
    """
    call = "attach(accelerator, 8, {'lr': Cosine()}, data=..., optimizer=..., max_duration='2ep')"
    check_call(call, Accelerator, accelerator, batch_size, schedules=schedules, every=every)
    each: Any = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    is_list = isinstance(each, Sequence) and all(isinstance(item, Optimizer) for item in each)
    is_list = is_list and len(each) > 0
    given = f"follow optimizer={type(optimizer).__name__}"
    refuse((not is_list, given, "it is no optimizer", "pass what accelerator.prepare returned"))
    steps, kind = accelerator.gradient_accumulation_steps, accelerator.distributed_type
    is_own = steps != 1 and type(steps) is not _Set
    engines = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
    prepared = isinstance(data, (DataLoaderShard, DataLoaderDispatcher))
    other = getattr(accelerator.backward, "__self__", None)
    is_twice = isinstance(other, AccelerateLoader) and not other.run.is_done
    refuse(
        (is_twice, "attach twice", "the run before has not ended", "make a new Accelerator"),
        (kind in engines, f"use {kind.value}", "it accumulates by itself", "use DDP or FSDP2"),
        (is_own, f"use gradient_accumulation_steps={steps}", BY_SIZE, "leave it out"),
        (prepared, f"read {type(data).__name__}", "it is cut for ranks", "do not prepare the data"),
    )
    unit_counter("samples" if units is None else units)  # checks them
    if micro_batch_size is None and isinstance(data, DataLoader):
        micro_batch_size = data.batch_size
    run = prepare(
        counted_as_collated(data, **facts),
        batch_size,
        max_duration=max_duration,
        schedules=schedules,
        rule=rule,
        every=every,
        micro_batch_size=micro_batch_size,
        loading=loading,
    )
    with_lengths(run).bind(
        each, rank=accelerator.process_index, world_size=accelerator.num_processes
    )
    loader = AccelerateLoader(accelerator, run, units, model)
    last = each[-1]
    inner: Any = last.optimizer if isinstance(last, AcceleratedOptimizer) else last
    inner.register_step_post_hook(lambda *_: loader.note_update())
    accelerator.register_for_checkpointing(run)
    return loader, ClockScheduler(each[0], run.timer)


class _Set(float):
    """A number of the accelerator as the loader has set it; a sum with it is a plain float."""


def _check_targets(step: Step) -> None:
    """Refuse micro-batches of other targets per sample if nobody said what the loss is over.

    Raises:
        TrainingError: they have.
    """
    try:
        own = [micro for micro in step if micro.num_samples]
        each = [(count_target_tokens(micro.batch), micro.num_samples) for micro in own]
    except DataError:
        return
    is_other = any(count * each[0][1] != each[0][0] * size for count, size in each)
    why = f"they have {[count for count, _ in each]} targets that are not -100"
    instead = "pass units='tokens' if it is a mean over these, else units='samples'"
    refuse((is_other, WEIGH, why, instead))


@final
class AccelerateLoader:
    """The micro-batches of an epoch, on the device; made by `attach`."""

    def __init__(
        self, accelerator: Accelerator, run: Run, units: Units | None, model: nn.Module | None
    ) -> None:
        self.run = run
        self._accelerator, self._units = accelerator, units
        self._meter = StepMeter(run, model)
        # Of the class: the loader of a run before has replaced that of the object.
        self._backward: Callable[..., None] = partial(type(accelerator).backward, accelerator)
        self._loss: Tensor | float = 0.0
        self._signals = NO_SIGNALS
        self._has_stepped = False
        """Whether the optimizer has stepped before, so the loop trains."""
        self._all_checks, self._is_warned = StepChecks(run, units), False
        self._checks: StepChecks | None = None
        """Checks the present step."""
        self._pass: Pass | None = None
        """The present micro-batch."""
        accelerator.backward = self._measured
        if self._meter.averages_each:
            accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True

    def __len__(self) -> int:
        """Return the number of micro-batches of the present epoch.

        Raises:
            TypeError: it is not known.
        """
        count = micro_batches_in_epoch(self.run, self.run.timer.epoch)
        if count is None:
            raise TypeError("the number of micro-batches is not known before the epoch")
        return count

    @property
    def due(self) -> frozenset[str]:
        """What is due after the last optimizer step."""
        return self.run.due

    def __iter__(self) -> Iterator[Any]:
        accelerator = self._accelerator
        is_left = self._is_inside and has_gradient(self.run)
        instead = "break 'if accelerator.sync_gradients:', or call model.zero_grad()"
        refuse((is_left, "begin a step anew", "the gradient of its first part is kept", instead))
        for step in self.run.steps():
            passes = self._meter.passes(step, "samples" if self._units is None else self._units)
            if self._units is None:
                _check_targets(step)
            self._checks = self._all_checks.begin(len(passes))
            if len(passes) > 1 and not self._is_warned:
                self._is_warned = True
                warn_of_batch_norm(*accelerator._models)
            self._loss, self._signals = 0.0, NO_SIGNALS
            for one_pass in passes:
                self._pass, weight = one_pass, one_pass.weight
                # accumulate() adds 1 and looks for a multiple of the steps; nan never is one.
                accelerator.step = _Set(-1 if one_pass.is_last else math.nan)
                accelerator.gradient_accumulation_steps = _Set(1 / weight if weight else math.inf)
                yield move_batch(one_pass.batch, accelerator.device)
            if self.run.is_open:  # the optimizer has not stepped, as after an overflow
                is_outside = type(accelerator.step) is _Set and accelerator.scaler is None
                self._check(self._has_stepped and is_outside, "no optimizer step after some")
                self._finish()

    @property
    def _is_inside(self) -> bool:
        """Whether the step has more micro-batches."""
        return self._pass is not None and not self._pass.is_last

    def _finish(self) -> None:
        if self._checks is not None:
            self._checks.end()
            self._checks = None
        self.run.finish(self._signals)

    def note_update(self) -> None:
        """Count the step; the optimizer calls it.

        Raises:
            TrainingError: the step has more micro-batches.
        """
        self._check(self.run.is_open and self._is_inside, "an optimizer step inside a step")
        self._has_stepped = True
        if self.run.is_open:
            self._finish()

    def _check(self, is_wrong: object, why: str) -> None:
        instead = "run passes, step() and zero_grad() in 'with accelerator.accumulate(model):'"
        refuse((is_wrong, "accumulate the gradient of a step", f"there is {why}", instead))

    def _measured(self, loss: Tensor, **options: Any) -> None:
        """Replace `accelerator.backward`: check it, and measure what the policy reads."""
        accelerator, checks, present = self._accelerator, self._checks, self._pass
        if checks is not None and present is not None:
            checks.before_pass(loss, present, accelerator.gradient_accumulation_steps)
        with nullcontext() if present is None else present.watch:
            self._backward(loss, **options)
        if checks is not None:
            checks.after_pass()
        if not self.run.loader.reads:
            return
        self._loss = self._loss + loss.detach() / accelerator.gradient_accumulation_steps
        if accelerator.sync_gradients:  # now, before the gradient is clipped
            self._signals = self._meter.signals(self._loss, accelerator.scaler)
