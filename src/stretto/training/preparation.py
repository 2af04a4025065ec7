"""What a `Trainer` is given, and the run that is prepared from it, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from torch import nn
from torch.optim import Optimizer

from stretto.batching import BatchSizePolicy
from stretto.data import DataSpec, StepLoader
from stretto.optim import Hyperparameters
from stretto.optim.reading import read_schedules
from stretto.planning import Plan, Prepared, bind_run
from stretto.planning.plan import plan_prepared
from stretto.runtime import SupervisedStep, TrainStep
from stretto.settings import Computing, Loading, Stepping
from stretto.timing import Timestamp
from stretto.training.criterion import CriterionLoss
from stretto.training.distributed.agreement import (
    as_config,
    as_texts,
    check_agreement,
    describe_settings,
)
from stretto.training.distributed.ranks import Ranks
from stretto.training.evaluation.metrics import check_merging
from stretto.training.scaling import Timed
from stretto.training.settings import LossFunction
from stretto.training.stepping.fitting import (
    FoundMaximum,
    find_fitting,
    largest_share,
    with_found_maximum,
)
from stretto.training.stepping.measuring import keeps_gradients_apart

if TYPE_CHECKING:
    from stretto.memory import Answer

MicroBatchSize: TypeAlias = int | Literal["auto"] | None
"""None: the whole share of a rank; `"auto"`: what fits into memory."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a trainer was given."""

    step: TrainStep
    optimizer: Optimizer
    """The optimizers of the step as one."""
    timed: Timed
    """Whatever has times in it."""
    folder: Path | None
    ranks: Ranks
    """The processes of the run."""
    loading: Loading
    computing: Computing
    stepping: Stepping

    def spec(self, train_data: Any) -> DataSpec:
        """Return the training data, as callbacks change them."""
        spec = DataSpec.of(train_data)
        changes_tokens = any(callback.changes_tokens for callback in self.timed.callbacks)
        return replace(spec, tokens_vary=True) if changes_tokens else spec

    def compare_ranks(self, spec: DataSpec, micro_batch_size: MicroBatchSize) -> None:
        """Compare the settings of all ranks, before any of them can wait for another.

        Raises:
            TrainingError: they differ, or a metric cannot be computed over several ranks.
        """
        if self.ranks.world_size == 1:
            return
        settings = self._settings(
            spec,
            schedules=self.timed.schedules,
            max_duration=str(self.timed.max_duration),
            batch_size=self.timed.batch_size,
            micro_batch_size=micro_batch_size,
        )
        check_agreement(
            as_texts(settings, self.step.model, self.optimizer), self.ranks, call="Trainer()"
        )
        for one in self.timed.evaluations:
            check_merging(one.metrics)

    def find_maximum(self, spec: DataSpec) -> tuple[BatchSizePolicy, FoundMaximum | None]:
        """Return the policy, and the largest batch size if it had to be found."""
        return with_found_maximum(
            self.timed.batch_size,
            spec,
            self.timed.max_duration,
            partial(find_fitting, self.step, ranks=self.ranks),
            ranks=self.ranks,
            measures=self._keeps_gradients_apart,
            collate_fn=self.loading.collate_fn,
        )

    def bound(self, spec: DataSpec, policy: BatchSizePolicy, *, known: Prepared | None) -> Prepared:
        """Return the run with all that has times bound to it."""
        return bind_run(
            spec.horizon(self.timed.max_duration, self.loading.last_batch),
            policy,
            schedules=read_schedules(self.optimizer, self.timed.schedules),
            triggers=self.timed.triggers,
            rule=self.stepping.rule,
            known=known,
        )

    def loader(self, spec: DataSpec, run: Prepared, micro_batch_size: MicroBatchSize) -> StepLoader:
        """Return the loader of this rank's share of every batch; `"auto"` is found later."""
        settings = {field.name: getattr(self.loading, field.name) for field in fields(Loading)}
        del settings["last_batch"]
        return StepLoader(
            spec,
            run,
            micro_batch_size=None if micro_batch_size == "auto" else micro_batch_size,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            **settings,
        )

    def plan(
        self,
        loader: StepLoader,
        hyperparameters: Hyperparameters,
        *,
        resume_at: Timestamp | None = None,
    ) -> Plan | None:
        """Return the run as it will be, and refuse every stage that cannot be; None if unknown.

        Stages that are over at `resume_at` are not checked.
        """
        if loader.prepared.sizes is None:
            return None
        return plan_prepared(
            loader.prepared,
            world_size=loader.world_size,
            micro_batch_size=loader.micro_batch_size,
            values=hyperparameters.bound,
            base=hyperparameters.base,
            tracks_tokens=loader.tracks_tokens,
            resume_at=resume_at,
        )

    def find_micro_batch_size(self, loader: StepLoader, plan: Plan | None) -> Answer:
        """Return how much of a batch a rank can take at once."""
        return find_fitting(
            self.step,
            ranks=self.ranks,
            loader=loader,
            most=largest_share(plan, loader),
            accumulates=True,
            measures_noise=self._keeps_gradients_apart(loader.reads),
        )

    def _keeps_gradients_apart(self, reads: frozenset[str]) -> bool:
        return keeps_gradients_apart(reads, callbacks=list(map(type, self.timed.callbacks)))

    def _settings(
        self, spec: DataSpec, *, schedules: Mapping[str, Any], **given: Any
    ) -> dict[str, Any]:
        """Return the settings of the run by name."""
        return describe_settings(
            given=given | {f"schedules.{name}": one for name, one in schedules.items()},
            spec=spec,
            optimizer=self.optimizer,
            step=self.step,
            loading=self.loading,
            computing=self.computing,
            stepping=self.stepping,
            evaluations=self.timed.evaluations,
            checkpoint=self.timed.checkpoint,
            log=self.timed.log,
            callbacks=self.timed.callbacks,
            has_folder=self.folder is not None,
            device=self.ranks.device.type,
        )

    def config(self, loader: StepLoader, hyperparameters: Hyperparameters) -> dict[str, Any]:
        """Return the settings of the run as plain values, for loggers."""
        config = self.timed.log.config
        if not self.timed.log.loggers:
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
            config = as_config(settings, self.step.model, self.timed.callbacks)
        return {**config, "folder": None if self.folder is None else str(self.folder)}


def make_step(
    model: nn.Module | TrainStep,
    optimizer: Optimizer | None,
    loss: LossFunction | None,
    *,
    computing: Computing,
    loss_reduction: Literal["mean", "sum"],
    ranks: Ranks,
) -> TrainStep:
    """Return the step of a run, its model on the device of this rank."""
    if isinstance(model, TrainStep):
        model.model = ranks.place(model.model)
        model.transforms = ()  # those of another run
        return model
    assert optimizer is not None, "checked"
    assert loss is not None, "checked"
    if isinstance(loss, CriterionLoss):
        loss.to(ranks.device)
    return SupervisedStep(
        ranks.place(model),
        optimizer,
        loss,
        precision=computing.precision,
        clip_norm=computing.clip_norm,
        loss_reduction=loss_reduction,
        compile=computing.compile,
        device=ranks.device.type,
    )
