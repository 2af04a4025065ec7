"""What a `Trainer` is given, compared over ranks, and put together once its data are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch.optim import Optimizer

from stretto.data import DataSpec, StepLoader
from stretto.optim import Hyperparameters
from stretto.runtime import TrainStep
from stretto.timing import Horizon
from stretto.training.callback import Callback, Events
from stretto.training.checkpointing.saver import Saver
from stretto.training.checkpointing.state import RunState
from stretto.training.distributed.agreement import (
    as_config,
    as_texts,
    check_agreement,
    describe_settings,
)
from stretto.training.distributed.ranks import Ranks
from stretto.training.evaluation.best import Best
from stretto.training.evaluation.evaluate import Evaluator
from stretto.training.evaluation.metrics import check_merging
from stretto.training.interrupt import Interrupts
from stretto.training.logs.console import ConsoleLogger, has_terminal
from stretto.training.logs.recorder import Recorder
from stretto.training.loop import Loop
from stretto.training.run import Run
from stretto.training.settings import (
    Checkpointing,
    Evaluation,
    Loading,
    Logging,
    Stepping,
)
from stretto.training.setup import BuiltWith, describe_setup
from stretto.training.stepping.measuring import Measurements
from stretto.training.stepping.safety_net import SafetyNet
from stretto.training.stepping.stepper import Stepper

_EVALUATION_BATCH = 64
"""Samples of a forward pass in evaluation where no micro-batch size is set."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What a trainer was given; `loop` needs its run and its data as well."""

    step: TrainStep
    optimizer: Optimizer
    """The optimizers of the step as one."""
    callbacks: Sequence[Callback]
    folder: Path | None
    ranks: Ranks
    """The processes of the run."""
    loading: Loading
    stepping: Stepping
    evaluations: Sequence[Evaluation]
    checkpoint: Checkpointing | None
    log: Logging

    def compare_ranks(
        self, spec: DataSpec, *, schedules: Mapping[str, Any] | None, **given: Any
    ) -> None:
        """Compare the settings of all ranks, before any of them can wait for another.

        Args:
            spec: the training data.
            schedules: by hyper-parameter, as given.
            given: other settings that are not in this record.

        Raises:
            TrainingError: they differ, or a metric cannot be computed over several ranks.
        """
        if self.ranks.world_size == 1:
            return
        settings = self._settings(spec, schedules=schedules, **given)
        check_agreement(
            as_texts(settings, self.step.model, self.optimizer), self.ranks, call="Trainer()"
        )
        for one in self.evaluations:
            check_merging(one.metrics)

    def _settings(
        self, spec: DataSpec, *, schedules: Mapping[str, Any] | None, **given: Any
    ) -> dict[str, Any]:
        """Return the settings of the run by name."""
        return describe_settings(
            given=given | {f"schedules.{name}": one for name, one in (schedules or {}).items()},
            spec=spec,
            optimizer=self.optimizer,
            step=self.step,
            loading=self.loading,
            stepping=self.stepping,
            evaluations=self.evaluations,
            checkpoint=self.checkpoint,
            log=self.log,
            callbacks=self.callbacks,
            has_folder=self.folder is not None,
            device=self.ranks.device.type,
        )

    def _config(self, loader: StepLoader, hyperparameters: Hyperparameters) -> dict[str, Any]:
        """Return the settings of the run as plain values, for loggers."""
        config = self.log.config
        if not self.log.loggers:
            return {}
        if config is None:
            settings = self._settings(
                loader.spec,
                max_duration=str(loader.horizon.max_duration),
                batch_size=loader.policy,
                micro_batch_size=loader.micro_batch_size,
                schedules=hyperparameters.schedules,
                world_size=self.ranks.world_size,
            )
            config = as_config(settings, self.step.model, self.callbacks)
        return {**config, "folder": None if self.folder is None else str(self.folder)}

    def _console(self, horizon: Horizon) -> ConsoleLogger | None:
        """Return what shows the run, on the first rank only."""
        asked = self.log.console
        if not self.ranks.is_first or not (has_terminal() if asked is None else asked):
            return None
        return ConsoleLogger(horizon.max_duration)

    def loop(
        self,
        run: Run,
        events: Events,
        loader: StepLoader,
        hyperparameters: Hyperparameters,
        *,
        finds_micro_batch_size: bool,
    ) -> tuple[Loop, RunState]:
        """Return what runs, and what of it a checkpoint keeps."""
        ranks = self.ranks
        stepper = self._stepper(loader, is_found=finds_micro_batch_size)
        evaluators = self._evaluators(loader, stepper)
        best = Best(self.checkpoint, self.evaluations)
        recorder = Recorder(
            self.folder,
            self.log.loggers,
            console=self._console(run.horizon),
            config=self._config(loader, hyperparameters),
            ranks=ranks,
            horizon=run.horizon,
            values=hyperparameters.values,
            skipped=run.skipped,
            logged=run.logged,
        )
        built = BuiltWith(self.optimizer)
        setup = describe_setup(
            loader,
            hyperparameters,
            loading=self.loading,
            stepping=self.stepping,
            step=self.step,
            device=ranks.device.type,
            finds_micro_batch_size=finds_micro_batch_size,
            optimizer=built.values,
        )
        state = RunState(
            self.step,
            loader=loader,
            recorder=recorder,
            stepper=stepper,
            callbacks=self.callbacks,
            evaluators=evaluators,
            skipped=run.skipped,
            best=best,
            setup=setup,
            built=built,
            ranks=ranks,
        )
        saver = Saver(
            self.checkpoint,
            self.folder,
            horizon=run.horizon,
            ranks=ranks,
            state=state,
            best=best,
        )
        measurements = Measurements(
            loader,
            stepper,
            stepping=self.stepping,
            events=events,
            evaluations=self.evaluations,
        )
        loop = Loop(
            run=run,
            loader=loader,
            hyperparameters=hyperparameters,
            stepper=stepper,
            measurements=measurements,
            recorder=recorder,
            saver=saver,
            evaluators=evaluators,
            best=best,
            non_finite=self.stepping.non_finite,
            events=events,
            ranks=ranks,
            interrupts=Interrupts(),
            log_is_due=self.log.trigger.bind(run.horizon),
            flush_is_due=self.log.flush_trigger.bind(run.horizon),
        )
        return loop, state

    def _stepper(self, loader: StepLoader, *, is_found: bool) -> Stepper:
        step, spec = self.step, loader.spec
        stepper = Stepper(
            step,
            settings=self.stepping,
            ranks=self.ranks,
            # Where nobody changes them, the loader has counted what the data have.
            count_tokens=spec.count_tokens if spec.tokens_vary else None,
        )
        stepper.net = SafetyNet(
            step.model,
            spec,
            self.ranks,
            size=loader.micro_batch_size,
            is_found=is_found,
        )
        return stepper

    def _evaluators(self, loader: StepLoader, stepper: Stepper) -> list[Evaluator]:
        return [
            Evaluator(
                settings,
                self.step.model,
                loss=self.step.loss,
                loss_is_sum=self.step.loss_reduction == "sum",
                count=stepper.count,
                autocast=self.step.autocast,
                batch_size=loader.micro_batch_size or _EVALUATION_BATCH,
                collate_fn=self.loading.collate_fn,
                ranks=self.ranks,
                horizon=loader.horizon,
            )
            for settings in self.evaluations
        ]
