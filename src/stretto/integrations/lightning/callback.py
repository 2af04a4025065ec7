"""The train dataloader and the callback that follow a run."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self, final

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as stock
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from stretto.batching import NO_SIGNALS
from stretto.data.weights import Units
from stretto.errors import CheckpointError
from stretto.integrations.counts import (
    UNREACHED,
    end_of,
    micro_batches_in_epoch,
    planned_micro_batches,
    steps_left,
)
from stretto.integrations.loss_checks import ASK, StepChecks, keeps, warn_of_batch_norm
from stretto.integrations.shared import (
    BY_SIZE,
    Pass,
    Probe,
    StepMeter,
    counted_steps,
    ends_epoch,
    is_over,
    note_metrics,
    refuse,
    warn_of_end,
    warn_of_replaced,
)
from stretto.run import Run
from stretto.runtime.losses import is_close, only_looking, tolerance_for
from stretto.timing import Timestamp

_EVALUATE = "leave it out, and pass every={'evaluate': '10%'}"


def check_lightning(trainer: Trainer, every: Iterable[str]) -> None:
    """Refuse a trainer with settings or callbacks that cannot be followed.

    Raises:
        TrainingError: it has one, or it is of another version.
    """
    unknown, version = set(every) - {"evaluate", "save"}, lightning.__version__
    steps, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
    is_other, is_cut = not version.startswith("2.6."), limit != 1.0 or type(limit) is int
    sized = stock.BatchSizeFinder | stock.GradientAccumulationScheduler
    rated = stock.LearningRateFinder | stock.StochasticWeightAveraging
    others = [type(own).__name__ for own in trainer.callbacks if isinstance(own, sized | rated)]
    is_timed = getattr(trainer, "_val_check_time_interval", None) is not None
    cut = f"use limit_train_batches={limit}, overfit_batches or fast_dev_run"
    refuse(
        (is_other, f"use Lightning {version}", "its loop may differ", "install lightning 2.6"),
        (unknown, f"wait for {unknown}", "there is no such event", "write evaluate or save"),
        (steps != 1, f"use accumulate_grad_batches={steps}", BY_SIZE, "leave it out"),
        (is_timed, "use val_check_interval as a time", "the run decides", _EVALUATE),
        (is_cut, cut, "a run has all batches of its length", "pass max_duration='2ba' to attach"),
        (others, f"use {others}", "they change batches or learning rates", "leave them out"),
    )


def own_interval(trainer: Trainer) -> str:
    """Return how often the settings of a trainer evaluate, as a time.

    Raises:
        TrainingError: they count batches or seconds.
    """
    epochs, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    is_time = isinstance(interval, float) and (interval == 1.0 or epochs == 1)
    what = f"use val_check_interval={interval!r}"
    refuse((not is_time, what, "it counts micro-batches", _EVALUATE))
    return f"{interval * (epochs or 1):g}ep"


def own_length(trainer: Trainer) -> str:
    """Return how long the settings of a trainer train, as a time.

    Raises:
        TrainingError: they name no end, or two.
    """
    steps, epochs = trainer.max_steps, trainer.max_epochs or -1
    what = f"train with Trainer(max_epochs={epochs}, max_steps={steps})"
    is_one = (steps > 0) != (epochs > 0)
    refuse((not is_one, what, "a run has one length", "give one, or max_duration='2ep' to attach"))
    return f"{epochs}ep" if steps == -1 else f"{steps}ba"


_OUTSIDE = Pass(None, weight=1.0, is_first=True, is_last=True, num_samples=0, watch=nullcontext())
"""In place of a micro-batch before the first one."""


@final
class LightningLoader:
    """The train dataloader: one pass over it is one epoch of micro-batches."""

    def __init__(self, run: Run, units: Units | None) -> None:
        self.run = run
        """The run: its clock is `run.timer`."""
        self.present = _OUTSIDE
        """The present micro-batch."""
        self.is_weighed = False
        self.said_units = units
        self.units: Units = "samples" if units is None else units
        self.num_passes = 1
        """The micro-batches of the present step."""
        self.meter: StepMeter
        """Measures the steps of a fit."""
        self._trainer: Trainer | None = None
        self.accumulation: Accumulation
        """What Lightning divides the loss by."""

    @property
    def weight(self) -> float:
        """The factor of the loss of the present micro-batch, for manual optimization."""
        self.is_weighed = True
        return self.present.weight

    @property
    def is_last(self) -> bool:
        """Whether a step ends with the present micro-batch."""
        return self.present.is_last

    def follow(self, trainer: Trainer, meter: StepMeter, *, is_open: bool) -> None:
        """Begin to set where in a step `trainer` is.

        Args:
            trainer: the trainer.
            meter: measures its steps.
            is_open: whether the checkpoint that is resumed was written inside a step.
        """
        self._trainer, self.meter = trainer, meter
        self.present = _OUTSIDE._replace(is_first=not is_open, is_last=not is_open)
        self.accumulation = trainer.accumulate_grad_batches = Accumulation.of(self.present)

    def __len__(self) -> int:
        """Return the number of micro-batches in the present epoch, or a number above it.

        It is never unknown: Lightning would fetch a batch ahead to find the end.
        """
        if not self.run.is_bound:
            return UNREACHED
        if self.run.is_done:
            return 0
        exact = micro_batches_in_epoch(self.run, self.run.timer.epoch)
        return UNREACHED if exact is None else exact

    def __iter__(self) -> Iterator[Any]:
        callbacks = [] if self._trainer is None else self._trainer.callbacks
        is_led = any(type(callback) is LightningCallback for callback in callbacks)
        why = "the trainer has no callback of attach(), as in Tuner.lr_find"
        refuse((not is_led, "train on what attach() returned", why, "do that before attach()"))
        for step in counted_steps(self.run):
            passes = self.meter.passes(step, self.units)
            self.num_passes = len(passes)
            for present in passes:
                self.present = present
                self._begin()
                yield present.batch

    def _begin(self) -> None:
        """Set the weight of the next micro-batch, and where in its step it is."""
        trainer = self._trainer
        assert trainer is not None, "iterated over in a fit"
        is_other = trainer.accumulate_grad_batches is not self.accumulation
        refuse((is_other, "set accumulate_grad_batches", BY_SIZE, "remove the callback that does"))
        number = trainer.fit_loop.epoch_loop.batch_progress.current.ready + 1
        self.accumulation = Accumulation.of(self.present, number)
        trainer.accumulate_grad_batches = self.accumulation
        trainer.val_check_batch = UNREACHED
        if self.is_last and self._ends_epoch:
            trainer.fit_loop.max_batches = number

    @property
    def _ends_epoch(self) -> bool:
        """Whether the present step is the last one of the epoch, as far as known."""
        step, num_samples = self.run.step, self.run.horizon.dataset_num_samples
        if not self.run.is_open or step is None or num_samples is None:
            return False
        return step.timestamp.sample_in_epoch + step.num_samples >= num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the callback saves the run. Lightning asks whether this exists."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


@final
class Accumulation(float):
    """`trainer.accumulate_grad_batches`, by which Lightning divides the loss: one over its weight.

    Lightning also asks `number % it == 0` of the number of micro-batches that have begun in the
    epoch (does the optimizer step?) and of the number before (are gradients cleared?).
    """

    number: int | None
    """The number of the micro-batch, from 1; None before the first one of a fit."""
    present: Pass

    @classmethod
    def of(cls, present: Pass, number: int | None = None) -> Self:
        """Return that of a micro-batch."""
        found = cls(1.0 / present.weight if present.weight else math.inf)
        found.present, found.number = present, number
        return found

    def __rmod__(self, number: Any) -> int:
        is_present = number == self.number
        return int(not (self.present.is_last if is_present else self.present.is_first))

    def __reduce__(self) -> Any:
        return int, (1,)


class _NeverReached(int):
    """`trainer.max_epochs` for those who read it; Lightning asks `epochs >= it`: the run ends."""

    def __le__(self, _: object) -> bool:
        return False


@final
class LightningCallback(Callback):
    """Weighs the losses, moves the clock, and says when to evaluate and to save."""

    def __init__(self, batches: LightningLoader, *, ends_epochs: bool) -> None:
        self._batches, self._run = batches, batches.run
        self._ends_epochs = ends_epochs
        """Whether to evaluate at the end of each epoch, as Lightning does by itself."""
        self._is_open = False
        self._global_step = 0
        self._is_fit = True
        self._signals = NO_SIGNALS
        self._loss: Tensor | None = None
        self._watch: AbstractContextManager[None] = nullcontext()
        self._all_checks = StepChecks(batches.run, batches.said_units)
        self._checks: StepChecks | None = None
        """Checks the present step of manual optimization."""
        self._num_cut = 0
        """Steps of several micro-batches."""
        self._seen: list[tuple[Any, int]]
        """The last micro-batches of the step that is checked, and their samples."""
        self._probe = Probe("training_step")
        self._kept: tuple[Any, Any, Any] | None = None
        """The settings of the trainer that are changed during a fit."""

    @property
    def state_key(self) -> str:
        """The name of the run in a checkpoint."""
        return "stretto"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run; an open step comes anew after a resume."""
        return self._run.state_dict() if self._run.is_bound else {}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note whether a checkpoint is loaded to train; one to validate does not move the run."""
        self._is_fit = trainer.state.fn == TrainerFn.FITTING
        is_foreign = not checkpoint.get("callbacks", {}).get(self.state_key)  # or before a fit
        if self._is_fit and is_foreign:
            what, why = "resume without the state of stretto", "the seen samples are not known"
            instead = "load the weights alone, and leave ckpt_path out"
            raise CheckpointError.cannot(what, why=why, instead=instead)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the run."""
        if self._is_fit:
            self._is_open = bool(state_dict.get("open"))
            self._run.load_state_dict(state_dict)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set what the module and other callbacks read before the run is bound."""
        if stage != "fit":
            return
        loop = trainer.fit_loop
        own = trainer.check_val_every_n_epoch, loop.max_epochs, loop.epoch_loop.max_steps
        self._kept = self._kept or own
        # Whether to evaluate is decided after each step; Lightning reads it after each batch. Other
        # callbacks read from it whether they act after epochs or after evaluations.
        is_usual = self._ends_epochs or not trainer.enable_validation
        trainer.check_val_every_n_epoch = 1 if is_usual else None
        # With these two, trainer.estimated_stepping_batches is the number of optimizer steps.
        loop.max_epochs = -1
        loop.epoch_loop.max_steps = steps_left(self._run, Timestamp()).exact or -1

    @classmethod
    def leave(cls, trainer: Trainer) -> None:
        """Take the callback of an earlier run out of a trainer."""
        for one in [one for one in trainer.callbacks if isinstance(one, cls)]:
            warn_of_replaced(has_begun=one._run.is_bound)
            one.on_fit_end(trainer)
            trainer.callbacks.remove(one)

    def on_fit_end(self, trainer: Trainer, *_: Any) -> None:
        """Give the trainer its own settings back."""
        if self._kept is not None:
            loop = trainer.fit_loop
            trainer.check_val_every_n_epoch, loop.max_epochs, loop.epoch_loop.max_steps = self._kept
            trainer.reload_dataloaders_every_n_epochs, trainer.accumulate_grad_batches = 0, 1
            self._kept = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bind the run: optimizers exist, and their saved state is not loaded yet."""
        part, run = trainer.distributed_sampler_kwargs or {}, self._run
        so_far = run.state_dict() if run.is_bound else None
        rank = part.get("rank", trainer.global_rank)
        world_size = part.get("num_replicas", trainer.world_size)
        run.bind(trainer.optimizers, rank=rank, world_size=world_size)
        if so_far is not None:  # a second fit continues, as the trainer does
            run.load_state_dict(so_far)
        is_manual = not pl_module.automatic_optimization
        is_other = is_manual or isinstance(trainer.strategy, ModelParallelStrategy)
        is_hidden = is_other and "noise" in run.loader.reads
        others = run.is_scheduled and trainer.lr_scheduler_configs
        instead, where = "pass schedules=None", "it needs automatic optimization, without FSDP2"
        refuse(
            (others, "follow two schedules", "the module has schedulers", instead),
            (is_hidden, "follow the noise of the gradient", where, "plan the batch sizes"),
        )
        self._seen, self._num_cut = [], 0
        if run.loader.reads & {"noise", "loss"} or is_manual:
            self.on_before_backward = self._on_before_backward
            self.on_after_backward = self._on_after_backward
            self.on_before_optimizer_step = self._on_before_optimizer_step
        meter = StepMeter(run, trainer.strategy.model)
        self._batches.follow(trainer, meter, is_open=self._is_open)
        self._is_open = False
        end, num_samples = end_of(run), run.horizon.dataset_num_samples
        trainer.fit_loop.epoch_loop.max_steps = -1
        num_epochs = math.ceil(end / num_samples) if end and num_samples else -1
        trainer.fit_loop.max_epochs = _NeverReached(num_epochs)

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Set the progress in the epoch to that of the run.

        An open step comes anew, and other ranks or micro-batches change the number of batches.
        """
        is_other = trainer.train_dataloader is not self._batches
        instead = "pass what attach() returned to trainer.fit"
        refuse((is_other, "train on another dataloader", "a run is attached", instead))
        self._global_step = trainer.global_step
        trainer.val_check_batch = UNREACHED
        self._set_progress(trainer)

    def _set_progress(self, trainer: Trainer) -> None:
        """Set Lightning's counters of epochs and batches to where the run is.

        They count a stopped epoch as a whole one, and other ranks or micro-batches than those of a
        checkpoint change the number of batches.
        """
        run, loop = self._run, trainer.fit_loop
        now, num_samples = run.timer.timestamp, run.horizon.dataset_num_samples
        epoch, is_inside = now.epoch, not ends_epoch(run)
        if now.batch_in_epoch and not is_inside:
            epoch += 1
        for one in (loop.epoch_progress.total, loop.epoch_progress.current):
            one.ready = one.started = epoch + is_inside
            one.processed = one.completed = epoch
        inner, progress = loop.epoch_loop, loop.epoch_loop.batch_progress
        done = progress.current.processed
        if is_inside and num_samples is not None and len(self._batches) != UNREACHED:
            done = planned_micro_batches(run, now.epoch * num_samples, now.sample)
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress.current, name, done)
        progress.is_last_batch = False
        inner._batches_that_stepped = now.batch
        # `restarted_on_last`: no batch is counted once more.
        loop.restarting = is_inside
        loop._restart_stage = "restarted_mid_epoch" if is_inside else "none"
        inner._restart_stage = "restarted_on_last" if is_inside else "none"

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Warn if the run has not reached its end, and nobody has stopped it."""
        if not trainer.should_stop:
            warn_of_end(self._run, "Lightning", "fit(..., ckpt_path=...)")

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Keep the dataloaders during the epoch."""
        if trainer.fit_loop.max_batches == UNREACHED:
            trainer.fit_loop.max_batches = math.inf  # for progress bars
        trainer.reload_dataloaders_every_n_epochs = 0

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Have Lightning read the length of the next epoch."""
        if trainer.fit_loop.max_batches == math.inf:  # it has not seen which batch was the last
            loop = trainer.fit_loop.epoch_loop
            loop.batch_progress.is_last_batch = True
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        trainer.reload_dataloaders_every_n_epochs = 1

    # Lightning calls each hook that is callable, which costs 6 us, even if it does nothing.
    on_before_zero_grad: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Check what the loss is over, in steps 1, 2, 4, 8, ... of several micro-batches."""
        batches, present = self._batches, self._batches.present
        if present.is_first and not pl_module.automatic_optimization:
            self._checks = self._all_checks.begin(batches.num_passes)
        if present.is_first and present.is_last:
            return
        if present.is_first:
            self._num_cut, self._seen, batches.is_weighed = self._num_cut + 1, [], False
        if self._num_cut.bit_count() != 1:
            return
        # Copies: a training_step may change its batch.
        given = self._probe(copy.deepcopy, batch)
        self._seen = [*self._seen[-1:], (given, present.num_samples)]
        if not present.is_last:
            return
        if self._num_cut == 1:
            warn_of_batch_norm(pl_module)
        if not pl_module.automatic_optimization:
            why, instead = "its loss has no weight", "multiply it: dataloader.weight * loss"
            refuse((not batches.is_weighed, "train in manual optimization", why, instead))
        elif not isinstance(trainer.strategy, ModelParallelStrategy):
            other = self._probe(self._guest, trainer, pl_module)
            is_lost = self._run.loader.ranks.agree([self._probe.error is not None])[0]
            is_other = not (is_lost or self._has_mean(trainer, other, batch_idx))
            self._probe.tell()
            why = "that of a batch is not the mean over samples, or units=, of those of its parts"
            refuse((is_other, "compute the loss in micro-batches", why, ASK))

    def _on_before_backward(self, _: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Measure the loss, and the gradient if the policy reads its noise."""
        present = self._batches.present
        if present.is_first:
            self._loss, self._signals = None, NO_SIGNALS
        if pl_module.automatic_optimization:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        elif self._checks is not None:
            self._checks.before_pass(loss, present, float(self._batches.accumulation))
        self._watch = present.watch
        self._watch.__enter__()

    def _on_after_backward(self, *_: Any) -> None:
        """End the measurement of a pass."""
        self._watch.__exit__(None, None, None)
        self._watch = nullcontext()
        if self._checks is not None:
            self._checks.after_pass()

    def _on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        """Read what the step measured, before gradients are clipped."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._signals = self._batches.meter.signals(self._loss, scaler)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count the step if it is complete, and say what is due.

        Raises:
            TrainingError: in manual optimization, an optimizer has stepped before.
        """
        if not self._batches.is_last:
            is_early, instead = trainer.global_step != self._global_step, "ask dataloader.is_last"
            refuse((is_early, "step the optimizer", "the step has more micro-batches", instead))
            return
        self._global_step, self._checks = trainer.global_step, None
        due = self._run.finish(self._signals)
        if is_over(self._run):
            trainer.should_stop = True
        if "evaluate" in due:
            trainer.val_check_batch = 1
        if "save" in due:
            saver = trainer.checkpoint_callback
            folder = getattr(saver, "dirpath", None) or Path(trainer.default_root_dir)
            trainer.save_checkpoint(Path(folder) / f"sample={self._run.timer.sample}.ckpt")

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        """Give the policy the metric that it follows."""
        if not trainer.sanity_checking:
            note_metrics(self._run, trainer.callback_metrics)

    @staticmethod
    def _guest(trainer: Any, module: Any) -> Any:
        """Return a copy of a module that shares the parameters, in a copy of the trainer.

        What it logs, and what it sets in itself or the trainer, is not kept.
        """
        guest = copy.copy(trainer)
        guest._loggers = [DummyLogger() for _ in trainer.loggers]
        shared = {id(each): each for each in (*module.parameters(), trainer.datamodule)}
        other = copy.deepcopy(module, {**shared, id(trainer): guest})
        other.trainer = guest  # a copy has none
        other.log = other.log_dict = other.print = lambda *_, **__: None
        return other

    def _has_mean(self, trainer: Any, other: Any, batch_idx: int) -> bool:
        """Return whether the loss of a Lightning module is a mean over its units; see `keeps`.

        All ranks must call it: a `training_step` may gather. It is called without gradients, in
        training mode; in eval mode if it is random.
        """

        def loss_of(batch: Any, seed: int | None = None) -> float:
            random.restore()
            if seed is not None:
                torch.manual_seed(seed)
            other.trainer.accumulate_grad_batches += 1  # a loss that is divided by it differs
            given = copy.deepcopy(batch)
            arguments = trainer.fit_loop.epoch_loop._build_kwargs({}, given, batch_idx).values()
            with trainer.precision_plugin.train_step_context():
                found = other.training_step(*arguments)
            found = found.get("loss") if isinstance(found, Mapping) else found
            return math.nan if found is None else float(found)

        is_coarse = "32" not in str(trainer.precision) and "64" not in str(trainer.precision)
        tolerance = tolerance_for(other.parameters(), is_coarse=is_coarse)
        units: Any = self._batches.meter.counter or "samples"
        probe, ranks, seen = self._probe, self._run.loader.ranks, self._seen
        for is_training in (True, False):
            with only_looking(other, is_training=is_training) as random:
                is_mean = keeps(
                    "mean", seen, lambda one: probe(loss_of, one), units, lambda: tolerance
                )
                if not ranks.agree([not is_mean])[0]:
                    return True
                once, again = (float(probe(loss_of, seen[-1][0], seed)) for seed in (0, 1))
            if not ranks.agree([not is_close(once, again, tolerance)])[0]:
                return False
        # It is random in any mode, as of a variational autoencoder: what is said is taken.
        return self._batches.said_units is not None
