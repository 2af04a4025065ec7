"""Short runs that branch off a checkpoint of the run that a file describes, at other sizes."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.batching import NO_SIGNALS, LearningRateRule, SquareRootRule
from stretto.checkpoint import CheckpointReader, open_checkpoint, unpack_optimizer
from stretto.config.data import known_sizes, make_spec
from stretto.config.hyperparameters import base_values
from stretto.config.parts import (
    make_callbacks,
    make_evaluation,
    make_loading,
    make_loss,
    make_optimizer,
    make_stepping,
    wrong_kind,
)
from stretto.config.plans import Run, build_run
from stretto.config.run import RunConfig
from stretto.config.source import NO_SOURCE, Source
from stretto.config.targets import call_target
from stretto.config.training import check_complete, seed_everything
from stretto.data import DataSpec
from stretto.data.source import is_shuffled
from stretto.data.state import policy_state
from stretto.errors import (
    CheckpointError,
    ConfigError,
    ConversionError,
    StrettoError,
    TrainingError,
    cannot,
)
from stretto.planning import resolve_horizon
from stretto.timing import Time, Timestamp, TimeUnit
from stretto.training import Callback, Evaluation, Logging, Trainer
from stretto.training.callback_state import GROUP, restore_states
from stretto.training.critical import LEAST_STEPS, Branch
from stretto.training.held import held
from stretto.training.interrupt import Interrupts, end_if
from stretto.training.resuming import FOLDER, newest_of
from stretto.training.state import stored_tensors

ORDER_SEEDS = 1_000_003
"""Branches see samples in orders of their own, from seeds that no run is likely to have."""


@final
@dataclass(frozen=True, slots=True)
class Trunk:
    """A run at a checkpoint, which short runs branch off.

    A branch has the weights and the optimizer of the checkpoint, a constant batch size, and the
    learning rate that was in force, times what the rule says for its size. Time stands still for
    the callbacks that change how the model is trained: they go on doing what they did there. All
    else is as the run file says, but a branch has no schedules, no loggers and no other callbacks.
    """

    config: RunConfig
    source: Source
    spec: DataSpec
    run: Run
    reader: CheckpointReader
    path: Path
    rule: LearningRateRule
    timestamp: Timestamp
    """Where the checkpoint stands."""
    size: int
    """The size of the batch before it, which the learning rate in force there belongs to."""

    @classmethod
    def at(
        cls,
        config: RunConfig,
        checkpoint: Path,
        *,
        source: Source = NO_SOURCE,
        rule: LearningRateRule | None = None,
    ) -> Trunk:
        """Return the run of a file at a checkpoint.

        Args:
            config: the run file.
            checkpoint: a checkpoint of that run, or its folder, whose newest whole one is meant.
            source: where the file's values were written, for messages.
            rule: how the learning rate goes with the size; left out, the file's
                `learning_rate_rule`, or the square root.

        Raises:
            ConfigError: something in the file cannot be built.
            CheckpointError: the checkpoint is damaged, or not one of a run.
        """
        check_complete(config, source)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                cannot(
                    "branch off a checkpoint on several ranks",
                    why="branches are short runs of one process",
                    instead="start it without torchrun",
                )
            )
        is_folder = (checkpoint / FOLDER).is_dir()
        if is_folder:
            checkpoint = newest_of(checkpoint)
        spec = make_spec(config, source=source)
        run = build_run(config, known_sizes(spec), source=source)
        reader = open_checkpoint(checkpoint, verify=not is_folder)
        try:
            records = reader.records["loader"]
            timestamp = Timestamp.from_state(records["clock"])
            size = records.get("size") or _next_size(run, timestamp, records)
            rule = rule or run.rule or SquareRootRule(size)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _no_branch(
                checkpoint, f"its records are not those of this run ({error})"
            ) from error
        return cls(config, source, spec, run, reader, checkpoint, rule, timestamp, size)

    def samples(self, over: Time) -> int:
        """Return how many samples `over` is, on this run; batches are of the size in force.

        Raises:
            ConversionError: a fact is missing.
        """
        if over.unit is TimeUnit.BATCH:
            return int(over.amount) * self.size
        horizon = resolve_horizon(self.run.horizon, self.run.policy)
        try:
            return int(horizon.convert(over, "sp"))
        except ConversionError as error:
            raise ConversionError(
                cannot(
                    f"tell how many samples branches of '{over}' are",
                    why=str(error).partition(": ")[2].rpartition("; ")[0] or str(error),
                    instead="write them in samples: --over 10000sp",
                )
            ) from error

    def check_orders(self, count: int) -> None:
        """Refuse branches in several orders where the data have only one.

        Raises:
            TrainingError: they are map-style and not shuffled.
        """
        if count == 1 or not self.spec.is_map_style:
            return
        if not is_shuffled(self.spec, asked=make_loading(self.config, self.source).shuffle):
            raise TrainingError(
                cannot(
                    f"compare branches in {count} orders of the samples",
                    why="they are not shuffled, so all would be the same",
                    instead="write --seeds 1, or loading={shuffle: true} behind the run file",
                )
            )

    def branch(self, size: int, *, seed: int, samples: int) -> Branch:
        """Train a branch at batches of `size` over `samples`, and return what came out.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer.
            StrettoError: the run file does not allow it.
            SystemExit: a signal came, which ends all branches.
        """
        with Interrupts() as interrupts:
            trainer, losses = self._trainer(size, seed=seed, samples=samples)
            end_if(interrupts.received)
            trainer.fit(on_signal="return")
            end_if(interrupts.received)
        _check_not_stopped(trainer)
        rate = float(trainer.optimizer.param_groups[0]["lr"])
        return Branch(size, seed, trainer.timer.batch, rate, losses.loss)

    def _trainer(self, size: int, *, seed: int, samples: int) -> tuple[Trainer, _Losses]:
        """A branch that is about to begin, and what will know its loss."""
        config, source = self.config, self.source
        seed_everything(config.seed + seed)
        assert config.model is not None, "checked when the trunk was made"
        model = call_target(config.model, source=source, path=("model",))
        if not isinstance(model, nn.Module):
            raise wrong_kind("model", config.model.target, model, "a torch.nn.Module", source)
        optimizer = make_optimizer(config, model, source)
        self._restore(model, optimizer)
        if not any(group["lr"] for group in optimizer.param_groups):
            raise _no_branch(self.path, "the learning rate in force there is 0")
        factor = self.rule(size) / self.rule(self.size)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        losses, callbacks = _Losses(samples), self._callbacks()
        every = f"{samples}sp"
        # What can be iterated goes on where the branch before has stopped, or has nothing left.
        is_shared = self.spec.is_map_style
        trainer = Trainer(
            model,
            self.spec if is_shared else make_spec(config, source=source),
            optimizer=optimizer,
            loss=make_loss(config, model, source),
            max_duration=every,
            batch_size=size,
            micro_batch_size=config.micro_batch_size,
            loading=replace(
                make_loading(config, source), seed=ORDER_SEEDS + seed, last_batch="carry"
            ),
            # A size that diverges is told by its loss, and the others go on.
            stepping=replace(
                make_stepping(config, self.run, source),
                learning_rate_rule=None,
                non_finite="ignore",
            ),
            evaluate=[replace(one, every=every) for one in self._evaluations()],
            log=Logging("1ba", console=False),
            callbacks=[*callbacks, losses],
        )
        if trainer.scaler is not None and self.reader.records["scaler"] is not None:
            trainer.scaler.load_state_dict(self.reader.records["scaler"])
        return trainer, losses

    def decay(self, branch: Branch) -> float:
        """Return what is left of the optimizer's learning rate where `branch` leaves the run."""
        in_force = branch.learning_rate * self.rule(self.size) / self.rule(branch.size)
        base = base_values(self.config, source=self.source).get("lr", 0.0)
        return in_force / base if base else 1.0

    def _evaluations(self) -> Sequence[Evaluation]:
        """The first evaluation of the file, whose loss is what branches are compared by."""
        sections = self.config.evaluations[:1]
        return [make_evaluation(self.config, one, self.run, self.source) for one in sections]

    def _callbacks(self) -> Sequence[Callback]:
        """Those of the file that change how the model is trained, as they stood there."""
        made = [one for one in make_callbacks(self.config, self.source) if one.in_branches]
        try:
            stored = stored_tensors(self.reader, GROUP)
            restore_states(made, self.reader.records["callbacks"], stored)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _no_branch(self.path, f"a callback cannot go on from it ({error})") from error
        horizon = resolve_horizon(self.run.horizon, self.run.policy)
        return [held(one, self.timestamp, horizon) for one in made]

    def _restore(self, model: nn.Module, optimizer: Optimizer) -> None:
        reader = self.reader
        try:
            groups = {name: self._tensors(name) for name in ("model", "optimizer")}
            model.load_state_dict(groups["model"])
            unpack_optimizer(optimizer, groups["optimizer"], reader.records["optimizer"])
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, StrettoError):
                raise
            why = f"it is another model's ({textwrap.shorten(str(error), 300, placeholder=' ...')})"
            raise _no_branch(self.path, why) from error

    def _tensors(self, group: str) -> dict[str, Tensor]:
        return {name: self.reader.tensor(group, name) for name in self.reader.names(group)}


