"""What a `Trainer` is given, compared over ranks, and put together once its data are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import nn

from stretto.data import DataSpec
from stretto.training.agreement import as_config, as_texts, check_agreement, describe_settings
from stretto.training.best import Best
from stretto.training.callback import Events
from stretto.training.console import ConsoleLogger, has_terminal
from stretto.training.evaluate import Evaluator
from stretto.training.finite import SkippedSteps
from stretto.training.interrupt import Interrupts
from stretto.training.loop import Loop
from stretto.training.measuring import Measurements
from stretto.training.metrics import check_merging
from stretto.training.ranks import Ranks
from stretto.training.recorder import Recorder
from stretto.training.safety_net import SafetyNet
from stretto.training.saver import Saver
from stretto.training.settings import (
    Checkpointing,
    Evaluation,
    Loading,
    Logging,
    LossFunction,
    Stepping,
)
from stretto.training.setup import BuiltWith, describe_setup
from stretto.training.state import RunState
from stretto.training.stepper import Stepper

if TYPE_CHECKING:
    from stretto.training.trainer import Trainer

_EVALUATION_BATCH = 64
"""Samples of a forward pass in evaluation where no micro-batch size is set."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A trainer and what it was given; `loop` needs its data, its clock and its plan as well."""

    trainer: Trainer
    ranks: Ranks
    """The processes of the run."""
    loss: LossFunction
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
        trainer = self.trainer
        settings = self._settings(spec, schedules=schedules, **given)
        check_agreement(
            as_texts(settings, trainer.model, trainer.optimizer), self.ranks, call="Trainer()"
        )
        for one in self.evaluations:
            check_merging(one.metrics)

    def _settings(
        self, spec: DataSpec, *, schedules: Mapping[str, Any] | None, **given: Any
    ) -> dict[str, Any]:
        """Return the settings of the run by name."""
        trainer = self.trainer
        return describe_settings(
            given=given | {f"schedules.{name}": one for name, one in (schedules or {}).items()},
            spec=spec,
            optimizer=trainer.optimizer,
            loss=self.loss,
            loading=self.loading,
            stepping=self.stepping,
            evaluations=self.evaluations,
            checkpoint=self.checkpoint,
            log=self.log,
            callbacks=trainer.callbacks,
            has_folder=trainer.folder is not None,
            device=self.ranks.device.type,
        )

    def _config(self) -> dict[str, Any]:
        """Return the settings of the run as plain values, for loggers."""
        trainer, config = self.trainer, self.log.config
        if not self.log.loggers:
            return {}
        if config is None:
            settings = self._settings(
                trainer.loader.spec,
                max_duration=str(trainer.horizon.max_duration),
                batch_size=trainer.loader.policy,
                micro_batch_size=trainer.loader.micro_batch_size,
                schedules=trainer.hyperparameters.schedules,
                world_size=self.ranks.world_size,
            )
            config = as_config(settings, trainer.model, trainer.callbacks)
        return {**config, "folder": None if trainer.folder is None else str(trainer.folder)}

    def _console(self) -> ConsoleLogger | None:
        """Return what shows the run, on the first rank only."""
        asked = self.log.console
        if not self.ranks.is_first or not (has_terminal() if asked is None else asked):
            return None
        return ConsoleLogger(self.trainer.horizon.max_duration)

    def loop(self) -> tuple[Loop, RunState]:
        """Return what runs, and what of it a checkpoint keeps."""
        trainer, ranks = self.trainer, self.ranks
        events = Events(trainer.callbacks, trainer)
        stepper = self._stepper(events)
        evaluators = self._evaluators(stepper)
        skipped, best = SkippedSteps(), Best(self.checkpoint, self.evaluations)
        recorder = Recorder(
            trainer.folder,
            self.log.loggers,
            console=self._console(),
            config=self._config(),
            ranks=ranks,
            horizon=trainer.horizon,
            values=trainer.hyperparameters.values,
            skipped=skipped,
        )
        state = self._state(recorder, stepper, evaluators, skipped, best)
        saver = Saver(
            self.checkpoint,
            trainer.folder,
            horizon=trainer.horizon,
            ranks=ranks,
            state=state,
            best=best,
        )
        measurements = Measurements(
            trainer.loader,
            stepper,
            stepping=self.stepping,
            events=events,
            evaluations=self.evaluations,
        )
        loop = Loop(
            loader=trainer.loader,
            hyperparameters=trainer.hyperparameters,
            stepper=stepper,
            measurements=measurements,
            recorder=recorder,
            saver=saver,
            evaluators=evaluators,
            best=best,
            skipped=skipped,
            non_finite=self.stepping.non_finite,
            events=events,
            ranks=ranks,
            interrupts=Interrupts(),
            log_is_due=self.log.trigger.bind(trainer.horizon),
            flush_is_due=self.log.flush_trigger.bind(trainer.horizon),
        )
        return loop, state

    def _stepper(self, events: Events) -> Stepper:
        trainer, model, spec = self.trainer, self.trainer.model, self.trainer.loader.spec
        compiled = cast(nn.Module, torch.compile(model)) if self.stepping.compile else model
        stepper = Stepper(
            self.ranks.wrap(compiled),
            trainer.optimizer,
            loss=self.loss,
            settings=self.stepping,
            ranks=self.ranks,
            transforms=[partial(call, trainer) for call in events.listeners("transform_batch")],
            # Where nobody changes them, the loader has counted what the data have.
            count_tokens=spec.count_tokens if spec.tokens_vary else None,
        )
        stepper.net = SafetyNet(
            model,
            spec,
            self.ranks,
            size=trainer.loader.micro_batch_size,
            is_found=trainer.fitting is not None,
        )
        return stepper

    def _evaluators(self, stepper: Stepper) -> list[Evaluator]:
        return [
            Evaluator(
                settings,
                self.trainer.model,
                loss=self.loss,
                loss_is_sum=self.stepping.loss_reduction == "sum",
                count=stepper.count,
                autocast=stepper.autocast,
                batch_size=self.trainer.loader.micro_batch_size or _EVALUATION_BATCH,
                collate_fn=self.loading.collate_fn,
                ranks=self.ranks,
                horizon=self.trainer.horizon,
            )
            for settings in self.evaluations
        ]

    def _state(
        self,
        recorder: Recorder,
        stepper: Stepper,
        evaluators: Sequence[Evaluator],
        skipped: SkippedSteps,
        best: Best,
    ) -> RunState:
        trainer, built = self.trainer, BuiltWith(self.trainer.optimizer)
        setup = describe_setup(
            trainer.loader,
            trainer.hyperparameters,
            loading=self.loading,
            stepping=self.stepping,
            device=self.ranks.device.type,
            finds_micro_batch_size=trainer.fitting is not None,
            optimizer=built.values,
        )
        return RunState(
            trainer.model,
            trainer.optimizer,
            loader=trainer.loader,
            recorder=recorder,
            stepper=stepper,
            callbacks=trainer.callbacks,
            evaluators=evaluators,
            skipped=skipped,
            best=best,
            setup=setup,
            built=built,
            ranks=self.ranks,
        )
