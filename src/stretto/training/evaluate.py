"""Evaluation: the mean loss and metrics over a whole data set, each sample counted once."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stretto.batching import Tokens
from stretto.batching.metrics import check_monitored, measured_value, metrics_of
from stretto.checkpoint import checkpoint_path
from stretto.data import DataSpec, StepLoader, move_batch
from stretto.distributed.strategy import Strategy, reshard
from stretto.errors import TrainingError
from stretto.ordering import evenly
from stretto.run import Run
from stretto.runtime import TrainStep
from stretto.runtime.compiled import plain_naming, plain_state
from stretto.runtime.modes import kept_modes
from stretto.runtime.out_of_memory import attempt
from stretto.runtime.packing import count, count_or_none, number
from stretto.runtime.random_state import RandomState
from stretto.runtime.ranks import all_same, marks
from stretto.settings import Checkpointing, Loading
from stretto.training.callback import Events
from stretto.training.criterion import CriterionLoss
from stretto.training.logs.recorder import Recorder
from stretto.training.metrics import MetricObjects, check_predictable, is_object
from stretto.training.settings import Evaluation, LossFunction

BATCH_SIZE = 64
"""Samples of a forward pass in evaluation if there is no micro-batch size."""


@final
class Evaluator:
    """Evaluates the model on one data set; every rank takes its share of the samples.

    The loss and each function cost a forward pass of each batch; all metric objects share one.

    Args:
        settings: the data and the metrics.
        step: the training step: its model without DDP, because ranks may have different numbers of
            batches, its loss for an evaluation that has none, and its precision.
        run: the run.
        count: counts the units over which the loss is averaged; None: samples.
        strategy: how the model is spread over ranks.
    """

    def __init__(
        self,
        settings: Evaluation,
        step: TrainStep,
        run: Run,
        *,
        count: Callable[[Any], float] | None,
        strategy: Strategy,
    ) -> None:
        self.name, ranks = settings.name, strategy.ranks
        self._model = step.model
        loss = step.loss if settings.loss is None else settings.loss
        assert loss is not None, "checked when the trainer was built"
        self._loss = loss
        self._loss_is_sum = step.loss_reduction == "sum" and settings.loss is None
        self._metrics: dict[str, LossFunction] = {
            name: cast(LossFunction, metric)
            for name, metric in settings.metrics.items()
            if not is_object(metric)
        }
        self._objects = MetricObjects(settings.metrics, settings.predict, ranks)
        self._count: Callable[[Any], float] | None = count
        if isinstance(settings.loss, CriterionLoss):
            settings.loss.to(ranks.device)
            self._count = settings.loss.count if settings.loss.is_over_targets else None
        self._autocast = step.autocast
        self._strategy, self._ranks = strategy, ranks
        self._spec = DataSpec.of(settings.data)
        micro = run.loader.micro_batch_size
        self._budget: int | None = None
        """The token budget of its micro-batches; None: they have `_batch_size` samples."""
        if isinstance(micro, Tokens):
            if settings.batch_size is None and self._spec.lengths is not None:
                self._budget = micro
            longest = 1 if run.horizon.lengths is None else run.horizon.lengths.longest
            micro = min(BATCH_SIZE, micro // (1 if self._budget else longest))
        self._batch_size = settings.batch_size or micro or BATCH_SIZE
        are_samples = self._spec.is_map_style and not isinstance(self._spec.data, DataLoader)
        collate_fn = run.loading.collate_fn
        self._collate_fn = collate_fn if are_samples and self._spec.get_batch is None else None
        self._packed = run.loading.packed
        self._most = self._batch_size
        # Fail now, not at the first evaluation, if data cannot be read or predictions not made.
        self._loader(self._batch_size)
        if are_samples and self._objects and settings.predict is None:
            check_predictable(_first_batch(self._loader(1)))

    def measure(self) -> dict[str, float]:
        """Return the mean loss and metrics. Every rank must call it.

        The model is in evaluation mode; afterwards each module's mode and the random state are
        restored.
        """
        # Weights are equal on all ranks, but statistics of batch normalisation are not.
        self._ranks.broadcast(self._model.buffers())
        chance = RandomState.now()
        try:
            with kept_modes(self._model), torch.no_grad():
                self._model.eval()
                self._objects.reset()
                with self._autocast():
                    sums, seen = self._sums()
                values = self._objects.values()
        finally:
            chance.restore()
            reshard(self._model)
        loss, units, *metrics, samples, mark, square = self._ranks.agree(
            [*self._ranks.counted(sums), *marks(seen)]
        )
        if not all_same((mark, square), self._ranks.world_size):
            found = ", ".join(self._ranks.gather(str(seen)))
            why = f"the streams of the ranks end after {found} samples, so samples are missing"
            instead = "pass DataSpec(data, sharded=True), or give all ranks the same stream"
            raise TrainingError.cannot(f"evaluate on {self.name!r}", why=why, instead=instead)
        means = {"loss": loss / units if units else math.nan}
        for name, total in zip(self._metrics, metrics, strict=True):
            means[name] = total / samples if samples else math.nan
        return means | values

    def _sums(self) -> tuple[list[float], int]:
        """Return this rank's sums of loss, units, metrics and samples; and all samples read."""
        sums = [0.0] * (3 + len(self._metrics))
        loader = self._loader(self._batch_size)
        for step in loader:
            for micro in step.micro_batches:
                # All ranks must run the forward pass of a sharded model, even without samples.
                if self._strategy.is_sharded:
                    results, arguments = self._results(micro.batch, micro.num_samples)
                    if micro.weight:
                        self._update(arguments)
                elif micro.weight:
                    results = self._in_chunks(micro.batch, micro.num_samples)
                if micro.weight:
                    sums = _added(sums, results)
        return sums, loader.timer.sample

    def _update(self, arguments: Any) -> None:
        if self._ranks.is_loss_rank:
            self._objects.update(arguments)

    def _in_chunks(self, batch: Any, num_samples: int) -> list[float]:
        """Return the sums of a batch; split it if memory runs out, and remember the size."""
        if num_samples <= self._most:
            done = attempt(lambda: self._results(batch, num_samples))
            if done.result is not None:
                results, arguments = done.result
                self._update(arguments)
                return results
            self._most = num_samples // 2
            if not self._most:
                why = f"memory runs out with one sample ({done.out_of_memory})"
                instead = "use shorter samples, or precision='bf16'"
                raise TrainingError.cannot(f"evaluate on {self.name!r}", why=why, instead=instead)
        sums: list[float] | None = None
        start = 0
        for size in evenly(num_samples, most=self._most):
            part = self._spec.take_samples(batch, slice(start, start + size), num_samples)
            results = self._in_chunks(part, size)
            sums = results if sums is None else _added(sums, results)
            start += size
        assert sums is not None
        return sums

    def _results(self, batch: Any, num_samples: int) -> tuple[list[float], Sequence[Any]]:
        """Return the sums of a batch, and the arguments of `update` of metric objects."""
        batch = move_batch(batch, self._ranks.device)
        units = num_samples if self._count is None else self._count(batch)
        functions = {"loss": self._loss, **self._metrics}
        values = [_scalar(name, one(self._model, batch)) for name, one in functions.items()]
        arguments = self._objects.arguments(self._model, batch) if self._objects else ()
        loss, *means = torch.stack([value.to(self._ranks.device) for value in values]).tolist()
        # A mean over no units is nan; add nothing.
        total = 0.0 if not units else loss * (1 if self._loss_is_sum else units)
        return [total, units, *(mean * num_samples for mean in means), num_samples], arguments

    def _loader(self, batch_size: int) -> StepLoader:
        return StepLoader(
            self._spec,
            batch_size * self._ranks.dp_world_size,
            max_duration="1ep",
            micro_batch_size=self._budget or batch_size,
            loading=Loading(
                shuffle=False,
                last_batch="keep",
                collate_fn=self._collate_fn,
                packed=self._packed,
            ),
            ranks=self._ranks,
        )