class _Losses(Callback):
    """Keeps the loss at the end: that of the evaluation, or of the last quarter of the training.

    The quarter is the same samples whatever the batch size is: of a batch that it begins inside,
    its part counts. Each batch weighs what its loss is a mean of, so tokens count as tokens.

    Args:
        samples: how many there are.
    """

    def __init__(self, samples: int) -> None:
        self._quarter = 0.75 * samples
        self._before = 0
        self._sum = self._weight = 0.0
        self._evaluated: float | None = None

    @property
    def loss(self) -> float:
        """The loss, once the branch is over; nan if there is none."""
        if self._evaluated is not None:
            return self._evaluated
        return self._sum / self._weight if self._weight else math.nan

    def on_log(self, trainer: Trainer, record: Mapping[str, float]) -> None:
        """Take the training loss of a batch."""
        end = trainer.timer.sample
        part = (end - max(self._before, self._quarter)) / (end - self._before)
        if part > 0:
            weight = part * trainer.logged_units
            self._sum += weight * float(record["loss"])
            self._weight += weight
        self._before = end

    def on_evaluation_end(self, trainer: Trainer, name: str, metrics: Mapping[str, float]) -> None:
        """Take the loss of the evaluation."""
        del trainer, name
        self._evaluated = float(metrics["loss"])


