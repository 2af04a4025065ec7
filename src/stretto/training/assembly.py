"""What runs, put together of what a `Trainer` was given and its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from stretto.data import StepLoader
from stretto.optim import Hyperparameters
from stretto.timing import Horizon
from stretto.training.callback import Events
from stretto.training.checkpointing.saver import Saver
from stretto.training.checkpointing.state import RunState
from stretto.training.evaluation.best import Best
from stretto.training.evaluation.evaluate import Evaluator
from stretto.training.interrupt import Interrupts
from stretto.training.logs.console import ConsoleLogger, has_terminal
from stretto.training.logs.recorder import Recorder
from stretto.training.loop import Loop
from stretto.training.preparation import Given
from stretto.training.run import Run
from stretto.training.setup import BuiltWith, describe_setup
from stretto.training.stepping.measuring import Measurements
from stretto.training.stepping.safety_net import SafetyNet
from stretto.training.stepping.stepper import Stepper

_EVALUATION_BATCH = 64
"""Samples of a forward pass in evaluation where no micro-batch size is set."""


@final
@dataclass(frozen=True, slots=True)
class Assembly:
    """Makes the parts of a loop."""

    given: Given

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
        given, timed, due = self.given, self.given.timed, loader.prepared.bound_triggers
        stepper = self._stepper(loader, is_found=finds_micro_batch_size)
        evaluators = self._evaluators(loader, stepper)
        best = Best(timed.checkpoint, timed.evaluations)
        recorder = self._recorder(run, loader, hyperparameters)
        built = BuiltWith(given.optimizer)
        state = RunState(
            given.step,
            loader=loader,
            recorder=recorder,
            stepper=stepper,
            callbacks=timed.callbacks,
            evaluators=evaluators,
            skipped=run.skipped,
            best=best,
            setup=self._setup(loader, hyperparameters, built, is_found=finds_micro_batch_size),
            built=built,
            ranks=given.ranks,
        )
        saver = Saver(
            timed.checkpoint,
            given.folder,
            trigger=due.get("checkpoint"),
            ranks=given.ranks,
            state=state,
            best=best,
        )
        measurements = Measurements(
            loader, stepper, stepping=given.stepping, events=events, evaluations=timed.evaluations
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
            non_finite=given.stepping.non_finite,
            events=events,
            ranks=given.ranks,
            interrupts=Interrupts(),
            log_is_due=due["log"],
            flush_is_due=timed.log.flush_trigger.bind(run.horizon),
        )
        return loop, state

    def _setup(
        self,
        loader: StepLoader,
        hyperparameters: Hyperparameters,
        built: BuiltWith,
        *,
        is_found: bool,
    ) -> dict[str, Any]:
        return describe_setup(
            loader,
            hyperparameters,
            loading=self.given.loading,
            computing=self.given.computing,
            stepping=self.given.stepping,
            step=self.given.step,
            timed=self.given.timed,
            device=self.given.ranks.device.type,
            finds_micro_batch_size=is_found,
            optimizer=built.values,
        )

    def _console(self, horizon: Horizon) -> ConsoleLogger | None:
        """Return what shows the run, on the first rank only."""
        asked = self.given.timed.log.console
        if not self.given.ranks.is_first or not (has_terminal() if asked is None else asked):
            return None
        return ConsoleLogger(horizon.max_duration)

    def _recorder(self, run: Run, loader: StepLoader, hyperparameters: Hyperparameters) -> Recorder:
        return Recorder(
            self.given.folder,
            self.given.timed.log.loggers,
            console=self._console(run.horizon),
            config=self.given.config(loader, hyperparameters),
            ranks=self.given.ranks,
            horizon=run.horizon,
            values=hyperparameters.values,
            skipped=run.skipped,
            logged=run.logged,
        )

    def _stepper(self, loader: StepLoader, *, is_found: bool) -> Stepper:
        step, spec = self.given.step, loader.spec
        stepper = Stepper(
            step,
            settings=self.given.stepping,
            ranks=self.given.ranks,
            # Where nobody changes them, the loader has counted what the data have.
            count_tokens=spec.count_tokens if spec.tokens_vary else None,
        )
        stepper.net = SafetyNet(
            step.model,
            spec,
            self.given.ranks,
            size=loader.micro_batch_size,
            is_found=is_found,
        )
        return stepper

    def _evaluators(self, loader: StepLoader, stepper: Stepper) -> list[Evaluator]:
        return [
            Evaluator(
                settings,
                self.given.step.model,
                loss=self.given.step.loss,
                loss_is_sum=self.given.step.loss_reduction == "sum",
                count=stepper.count,
                autocast=self.given.step.autocast,
                batch_size=loader.micro_batch_size or _EVALUATION_BATCH,
                collate_fn=self.given.loading.collate_fn,
                ranks=self.given.ranks,
                is_due=loader.prepared.bound_triggers[settings.name],
            )
            for settings in self.given.timed.evaluations
        ]