def _first_batch(loader: StepLoader) -> Any:
    chance = RandomState.now()
    batch = next(step.micro_batches[0].batch for step in loader)
    chance.restore()
    return batch


def _added(one: list[float], other: list[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _scalar(name: str, value: Any) -> Tensor:
    tensor = torch.as_tensor(value).detach()
    if tensor.dim():
        why = f"the function returned a tensor of shape {list(tensor.shape)}"
        instead = "return a scalar, such as errors.mean()"
        raise TrainingError.cannot(f"average {name!r} over batches", why=why, instead=instead)
    return tensor


@final
class Evaluations:
    """All evaluations of a run: looks at them, and what follows from those that were due.

    Args:
        run: the run.
        evaluators: one for each evaluation.
        best: the best value so far.
        metric: the metric that the batch size follows, if there is one.
        weights: puts the weights for evaluation into the model.
        events: the callbacks.
        recorder: logs the metrics.
    """

    def __init__(
        self,
        run: Run,
        evaluators: Iterable[Evaluator],
        *,
        best: Best,
        metric: str | None,
        weights: TrainingWeights,
        events: Events,
        recorder: Recorder,
    ) -> None:
        self.best = best
        self._run, self._metric = run, metric
        self._evaluators = {one.name: one for one in evaluators}
        self._weights, self._events, self._recorder = weights, events, recorder
        self._measured_at: dict[str, int] = {}
        """The batch after which each was last measured because it was due."""

    def look(self) -> dict[str, float]:
        """Run all evaluations and log their metrics; nothing follows from them."""
        return {key: value for name in self._evaluators for key, value in self._look(name).items()}

    def _look(self, name: str) -> dict[str, float]:
        start, recorder = time.monotonic(), self._recorder
        with self._weights.evaluating(), self._events.evaluating():
            metrics = recorder.paused(self._evaluators[name].measure)
        seconds = round(time.monotonic() - start, 3)
        named = {f"{name}/{key}": value for key, value in metrics.items()}
        recorder.write({**self._run.clock(), **named})
        shown = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
        at, text = self._run.timer.timestamp, f"evaluation {name}: {shown}"
        recorder.files.event("evaluation", at, text, name=name, seconds=seconds)
        return named

    def measure(self, name: str) -> None:
        """Run an evaluation that is due; callbacks and the batch size learn of it.

        If the model is the best so far, a checkpoint is due. It is written after all evaluations,
        so that it contains all results.
        """
        run = self._run
        self._events.tell("on_evaluation_start", name)
        named = self._look(name)
        self._measured_at[name] = run.timer.batch
        self._events.tell("on_evaluation_end", name, named)
        followed = measured_value(self._metric, named)
        if followed is not None:
            run.loader.note_metric(followed)
        if self.best.is_beaten(named, run.timer.sample):
            run.due |= {"checkpoint"}

    def measure_rest(self) -> None:
        """Run those that were not due after the last batch."""
        for name in self._evaluators:
            if self._measured_at.get(name) != self._run.timer.batch:
                self.measure(name)

    def state_dict(self) -> dict[str, Any]:
        """Return when each was measured."""
        return {"at": {name: self._measured_at.get(name, -1) for name in self._evaluators}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._measured_at = dict(state["at"])


class BestEvaluation(NamedTuple):
    """The best evaluation of a run so far."""

    path: Path
    """Its checkpoint."""
    metric: str
    value: float


@final
class Best:
    """Tracks the best value of one metric.

    Args:
        settings: the metric, such as `validation/loss`, and whether lower or higher is better.
        evaluations: all evaluations of the run.

    Raises:
        TrainingError: no evaluation measures that metric.
    """

    def __init__(self, settings: Checkpointing | None, evaluations: Sequence[Evaluation]) -> None:
        self.monitor = settings.monitor if settings is not None else None
        self._sign = -1 if settings is not None and settings.mode == "max" else 1
        self.value = math.inf * self._sign
        self.sample: int | None = None
        """The position at which it was measured; None before the first."""
        # The position of the best one whose checkpoint is complete.
        self._kept: int | None = None
        if self.monitor is not None:
            check_monitored(self.monitor, metrics_of(evaluations))

    def is_beaten(self, metrics: Mapping[str, float], sample: int) -> bool:
        """Update with the metrics of an evaluation at `sample`; return whether it is the best."""
        value = measured_value(self.monitor, metrics)
        if value is None or not value * self._sign < self.value * self._sign:  # nan is never better
            return False
        self.value, self.sample = value, sample
        return True

    def confirm(self, sample: int) -> None:
        """Record that the checkpoint at `sample` is complete."""
        if sample == self.sample:
            self._kept = sample

    @property
    def unsaved(self) -> str | None:
        """The name of the best checkpoint if it is not complete; None if it is."""
        if self.sample is None or self.sample == self._kept:
            return None
        return checkpoint_path(Path(), self.sample).name

    def paths(self, folder: Path) -> list[Path]:
        """Return the checkpoints to keep: of the best, and of the best that is complete."""
        kept = {sample for sample in (self.sample, self._kept) if sample is not None}
        return [checkpoint_path(folder, sample) for sample in sorted(kept)]

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far."""
        value = None if math.isinf(self.value) else self.value
        return {"monitor": self.monitor, "value": value, "sample": self.sample, "kept": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value, if the metric is the same."""
        self.start_over()
        if state["monitor"] == self.monitor and state["value"] is not None:
            self.value, self.sample = number(state, "value"), count(state, "sample")
            self._kept = count_or_none(state, "kept")

    def start_over(self) -> None:
        """Reset the best value."""
        self.value, self.sample, self._kept = math.inf * self._sign, None, None


@final
class TrainingWeights:
    """Switches optimizers that have the methods `train()` and `eval()`.

    That is the protocol of `schedulefree` and of optimizers like it: a step needs one point, an
    evaluation another. `train()` is called here, so that a search for what fits may take steps.

    Args:
        model: the model.
        optimizers: those of the run.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers: list[Any] = [one for one in optimizers if is_switched(one)]
        """Those that are switched."""
        self.model = model
        self.train()

    def train(self) -> None:
        """Put the weights for training into the model."""
        self._are_in = True
        for one in self.optimizers:
            one.train()

    def eval(self) -> None:
        """Put the weights for evaluation into the model."""
        self._are_in = False
        for one in self.optimizers:
            one.eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the model the weights for evaluation within a `with` block."""
        if not (self.optimizers and self._are_in):
            self.eval()
            yield
            return
        self.train()  # a callback of the user's may have switched them before
        # There and back, `schedulefree` rounds twice: a look would change the training.
        kept = {name: one.detach().clone() for name, one in self.state_dict().items()}
        try:
            self.eval()
            yield
        finally:
            self.train()
            self.load_state_dict(kept)

    def for_inference(self) -> dict[str, Any]:
        """Return the state of the model with copies of the weights for evaluation."""
        with self.evaluating():
            return {
                name: one.detach().clone() if isinstance(one, Tensor) else one
                for name, one in plain_state(self.model).items()
            }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights that are in the model."""
        plain = plain_naming(self.model)
        return {plain(name): one for name, one in self.model.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put weights into the model."""
        with torch.no_grad():
            for name, one in self.state_dict().items():
                one.copy_(state[name])


def is_switched(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has `train()` and `eval()`, both without arguments."""
    try:
        for name in ("train", "eval"):
            inspect.signature(getattr(optimizer, name)).bind()
    except (AttributeError, TypeError, ValueError):
        return False
    return True
