"""`attach(accelerator, ...)`: stretto in loops of Hugging Face Accelerate.

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, final

import torch
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stretto.batching import NO_SIGNALS, PolicyLike, RuleLike, Signals
from stretto.data import DataSpec, move_batch
from stretto.data.weights import Units, check_units, units_of
from stretto.errors import TrainingError
from stretto.integrations.shared import ClockScheduler
from stretto.noise import NoiseMeter
from stretto.run import Run, prepare
from stretto.settings import Loading
from stretto.timing import TimeLike, Trigger


def attach(
    accelerator: Accelerator,
    data: Any,
    optimizer: Optimizer | Sequence[Optimizer],
    batch_size: PolicyLike,
    schedules: Mapping[str, Any] | None = None,
    *,
    max_duration: TimeLike,
    rule: RuleLike | None = None,
    units: Units = "samples",
    every: Mapping[str, Trigger | TimeLike] | None = None,
    micro_batch_size: int | None = None,
    loading: Loading | None = None,
    model: nn.Module | None = None,
) -> tuple[MicroBatches, ClockScheduler]:
    """Return a loader of micro-batches and a scheduler, for a loop that accumulates gradients.

    The loader is registered for `accelerator.save_state()` and `load_state()`.

    Args:
        accelerator: the accelerator.
        data: a `DataLoader` that is not prepared, or what else `StepLoader` takes.
        optimizer: the prepared one; or several, of which the last to step in the loop is the last.
        batch_size: samples of one step over all ranks: a number, a text, a policy.
        schedules: by hyper-parameter.
        max_duration: how long the run is.
        rule: how learning rates follow the batch size.
        units: what the loss is a mean over: samples, target tokens, or a function that counts them.
        every: by a name of yours, when `loader.due` has that name.
        micro_batch_size: the most samples of a micro-batch; None: the batch size of a `DataLoader`.
        loading: how data are loaded.
        model: the prepared model, for sizes that follow the noise of the gradient.

    Raises:
        StrettoError: the arguments do not fit; the message says what to write instead.
    """
    _check(accelerator, data)
    check_units(units)
    if micro_batch_size is None and isinstance(data, DataLoader):
        micro_batch_size = data.batch_size
    spec = DataSpec.of(data)
    if spec.is_map_style and spec.get_num_samples_in_batch is None:
        # A row need not be a sample: what was collated counts.
        spec = DataSpec.of(spec, get_num_samples_in_batch=lambda _: None)
    run = prepare(
        spec,
        batch_size,
        max_duration=max_duration,
        schedules=schedules,
        rule=rule,
        every=every,
        micro_batch_size=micro_batch_size,
        loading=loading,
    )
    each = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    run.bind(each, rank=accelerator.process_index, world_size=accelerator.num_processes)
    loader = MicroBatches(accelerator, run, units, model)
    inner = getattr(each[-1], "optimizer", each[-1])
    inner.register_step_post_hook(lambda *_: loader.note_update())
    accelerator.register_for_checkpointing(loader)
    return loader, ClockScheduler(each[0], run.timer)


class _NotAdded(float):
    """`accelerator.step` as the loader sets it; `accelerator.accumulate` adds 1, a plain float."""


@final
class MicroBatches:
    """The micro-batches of an epoch, on the device; made by `attach`."""

    def __init__(
        self, accelerator: Accelerator, run: Run, units: Units, model: nn.Module | None
    ) -> None:
        self.run = run
        self._accelerator = accelerator
        self._units = units
        self._meter = _meter(run, model)
        self._backward: Callable[..., None] = accelerator.backward
        self._losses: list[Tensor] = []
        self._noise = NO_SIGNALS
        self._watch: AbstractContextManager[None] = nullcontext()
        self._place = (0, 0)
        """The number of the present micro-batch in its step, from 0, and of the last one."""
        self._updates = self._without_update = 0
        """Steps after which the optimizer has stepped, and others outside of `accumulate`."""
        if run.loader.reads:
            accelerator.backward = self._measured
        if self._meter is not None and self._meter.averages_each:
            accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True

    def __len__(self) -> int:
        """Return the number of micro-batches of the present epoch.

        Raises:
            TypeError: it is not known.
        """
        count = self.run.micro_batches_in_epoch(self.run.timer.epoch).exact
        if count is None:
            raise TypeError("the number of micro-batches is not known before the epoch")
        return count

    @property
    def due(self) -> frozenset[str]:
        """What is due after the last optimizer step."""
        return self.run.due

    def __iter__(self) -> Iterator[Any]:
        accelerator, world_size = self._accelerator, self.run.loader.world_size
        for step in self.run.steps():
            if self._meter is not None:
                step.micro_batches = list(self._meter.begin(step))
            own, total = units_of(step, self._units, world_size=world_size)
            self._losses, last = [], len(step) - 1
            for number, (micro, units) in enumerate(zip(step, own, strict=True)):
                is_last = number == last
                # accumulate() adds 1 and looks for a multiple of the steps; nan never is one.
                accelerator.step = _NotAdded(-1 if is_last else math.nan)
                self._place = number, last
                accelerator.gradient_accumulation_steps = (
                    total / (units * world_size) if units else math.inf
                )
                if self._meter is not None:
                    self._watch = self._meter.watch(
                        micro, is_last=is_last, units=units, divisor=total
                    )
                yield move_batch(micro.batch, accelerator.device)
            self._end_without_update()

    @property
    def dataset(self) -> Any:
        """Refuse `accelerate.skip_first_batches`, which asks for it.

        Raises:
            TrainingError: always.
        """
        raise TrainingError.cannot(
            "skip the first batches",
            why="accelerator.load_state() has moved the run to its place already",
            instead="leave skip_first_batches out, and iterate over the loader",
        )

    def note_update(self) -> None:
        """Count the step; the optimizer calls it.

        Raises:
            TrainingError: the step has more micro-batches.
        """
        number, last = self._place
        if self.run.is_open and number < last:
            raise _no_accumulation(f"the optimizer stepped after micro-batch {number + 1}", last)
        self._updates += 1
        self._finish()

    def _end_without_update(self) -> None:
        """Count a step after which the optimizer did not step, as after an overflow."""
        accelerator = self._accelerator
        if self.run.is_open:
            is_outside = type(accelerator.step) is _NotAdded and accelerator.scaler is None
            self._without_update += is_outside
            # A loop may leave out a bad batch now and then, or only look at the data.
            if self._updates and self._without_update > max(2, self._updates):
                raise _no_accumulation("the optimizer steps less often", self._place[1])
        self._finish()

    def _finish(self) -> None:
        if self.run.is_open:
            self.run.finish(self._signals())

    def _measured(self, loss: Tensor, **options: Any) -> None:
        """Stand for `accelerator.backward` if the policy reads what a step measures."""
        with self._watch:
            self._backward(loss, **options)
        self._losses.append(loss.detach() / self._accelerator.gradient_accumulation_steps)
        if self._meter is not None and self._accelerator.sync_gradients:
            scaler = self._accelerator.scaler  # now, before the gradient is clipped
            self._noise = self._meter.signals(1.0 if scaler is None else scaler.get_scale())

    def _signals(self) -> Signals:
        found = NO_SIGNALS if self._meter is None else self._noise
        if "loss" in self.run.loader.reads and self._losses:
            mean = self._accelerator.reduce(torch.stack(self._losses).sum(), "mean")
            found = replace(found, loss=mean.item())
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, for `accelerator.save_state()`."""
        return self.run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.run.load_state_dict(state)


