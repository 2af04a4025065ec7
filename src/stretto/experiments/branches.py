"""Branches: short runs from a checkpoint of a run file's run, each at its own batch size."""

from __future__ import annotations

import copy
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, final

from torch import nn
from torch.optim import Optimizer

from stretto.batching import LearningRateRule, SquareRootRule
from stretto.checkpoint import open_checkpoint, unpack_optimizer
from stretto.config.building import parts
from stretto.config.building.data import make_spec
from stretto.config.building.hyperparameters import base_values
from stretto.config.building.times_and_sizes import build_run
from stretto.config.building.training import check_complete, seed_everything
from stretto.config.run import RunConfig
from stretto.data import Step
from stretto.data.source import is_shuffled
from stretto.errors import CheckpointError, ConfigError, TrainingError
from stretto.experiments.critical_batch_size import Branch
from stretto.planning import prepare
from stretto.timing import Horizon, Time, Timer, Timestamp, TimeUnit
from stretto.training import Callback, Logging, Run, Trainer
from stretto.training.callback import EVENTS, overrides
from stretto.training.checkpointing.callback_state import GROUP, restore_states
from stretto.training.checkpointing.resuming import FOLDER, newest_of
from stretto.training.checkpointing.state import restore_step, stored_tensors

ORDER_SEEDS = 1_000_003
"""Added to the seeds of branches, so that their orders of samples are not that of the run."""
_IN_STEPS = ("on_fit_start", "on_batch_start", "transform_batch", "on_gradient", "on_batch_end")
"""The events in which a callback can change how the model is trained."""