def _next_size(run: Run, timestamp: Timestamp, records: Mapping[str, Any]) -> int:
    """The size that is decided at a checkpoint: for one before the first batch."""
    bound = run.policy.bind(run.horizon.with_batch_sizes(None))
    state = policy_state(run.policy, bound, records["policy"])
    return bound.decide(timestamp, bound.start() if state is None else state, NO_SIGNALS)[0]


def _check_not_stopped(trainer: Trainer) -> None:
    """Refuse a branch that has not seen its samples.

    Raises:
        TrainingError: a callback has ended it.
    """
    if trainer.stop_reason is not None:
        raise TrainingError(
            cannot(
                "compare branches",
                why=f"a callback has stopped one: {trainer.stop_reason}",
                instead="write callbacks=[] behind the run file, or in_branches = False in its "
                "class",
            )
        )


def _no_branch(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        cannot(
            f"branch off {path}",
            why=why,
            instead="name a checkpoint of the run that the run file describes",
        )
    )


def default_sizes(size: int, samples: int) -> list[int]:
    """Return sizes around `size` that branches of so many samples can tell about.

    Half of it, itself, and its doublings up to 16 times.

    >>> default_sizes(16, 1024)
    [8, 16, 32, 64, 128, 256]

    Raises:
        TrainingError: there are fewer than two.
    """
    wanted = sorted({max(1, size // 2), *(size * 2**power for power in range(5))})
    if samples < LEAST_STEPS * wanted[1]:
        raise TrainingError(
            cannot(
                f"compare batches of {wanted[0]:,} and {wanted[1]:,} over {samples:,} samples",
                why=f"that is less than {LEAST_STEPS} steps",
                instead=f"write --over {LEAST_STEPS * wanted[1]}sp or more, or smaller --sizes",
            )
        )
    return [one for one in wanted if one * LEAST_STEPS <= samples]