def _no_accumulation(why: str, last: int) -> TrainingError:
    return TrainingError.cannot(
        f"train on steps of {last + 1} micro-batch{'es' if last else ''}",
        why=why,
        instead="run the passes, optimizer.step() and optimizer.zero_grad() inside "
        "'with accelerator.accumulate(model):', for each micro-batch",
    )


def _meter(run: Run, model: nn.Module | None) -> NoiseMeter | None:
    if "noise" not in run.loader.reads:
        return None
    if model is None:
        raise TrainingError.cannot(
            "follow the noise of the gradient",
            why="the model is not known",
            instead="pass model=model, as accelerator.prepare() returned it",
        )
    return NoiseMeter.of(model, run.loader.spec)


def _check(accelerator: Accelerator, data: Any) -> None:
    engines = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
    steps = accelerator.gradient_accumulation_steps
    if accelerator.distributed_type in engines:
        raise TrainingError.cannot(
            f"use {accelerator.distributed_type.value}",
            why="its engine accumulates gradients by itself and is not tested",
            instead="use DDP or FSDP2",
        )
    if steps != 1:
        raise TrainingError.cannot(
            f"use gradient_accumulation_steps={steps}",
            why="micro-batches follow from the batch size",
            instead="leave it out where the accelerator is made",
        )
    if isinstance(data, (DataLoaderShard, DataLoaderDispatcher)):
        raise TrainingError.cannot(
            f"read a {type(data).__name__}",
            why="accelerator.prepare() has given each rank its own batches already",
            instead="pass the DataLoader itself",
        )
