"""The dataloader of a run, and its noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, final

import composer
from composer import State, TimeUnit
from composer.core import Precision
from torch.utils.data import DataLoader, DistributedSampler

from stretto.batching import NO_SIGNALS, Signals
from stretto.data import Step
from stretto.data.containers import join_samples
from stretto.integrations.counts import end_of, steps_in_epoch
from stretto.integrations.shared import Pass, StepMeter, counted_steps, refuse
from stretto.run import Run

_NOISE, _PLAN = "follow the noise of the gradient", "plan the sizes, such as '0ep:32 1ep:64'"


@final
class ComposerLoader:
    """The train dataloader: one pass over it is one epoch of steps of this rank."""

    batch_size = None
    """Composer reads it for its logs."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.is_over = False
        """Whether the present epoch has ended before it is iterated over: after a resume."""
        self.length: int | None = None
        """Steps of the present epoch, or one more if the run ends inside it; None: unknown."""
        self.read_length()

    def read_length(self) -> None:
        """Set the length to that of the epoch in which the run is."""
        run, epoch = self._run, self._run.timer.epoch
        num_samples, self.length = run.horizon.dataset_num_samples, steps_in_epoch(run, epoch).exact
        if self.length is None or num_samples is None:  # known together
            return
        # Composer ends an epoch when it has seen as many; it does not if the run ends inside it.
        end = end_of(run)
        is_cut = end is not None and epoch * num_samples < end < (epoch + 1) * num_samples
        self.length += int(is_cut)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the number of steps is not known before the epoch")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        if self.is_over:
            self.is_over = False
            return
        for step in counted_steps(self._run):
            check_size(step.num_samples, self._run.loader.world_size)
            own = [micro for micro in step if micro.num_samples]
            yield join_samples([one.batch for one in own], [one.num_samples for one in own])


def unshared(dataloader: Any) -> Any:
    """Return a dataloader with the order of a single process if each rank has its own samples."""
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(dataloader, DataLoader) or type(sampler) is not DistributedSampler:
        return dataloader
    same = ("dataset", "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last")
    more = ("prefetch_factor", "worker_init_fn", "multiprocessing_context")
    settings = {name: getattr(dataloader, name) for name in (*same, *more)}
    return DataLoader(shuffle=sampler.shuffle, **settings)


def check_size(size: int | None, world_size: int) -> None:
    """Refuse a step in which a rank has no sample: Composer trains on at least one.

    Raises:
        TrainingError: it has fewer samples than ranks.
    """
    is_small = size is not None and size < world_size
    instead = "choose larger batches, or Loading(last_batch='drop')"
    refuse((is_small, f"share {size} samples among {world_size} ranks", "one has none", instead))


@final
class Noise:
    """Measures the noise of the gradient over the micro-batches that Composer cuts."""

    def __init__(self, meter: StepMeter) -> None:
        self.signals = NO_SIGNALS
        self._meter = meter
        self._passes: list[Pass] = []
        self._open: AbstractContextManager[None] = nullcontext()
        self._most: int | float | None = None

    def begin(self, state: State, step: Step) -> None:
        """Begin a step. If it has one micro-batch on one rank, have Composer cut it into two."""
        whole, most = step.micro_batches[0], state.device_train_microbatch_size
        assert most is not None, "Composer has set it"
        left = sum(micro.num_samples for micro in step)
        parts = self._meter.passes(step)
        size = max(part.num_samples for part in parts) if len(parts) > 1 else left
        if size < most:
            self._most, state.device_train_microbatch_size = most, size
        size = min(size, int(most))
        self.signals = NO_SIGNALS
        # As Composer cuts the batch; the samples themselves are not looked at.
        sizes = [min(size, left - start) for start in range(0, left, size)]
        step.micro_batches = [replace(whole, num_samples=part) for part in sizes]
        self._passes = self._meter.passes(step)

    def watch(self) -> None:
        """Measure the next backward pass."""
        _check_parts(not self._passes)
        self._open = self._passes.pop(0).watch
        self._open.__enter__()

    def read(self, state: State) -> None:
        """End the measurement of a pass; after the last one of a step, read what was measured."""
        self._open.__exit__(None, None, None)
        if not self._passes:
            is_scaled = state.precision is Precision.AMP_FP16
            self.signals = self._meter.signals(scaler=state.scaler if is_scaled else None)

    def end(self, state: State) -> Signals:
        """Return what the step measured."""
        if self._most is not None:
            self._most, state.device_train_microbatch_size = None, self._most
        _check_parts(self._passes)
        return self.signals


def _check_parts(is_wrong: object) -> None:
    why = "split_batch makes other micro-batches than device_train_microbatch_size asks for"
    refuse((is_wrong, _NOISE, why, f"{_PLAN}, or leave split_batch out"))


def check_composer(state: State) -> None:
    """Refuse a trainer that cannot be followed.

    Raises:
        TrainingError: it is such a one, or of another version.
    """
    data, length, version = state.train_dataloader, state.max_duration, composer.__version__
    try:
        is_cut = state.dataloader_len is not None and int(state.dataloader_len) != len(data)
    except TypeError:
        is_cut = False
    is_other = not version.startswith("0.32.")
    cut = f"use train_subset_num_batches={state.dataloader_len}"
    is_unknown, to_trainer = data is None or length is None, "pass it to Trainer(...), not to fit()"
    is_strange = length is not None and length.unit in (TimeUnit.ITERATION, TimeUnit.SECOND)
    refuse(
        (is_other, f"use Composer {version}", "its loop may differ", "install mosaicml 0.32"),
        (is_unknown, "prepare a run", "there is no max_duration or train_dataloader", to_trainer),
        (is_strange, f"train for {length}", "the clocks differ", "write max_duration='2ep'"),
        (is_cut, cut, "a run has all its batches", "leave it out"),
    )


def check_length(run: Run, state: State) -> None:
    """Refuse schedulers of the trainer that contradict the run, and ends counted differently.

    Raises:
        TrainingError: there are some.
    """
    length = state.max_duration
    assert length is not None, "checked"
    twice, what = run.is_scheduled and state.schedulers, f"train for {length.to_timestring()}"
    is_guess = state.schedulers and length.unit == TimeUnit.EPOCH
    is_short = run.horizon.last_batch == "drop" and length.unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN)
    equal = "schedulers take all epochs to have as many batches as this one"
    refuse(
        (twice, "follow two schedules", "the trainer has schedulers", "leave them out"),
        (is_guess, what, equal, "set max_duration in samples"),
        (is_short, f"{what} and drop the last batches", "they do not count", "write epochs"),
    )


def check_fit(run: Run, state: State) -> None:
    """Refuse what `fit` was given, what a checkpoint lacks, and noise that cannot be measured.

    Raises:
        TrainingError: there is something.
    """
    check_length(run, state)
    ours, theirs = run.timer.batch, int(state.timestamp.batch)
    repeats = any(getattr(one, "_step_supports_amp_closure", False) for one in state.optimizers)
    is_hidden = "noise" in run.loader.reads and (state.fsdp_enabled or repeats)
    what = f"continue at batch {theirs} of Composer with a run at batch {ours}"
    why = "the checkpoint has no state of stretto, or you called fit(reset_time=True)"
    refuse(
        (ours != theirs, what, why, "make a new Trainer, with load_weights_only=True"),
        (is_hidden, _NOISE, "the model is sharded, or SAM computes each step twice", _PLAN),
    )
