"""The dataloader of a run, and its noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, final

import composer
from composer import State, TimeUnit
from composer.core import Precision, Time
from torch.utils.data import DataLoader, DistributedSampler

from stretto.batching import NO_SIGNALS, Signals
from stretto.data import MicroBatch, Step
from stretto.data.containers import join_samples
from stretto.errors import TrainingError
from stretto.integrations.shared import counted_steps
from stretto.noise import NoiseMeter
from stretto.planning.bind import end_of, steps_between
from stretto.run import Run


@final
class Steps:
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
        num_samples, self.length = run.horizon.dataset_num_samples, run.steps_in_epoch(epoch).exact
        if self.length is None or num_samples is None:
            self.length = None
            return
        # Composer ends an epoch when it has seen as many; it does not if the run ends inside it.
        end = end_of(run.prepared)
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


def ends_epoch(run: Run) -> bool:
    """Return whether a run is at the end of an epoch, also if its last samples are dropped."""
    now, num_samples = run.timer.timestamp, run.horizon.dataset_num_samples
    if now.batch_in_epoch == 0 or num_samples is None:
        return now.batch_in_epoch == 0
    return steps_between(run.prepared, now.sample, (now.epoch + 1) * num_samples).most == 0


def plain(dataloader: Any) -> Any:
    """Return a dataloader with the order of a single process if each rank has its own samples."""
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(dataloader, DataLoader) or type(sampler) is not DistributedSampler:
        return dataloader
    return DataLoader(
        dataloader.dataset,
        dataloader.batch_size,
        shuffle=sampler.shuffle,
        num_workers=dataloader.num_workers,
        collate_fn=dataloader.collate_fn,
        pin_memory=dataloader.pin_memory,
        drop_last=dataloader.drop_last,
        prefetch_factor=dataloader.prefetch_factor,
        worker_init_fn=dataloader.worker_init_fn,
        multiprocessing_context=dataloader.multiprocessing_context,
    )


def check_size(size: int | None, world_size: int) -> None:
    """Refuse a step in which a rank has no sample.

    Raises:
        TrainingError: it has fewer samples than ranks.
    """
    if size is not None and size < world_size:
        raise TrainingError.cannot(
            f"share a batch of {size} among {world_size} ranks",
            why="Composer trains on at least one sample of each rank",
            instead="choose larger batches, or Loading(last_batch='drop')"
            " if an epoch ends with a smaller one",
        )


@final
class Noise:
    """Measures the noise of the gradient over the micro-batches that Composer cuts."""

    def __init__(self, meter: NoiseMeter) -> None:
        self.signals = NO_SIGNALS
        self._meter = meter
        self._micros: list[MicroBatch] = []
        self._open: AbstractContextManager[None] = nullcontext()
        self._most: int | float | None = None

    def begin(self, state: State, step: Step) -> None:
        """Begin a step. If it has one micro-batch on one rank, have Composer cut it into two."""
        whole, most = step.micro_batches[0], state.device_train_microbatch_size
        assert most is not None, "Composer has set it"
        parts, left = self._meter.begin(step), sum(one.num_samples for one in step)
        size = max(one.num_samples for one in parts) if len(parts) > 1 else left
        if size < most:
            self._most, state.device_train_microbatch_size = most, size
        size = min(size, int(most))
        self._micros, self.signals = [], NO_SIGNALS
        for start in range(0, left, size):
            self._micros.append(replace(whole, num_samples=min(size, left - start)))

    def watch(self) -> None:
        """Measure the next backward pass."""
        if not self._micros:
            raise _other_parts("more")
        micro = self._micros.pop(0)
        self._open = self._meter.watch(micro, is_last=not self._micros)
        self._open.__enter__()

    def read(self, state: State) -> None:
        """Stop measuring; after the last pass of a step, read what was measured."""
        self._open.__exit__(None, None, None)
        if not self._micros:
            is_scaled = state.precision is Precision.AMP_FP16 and state.scaler is not None
            self.signals = self._meter.signals(state.scaler.get_scale() if is_scaled else 1.0)

    def end(self, state: State) -> Signals:
        """Return what the step measured."""
        if self._most is not None:
            self._most, state.device_train_microbatch_size = None, self._most
        if self._micros:
            raise _other_parts("fewer")
        return self.signals


def _other_parts(how: str) -> TrainingError:
    return TrainingError.cannot(
        "follow the noise of the gradient",
        why=f"split_batch returns {how} micro-batches than device_train_microbatch_size asks for",
        instead="plan the batch sizes, such as '0ep:32 1ep:64', or leave split_batch out",
    )


def check_trainer(state: State) -> None:
    """Refuse a trainer that cannot be followed.

    Raises:
        TrainingError: it is such a one, or of another version.
    """
    if not composer.__version__.startswith("0.32."):
        raise TrainingError.cannot(
            f"use Composer {composer.__version__}",
            why="only 0.32 was tested, and the loop of another version may differ",
            instead="install 'mosaicml>=0.32,<0.33'",
        )
    if state.train_dataloader is None or state.max_duration is None:
        raise TrainingError.cannot(
            "prepare a run",
            why="the trainer has no train_dataloader or no max_duration",
            instead="pass both to Trainer(...), not to fit()",
        )
    if state.max_duration.unit in (TimeUnit.ITERATION, TimeUnit.SECOND):
        raise TrainingError.cannot(
            f"train for {state.max_duration}",
            why="the run counts epochs, batches, samples and tokens",
            instead="write max_duration='2ep', for example",
        )
    try:
        whole = len(state.train_dataloader)
    except TypeError:
        whole = None
    length = state.dataloader_len
    if whole is not None and length is not None and int(length) != whole:
        raise TrainingError.cannot(
            f"use train_subset_num_batches={int(length)}",
            why="a run has all batches of its length",
            instead="leave it out, and set max_duration",
        )


def check_schedulers(run: Run, state: State) -> None:
    """Refuse schedulers of the trainer that contradict the run or would be wrong.

    Raises:
        TrainingError: there are some.
    """
    if run.is_scheduled and state.schedulers:
        raise TrainingError.cannot(
            "follow two schedules",
            why="the trainer has schedulers",
            instead="leave them out, or leave out schedules and rule",
        )
    assert state.max_duration is not None, "checked"
    if state.schedulers and state.max_duration.unit == TimeUnit.EPOCH:
        num_samples = run.horizon.dataset_num_samples or 1000
        raise TrainingError.cannot(
            f"use the schedulers of a trainer for {state.max_duration.to_timestring()}",
            why="they take all epochs to have as many batches as the present one",
            instead=f"set max_duration='{state.max_duration.value * num_samples}sp', or pass "
            "schedules instead",
        )


def check_length(run: Run, length: Time[int]) -> None:
    """Refuse a length of which Composer and the run count the end differently.

    Raises:
        TrainingError: it is in samples or tokens, and some are dropped.
    """
    if run.horizon.last_batch == "drop" and length.unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN):
        raise TrainingError.cannot(
            f"train for {length.to_timestring()} and drop the last batch of each epoch",
            why="Composer does not count the samples that are dropped",
            instead="write max_duration in epochs or batches, or Loading(last_batch='keep')",
        )


def check_fit(run: Run, state: State) -> None:
    """Refuse what `fit` was given, or what a checkpoint does not have.

    Raises:
        TrainingError: there is something.
    """
    check_schedulers(run, state)
    ours, theirs = run.timer.batch, int(state.timestamp.batch)
    if ours != theirs:
        raise TrainingError.cannot(
            f"continue at batch {theirs} of Composer with a run at batch {ours}",
            why="the checkpoint has no state of Stretto, or you called fit(reset_time=True)",
            instead="make a new Trainer, with load_weights_only=True for such a checkpoint",
        )
    metrics = {f"{one.label}/{name}" for one in state.evaluators for name in one.metric_names}
    unknown = run.loader.reads - {"loss", "noise"} - metrics
    if unknown:
        raise TrainingError.cannot(
            f"follow {', '.join(sorted(unknown))}",
            why="no evaluator has that metric",
            instead=f"follow one of {', '.join(sorted(metrics))}"
            if metrics
            else "pass an eval_dataloader and a model with metrics",
        )
    if "noise" in run.loader.reads:
        check_noise(state)


def check_noise(state: State) -> None:
    """Refuse to measure the noise where passes are not those of a step, one by one.

    Raises:
        TrainingError: the model is sharded, or an optimizer runs the step itself.
    """
    if state.fsdp_enabled:
        why = "Composer shards the model in a way in which it is not measured"
    elif any(getattr(one, "_step_supports_amp_closure", False) for one in state.optimizers):
        why = "an optimizer, such as that of SAM, computes the step more than once"
    else:
        return
    raise TrainingError.cannot(
        "follow the noise of the gradient",
        why=why,
        instead="plan the batch sizes, such as '0ep:32 1ep:64'",
    )
