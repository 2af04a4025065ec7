"""`Trainer`: one readable loop on one exact clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.checkpoint import read_checkpoint
from stretto.data import DataSpec, Step
from stretto.errors import PlanError
from stretto.optim import Hyperparameters
from stretto.planning import Plan
from stretto.timing import Horizon, TimeLike, Timer, Timestamp
from stretto.training.callback import Callback, Events
from stretto.training.checks import check_parts
from stretto.training.evaluate import Evaluator
from stretto.training.interrupt import Interrupts
from stretto.training.preparation import make_loader, make_plan
from stretto.training.ranks import Ranks
from stretto.training.recorder import Recorder
from stretto.training.saver import Saver
from stretto.training.settings import (
    Checkpointing,
    Evaluation,
    Loading,
    Logging,
    LossFunction,
    Stepping,
)
from stretto.training.state import RunState
from stretto.training.stepper import Gradient, Stepper

_EVALUATION_BATCH = 64
"""Samples of a forward pass in evaluation where no micro-batch size is set."""


@final
class Trainer:
    """Trains a model with a batch size that may change, to the end of `max_duration`.

    Everything that could be wrong with the settings is found here, before the first step.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    >>> model = torch.nn.Linear(4, 1)
    >>> trainer = Trainer(
    ...     model, data,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    ...     max_duration="2ep",
    ...     batch_size="0ep:8 1ep:16",
    ... )
    >>> trainer.fit()
    >>> trainer.timer.batch, trainer.timer.sample
    (12, 128)

    Args:
        model: the model; moved to the device and, on several ranks, wrapped.
        train_data: a data set, a `DataLoader`, an iterable of batches, or a `DataSpec`.
        optimizer: an optimizer of the model's parameters.
        loss: `loss(model, batch)`, the mean over the batch (see `Stepping.loss_reduction`).
        max_duration: how long to train, in any unit but `dur`.
        batch_size: samples of one optimizer step over all ranks: a number, a text such as
            `"0tok:768 250Btok:1536"`, a function, or a policy.
        micro_batch_size: samples of one forward pass on one rank; None: the whole share.
        schedules: by hyper-parameter (`"lr"`, `"weight_decay"`, `"lr@group"`), a schedule or
            several that multiply.
        loading: how samples are ordered and fetched.
        stepping: how a step is computed.
        evaluate: one evaluation or several, each with a name of its own.
        checkpoint: when checkpoints are written; needs `folder`.
        log: when metrics are logged.
        callbacks: listeners.
        folder: where metrics, the ledger and checkpoints go; one for each run.

    Raises:
        StrettoError: something in the settings cannot be; the message says what to write.
    """

    # Fifteen parameters, all but two by keyword: what a run is, one each, the rest in groups.
    def __init__(
        self,
        model: nn.Module,
        train_data: Any,
        *,
        optimizer: Optimizer,
        loss: LossFunction,
        max_duration: TimeLike,
        batch_size: Any,
        micro_batch_size: int | None = None,
        schedules: Mapping[str, Any] | None = None,
        loading: Loading = Loading(),  # noqa: B008  a frozen value
        stepping: Stepping = Stepping(),  # noqa: B008
        evaluate: Evaluation | Sequence[Evaluation] | None = None,
        checkpoint: Checkpointing | None = None,
        log: Logging = Logging(),  # noqa: B008
        callbacks: Sequence[Callback] = (),
        folder: str | Path | None = None,
    ) -> None:
        evaluations = (evaluate,) if isinstance(evaluate, Evaluation) else evaluate or ()
        check_parts(model, optimizer, loss, evaluations=evaluations, callbacks=callbacks)
        self.folder = Path(folder) if folder is not None else None
        self.stop_reason: str | None = None
        self._all_stop = False
        self._ranks = Ranks.from_environment(stepping.device)
        self.model = model.to(self._ranks.device)
        spec = DataSpec.of(train_data)
        if any(callback.changes_tokens for callback in callbacks):
            spec = replace(spec, tokens_vary=True)
        self.loader = make_loader(
            spec, batch_size, max_duration, micro_batch_size, loading=loading, ranks=self._ranks
        )
        self.optimizer = optimizer
        self.hyperparameters = Hyperparameters(
            optimizer, schedules or {}, self.horizon, rule=stepping.learning_rate_rule
        )
        self._make_plan = partial(
            make_plan, self.loader, self.hyperparameters, evaluations, checkpoint, log
        )
        self.plan, self._refusal = self._planned()
        self._events = Events(callbacks)
        self._stepper = Stepper(
            self._ranks.wrap(cast(nn.Module, torch.compile(model)) if stepping.compile else model),
            optimizer,
            loss=loss,
            settings=stepping,
            ranks=self._ranks,
            transforms=[partial(call, self) for call in self._events.listeners("transform_batch")],
            # Where nobody changes them, the loader has counted what the data have.
            count_tokens=spec.count_tokens if spec.tokens_vary else None,
        )
        self._evaluators = [self._evaluator(one, loss, stepping, loading) for one in evaluations]
        self._recorder = Recorder(
            self.folder,
            log.loggers,
            ranks=self._ranks,
            horizon=self.horizon,
            values=self.hyperparameters.values,
        )
        self._log_is_due = log.trigger.bind(self.horizon)
        self._flush_is_due = log.flush_trigger.bind(self.horizon)
        self._state = RunState(
            model,
            optimizer,
            loader=self.loader,
            recorder=self._recorder,
            scaler=self._stepper.scaler,
            callbacks=callbacks,
            evaluators=self._evaluators,
            ranks=self._ranks,
        )
        self._saver = Saver(
            checkpoint, self.folder, horizon=self.horizon, ranks=self._ranks, state=self._state
        )
        self._interrupts = Interrupts()
        self._logged_at = -1

    @property
    def horizon(self) -> Horizon:
        """The static facts of the run."""
        return self.loader.horizon

    @property
    def timer(self) -> Timer:
        """The clock."""
        return self.loader.timer

    @property
    def has_several_ranks(self) -> bool:
        """Whether other processes train with this one."""
        return self._ranks.world_size > 1

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes and prints for all."""
        return self._ranks.is_first

    def get_elapsed_duration(self) -> float:
        """Return the fraction of the run that has passed, in [0, 1]."""
        return self.timer.get_elapsed_duration()

    def stop(self, reason: str) -> None:
        """End the run after the batch that is being computed, as a signal would.

        In `on_fit_start`: before the first batch. On several ranks one that asks is enough; they
        agree while they compute a batch, so what is asked after that holds for the next one.
        """
        self.stop_reason = self.stop_reason or reason

    def fit(self) -> None:
        """Train until `max_duration` is reached, or the run is stopped.

        SIGINT and SIGTERM end it after the batch, with a checkpoint where those are kept. A run
        that was stopped goes on where it is called again.

        Raises:
            TrainingError: the folder holds another run, or cannot be written to.
            PlanError: a stage that is still to come has fewer samples than there are ranks.
        """
        if self._refusal is not None:
            raise self._refusal
        self.stop_reason = None
        try:
            self._recorder.open(self.timer.timestamp)
            with self._interrupts:
                self.model.train()
                self.optimizer.zero_grad()  # a gradient from before is no part of the first batch
                self._events.tell("on_fit_start", self)
                try:
                    self._run()
                finally:
                    self._events.tell("on_fit_end", self)
        finally:
            self._recorder.close()

    def _run(self) -> None:
        self.timer.start()
        before, step = self.timer.timestamp, None
        for step in self._steps():
            after = self._take(step)
            self._after_batch(step, before, after)
            before = after
        self._end(step, before)

    def _steps(self) -> Iterator[Step]:
        """The steps of the loader, until the run is over or stopped."""
        self._all_stop = bool(self._ranks.agree((self.stop_reason is not None,))[0])
        while not self._is_stopped and (step := next(self.loader, None)) is not None:
            yield step

    @property
    def _is_stopped(self) -> bool:
        # Of several ranks none may leave the loop alone, so only what they agreed on counts.
        return self._all_stop if self._ranks.world_size > 1 else self.stop_reason is not None

    def evaluate(self) -> dict[str, float]:
        """Measure the model on every evaluation's data and return it by `name/metric`.

        Called while `fit` runs it is also logged, as what is measured on time is.
        """
        record: dict[str, float] = {}
        for evaluator in self._evaluators:
            record |= self._evaluate(evaluator)
        return record

    def resume(self, path: str | Path = "latest") -> Path | None:
        """Continue from a checkpoint: a path, or `"latest"` in the run folder.

        Returns:
            What was resumed from; None where `"latest"` finds nothing, and the run begins anew.

        Raises:
            CheckpointError: the checkpoint is damaged or belongs to another run.
            TrainingError: the latest is asked for, and the run has no folder.
        """
        found = self._saver.latest() if str(path) == "latest" else Path(path)
        if found is None:
            self._recorder.start_over()
            return None
        is_own = self._saver.owns(found)
        self._state.restore(read_checkpoint(found), found, is_own=is_own)
        self.plan = self._make_plan(resume_at=self.timer.timestamp)
        self._refusal = None
        self._saver.saved_at = self.timer.sample if is_own else None
        self._logged_at = -1
        return found

    def _planned(self) -> tuple[Plan | None, PlanError | None]:
        """Return the plan; or, on several ranks, why there is none.

        A stage that so many ranks cannot share may be over in the checkpoint that is resumed next.
        """
        try:
            return self._make_plan(), None
        except PlanError as refusal:
            if not self.has_several_ranks:
                raise
            return None, refusal

    def _take(self, step: Step) -> Timestamp:
        """Compute one step and move the clock."""
        self.hyperparameters.apply(step.timestamp, step.batch_size)
        self._events.tell("on_batch_start", self, step)
        gradient = self._stepper.gradient(step)
        tokens, seconds = self._agree(step, gradient)
        self._events.tell("on_gradient", self, step)
        self._stepper.update()
        after = self.loader.finish(step, tokens=tokens, seconds=seconds)
        self._recorder.batch(step, gradient.losses, after)
        return after

    def _agree(self, step: Step, gradient: Gradient) -> tuple[int | None, float | None]:
        """Tell the other ranks what this one knows, in one sum; return their tokens and seconds."""
        if self._interrupts.received is not None:
            self.stop(f"received {self._interrupts.received}")
        if self._ranks.world_size == 1:
            return gradient.tokens, None
        wants_stop = self.stop_reason is not None
        seconds = self.timer.seconds_since_update() if self._ranks.is_first else 0.0
        tokens = step.num_tokens if gradient.tokens is None else gradient.tokens
        sums = self._ranks.agree((tokens, gradient.units, wants_stop, seconds))
        self._stepper.finish(step, sums[1])
        if sums[2]:
            self.stop("another rank was told to stop")
            self._all_stop = True
        return int(sums[0]), sums[3]

    def _after_batch(self, step: Step, before: Timestamp, after: Timestamp) -> None:
        """Do everything that is due now."""
        self._events.tell("on_batch_end", self, step)
        if after.epoch != before.epoch:
            self._end_epochs(before, after)
        if self._log_is_due(before, after):
            self._log(step)
        for evaluator in self._evaluators:
            if evaluator.is_due(before, after):
                self._evaluate(evaluator)
        # The last one comes after the last line of metrics (see `_end`).
        if self._saver.is_due(before, after) and not self.horizon.is_done(after):
            self._save()
        if self._flush_is_due(before, after):
            self._recorder.flush()

    def _end_epochs(self, before: Timestamp, after: Timestamp) -> None:
        for _ in range(after.epoch - before.epoch):
            self._events.tell("on_epoch_end", self)

    def _end(self, step: Step | None, before: Timestamp) -> None:
        """Log, measure and save what the last batch left open."""
        if not self._is_stopped:
            self.stop_reason = None  # a wish that came too late for the ranks to agree on
        self._end_epochs(before, self.timer.timestamp)
        is_cut = self._is_stopped and not self.horizon.is_done(self.timer.timestamp)
        if is_cut:
            self._save()  # before the last line: a run that goes on writes that one whole
        if step is not None and self._logged_at != self.timer.batch:
            self._log(step)
        if not self._is_stopped:
            for evaluator in self._evaluators:
                if evaluator.measured_at != self.timer.batch:
                    self._evaluate(evaluator)
        if not is_cut:
            self._save()

    def _log(self, step: Step) -> None:
        self._logged_at = self.timer.batch
        self._events.tell("on_log", self, self._recorder.log(step, self.timer.timestamp))

    def _evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        evaluator.measured_at = self.timer.batch
        metrics = self._recorder.paused(evaluator.measure)
        named = {f"{evaluator.name}/{name}": value for name, value in metrics.items()}
        self._recorder.write({**self._recorder.clock(self.timer.timestamp), **named})
        self._events.tell("on_evaluation_end", self, evaluator.name, metrics)
        return named

    def _save(self) -> None:
        path = self._recorder.paused(lambda: self._saver.save(self.timer.timestamp))
        if path is not None:
            self._events.tell("on_checkpoint", self, path)

    def _evaluator(
        self, settings: Evaluation, loss: LossFunction, stepping: Stepping, loading: Loading
    ) -> Evaluator:
        return Evaluator(
            settings,
            self.model,
            loss=loss,
            loss_is_sum=stepping.loss_reduction == "sum",
            count=self._stepper.count,
            autocast=self._stepper.autocast,
            batch_size=self.loader.micro_batch_size or _EVALUATION_BATCH,
            collate_fn=loading.collate_fn,
            ranks=self._ranks,
            horizon=self.horizon,
        )