@final
class BranchPoint:
    """A checkpoint of a run, from which branches start.

    A branch starts with the weights, optimizer state and loss scale of the checkpoint. Its batch
    size is constant. Its learning rate is that of the last batch before the checkpoint, scaled by
    the rule for its size. It has no schedules and no loggers. It keeps callbacks that take part in
    a step (`on_fit_start`, `on_batch_start`, `transform_batch`, `on_gradient` or `on_batch_end`),
    unless they set learning rates, or listen to `on_noise` or `on_evaluation_start`. The clock of
    callbacks stays at the checkpoint. Everything else is as in the run file.

    Args:
        config: the run file.
        checkpoint: a checkpoint of that run, or the run folder, to use its newest intact one.
        rule: how the learning rate follows the size; None: the file's `learning_rate_rule`, or the
            square root.

    Raises:
        ConfigError: the run file cannot be built.
        CheckpointError: the checkpoint is damaged, or not from a run.
    """

    def __init__(
        self,
        config: RunConfig,
        checkpoint: Path,
        *,
        rule: LearningRateRule | None = None,
    ) -> None:
        check_complete(config)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError.cannot(
                "branch off a checkpoint on several ranks",
                why="branches are short runs of one process",
                instead="start it without torchrun",
            )
        if config.step is not None:
            raise ConfigError.cannot(
                "branch off a checkpoint",
                why="the run file has a training step of its own",
                instead="write step=null, if the model can be trained without it",
                where=config.source.where(("step",)),
            )
        is_folder = (checkpoint / FOLDER).is_dir()
        self.path = newest_of(checkpoint) if is_folder else checkpoint
        self._config = config
        self._spec = make_spec(config)
        self._run = build_run(config, self._spec)
        self._horizon = prepare(self._run.horizon, self._run.policy).horizon
        self._reader = open_checkpoint(self.path, verify=not is_folder)
        with _reading(self.path, "its records are not those of this run"):
            records = self._reader.records["loader"]
            self.timestamp = Timestamp.from_state(records["clock"])
            """The clock of the checkpoint."""
            self.size: int = records["size"] or 0
            """The size of the last batch before it, to which the learning rate belongs."""
        if not self.size:
            raise _no_branch(self.path, "no batch was trained before it")
        self._rule = rule or self._run.rule or SquareRootRule(self.size)

    def samples(self, over: Time) -> int:
        """Convert `over` to samples; batches have the current batch size.

        Raises:
            ConversionError: a fact is missing.
        """
        if over.unit is TimeUnit.BATCH:
            return int(over.amount) * self.size
        return int(self._horizon.convert(over, "sp"))

    def check_seeds(self, count: int) -> None:
        """Refuse several seeds if the data are not shuffled.

        Raises:
            TrainingError: the data are map-style and not shuffled.
        """
        shuffle = parts.make_loading(self._config).shuffle
        if count > 1 and self._spec.is_map_style and not is_shuffled(self._spec, asked=shuffle):
            raise TrainingError.cannot(
                f"compare branches in {count} orders of the samples",
                why="the data are not shuffled, so all branches would be the same",
                instead="write --seeds 1, or loading={shuffle: true} behind the run file",
            )

    def branch(self, size: int, *, seed: int, samples: int) -> Branch:
        """Train a branch with batches of `size` for `samples`, and return the result.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer.
            StrettoError: the run file does not allow it.
            KeyboardInterrupt: SIGINT was received.
            SystemExit: SIGTERM was received.
        """
        loss = _BranchLoss(samples)
        trainer = self._trainer(size, loss, seed=seed, samples=samples)
        trainer.fit()
        if trainer.stop_reason is not None:
            raise TrainingError.cannot(
                "compare branches",
                why=f"a callback has stopped one: {trainer.stop_reason}",
                instead="write callbacks=[] behind the run file, or those that do not stop it",
            )
        rate = float(trainer.optimizer.param_groups[0]["lr"])
        return Branch(size, seed, trainer.timer.batch, rate, loss.value)

    def _trainer(self, size: int, loss: Callback, *, seed: int, samples: int) -> Trainer:
        """The trainer of a branch."""
        config, every = self._config, f"{samples}sp"
        seed_everything(config.seed + seed)
        model = parts.make_model(config)
        optimizer = parts.make_optimizer(config, model)
        self._restore(model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * (self._rule(size) / self._rule(self.size))
        evaluations = [
            parts.make_evaluation(config, one, self._run) for one in config.evaluations[:1]
        ]
        loading = parts.make_loading(config)
        stepping = parts.make_stepping(config, self._run)
        trainer = Trainer(
            model,
            # The previous branch may have exhausted an iterable.
            self._spec if self._spec.is_map_style else make_spec(config),
            optimizer=optimizer,
            loss=parts.make_loss(config, model),
            max_duration=every,
            batch_size=size,
            micro_batch_size=config.micro_batch_size,
            loading=replace(loading, seed=ORDER_SEEDS + seed, last_batch="carry"),
            # If a size diverges, its loss shows it, and the other branches continue.
            stepping=replace(stepping, learning_rate_rule=None, non_finite="ignore"),
            evaluate=[replace(one, every=every) for one in evaluations],
            log=Logging("1ba", console=False),
            callbacks=[*self._callbacks(), loss],
        )
        restore_step(trainer.step, self._reader)
        return trainer

    def decay(self, branch: Branch) -> float:
        """Return the learning rate at the checkpoint as a fraction of the base value."""
        in_force = branch.learning_rate * self._rule(self.size) / self._rule(branch.size)
        base = base_values(self._config).get("lr", 0.0)
        return in_force / base if base else 1.0

    def _callbacks(self) -> list[Callback]:
        """Return callbacks that change the training, with their state at the checkpoint."""
        made = [one for one in parts.make_callbacks(self._config) if _changes_training(one)]
        with _reading(self.path, "a callback cannot go on from it"):
            stored = stored_tensors(self._reader, GROUP)
            restore_states(made, self._reader.records["callbacks"], stored)
        return [frozen(one, self.timestamp, self._horizon) for one in made]

    def _restore(self, model: nn.Module, optimizer: Optimizer) -> None:
        reader = self._reader
        with _reading(self.path, "it is another model's"):
            weights, moments = (
                {name: reader.tensor(group, name) for name in reader.names(group)}
                for group in ("model", "optimizer")
            )
            model.load_state_dict(weights)
            unpack_optimizer(optimizer, moments, reader.records["optimizer"])
        if not any(group["lr"] for group in optimizer.param_groups):
            raise _no_branch(self.path, "its learning rate is 0")


def frozen(callback: Callback, timestamp: Timestamp, horizon: Horizon) -> Callback:
    """Return a callback that runs `callback` with a frozen clock.

    For example, a sequence length warm-up keeps the length it has at `timestamp`. With the clock of
    a short branch, it would start again.

    >>> from stretto.training.algorithms import SequenceLengthWarmup
    >>> warmup = SequenceLengthWarmup(8, 64, over="50%")
    >>> still = frozen(warmup, Timestamp(sample=250), Horizon("1000sp"))
    >>> still.changes_tokens, overrides(still, "transform_batch"), overrides(still, "on_log")
    (True, True, False)

    Args:
        callback: the callback.
        timestamp: the time that it sees.
        horizon: the horizon of the run.
    """

    def listener(name: str) -> Callable[..., Any]:
        method = getattr(callback, name)

        def listen(_: Callback, run: Run, *details: Any) -> Any:
            seen = copy.copy(run)
            seen.horizon, seen.timer = horizon, Timer.at(timestamp, horizon)
            at = (replace(d, timestamp=timestamp) if isinstance(d, Step) else d for d in details)
            result = method(seen, *at)
            run.stop_reason = seen.stop_reason
            return result

        return listen

    # Only overridden events: for example, noise is measured only if a callback listens.
    listeners = {name: listener(name) for name in EVENTS if overrides(callback, name)}
    body = {**listeners, "changes_tokens": callback.changes_tokens}
    return cast(Callback, type(type(callback).__name__, (Callback,), body)())


def _changes_training(callback: Callback) -> bool:
    return (
        any(overrides(callback, name) for name in _IN_STEPS)
        and not overrides(callback, "on_noise")
        and not overrides(callback, "on_evaluation_start")  # measures other weights
        and not callback.sets_learning_rate
    )


class _BranchLoss(Callback):
    """Records the final loss: of the evaluation, or of the last quarter of the training.

    The quarter has the same samples for every batch size, so a batch that starts before it counts
    in part. Batches are weighted by their samples or tokens, as their loss is.

    Args:
        samples: the samples of the branch.
    """

    def __init__(self, samples: int) -> None:
        self._quarter = 0.75 * samples
        self._before = 0
        self._sum = self._weight = 0.0
        self._evaluated: float | None = None

    @property
    def value(self) -> float:
        """The final loss; nan if there is none."""
        if self._evaluated is not None:
            return self._evaluated
        return self._sum / self._weight if self._weight else math.nan

    def on_log(self, run: Run, record: Mapping[str, float]) -> None:
        """Add the training loss of a batch."""
        end = run.timer.sample
        part = (end - max(self._before, self._quarter)) / (end - self._before)
        if part > 0:
            weight = part * run.logged_units
            self._sum += weight * float(record["loss"])
            self._weight += weight
        self._before = end

    def on_evaluation_end(self, run: Run, name: str, metrics: Mapping[str, float]) -> None:
        """Record the loss of the evaluation."""
        del run, name
        self._evaluated = float(metrics["loss"])


@contextmanager
def _reading(path: Path, why: str) -> Iterator[None]:
    """Explain errors of a checkpoint from another run."""
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        shown = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise _no_branch(path, f"{why} ({shown})") from error


def _no_branch(path: Path, why: str) -> CheckpointError:
    return CheckpointError.cannot(
        f"branch off {path}",
        why=why,
        instead="name a checkpoint of the run that the run file describes",
    )
