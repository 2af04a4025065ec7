"""The settings of a `Trainer` that hold objects, and how a run is stretched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, final

from torch import Tensor, nn

from stretto.batching import BatchSizePolicy, checked_size
from stretto.data import DataSpec
from stretto.data.spec import is_one_shot
from stretto.errors import TrainingError
from stretto.schedules import as_schedule
from stretto.settings import Checkpointing
from stretto.timing import Time, TimeLike, Trigger, parse_trigger
from stretto.timing.grammar import exact
from stretto.timing.time import Number, rounded
from stretto.training.callback import Callback
from stretto.training.evaluation.metrics import Metric, Predict, check_metric, is_object
from stretto.training.logs.loggers import Logger

LossFunction: TypeAlias = Callable[[nn.Module, Any], Tensor]
"""`loss(model, batch)`: a scalar, the mean over the batch (see `Stepping.loss_reduction`)."""


@final
@dataclass(frozen=True, slots=True)
class Evaluation:
    """Data that the model is measured on now and then, and always at the end of the run.

    A metric is either a function like the loss, `metric(model, batch)`, whose mean over all samples
    is logged; or an object with `update`, `compute` and `reset`, such as a metric of torchmetrics,
    which gets all batches and computes one value. A function costs a forward pass of each batch;
    all objects share the pass of `predict`.

    >>> Evaluation([1.0, 2.0], every="10%", name="test").trigger
    Every('0.1dur')

    Raises:
        TrainingError: the data can be read only once, a metric is none or is named `loss`.
        BatchSizeError: the batch size is not at least 1.
    """

    data: Any
    """A data set, a `DataLoader`, or an iterable of batches that can be read many times. A list is
    one of samples; for a list of batches pass `DataLoader(batches, batch_size=None)`."""
    every: TimeLike | Trigger = "1ep"
    metrics: Mapping[str, LossFunction | Metric] = field(default_factory=dict)
    """By name. An object that computes a dict is logged as `name/key` for each of its keys."""
    batch_size: int | None = None
    """Samples in one forward pass on one rank; None: the training micro-batch."""
    name: str = "validation"
    loss: LossFunction | None = None
    """A mean over what the training loss is a mean over; None: the training loss."""
    predict: Predict | None = None
    """`predict(model, batch)`: a tuple of the arguments of `update` of metrics that are objects.
    None: `(model(inputs), targets)` of a batch `(inputs, targets)`, and
    `(model(**batch).logits, batch["labels"])` of a mapping; if the labels are the inputs, logits
    and labels are those of a causal language model, moved by one place."""

    def __post_init__(self) -> None:
        data = DataSpec.of(self.data).data
        if is_one_shot(data):
            raise TrainingError.cannot(
                f"evaluate on data of type {type(data).__name__}",
                why="it can be read only once",
                instead="pass a data set, or DataLoader(batches, batch_size=None)",
            )
        if "loss" in self.metrics:
            raise TrainingError.bad("metric", "loss", "the loss has that name", "choose another")
        # A collection of torchmetrics is a mapping as well.
        object.__setattr__(self, "metrics", dict(self.metrics))
        for name, metric in self.metrics.items():
            check_metric(name, metric)
        if self.predict is not None and not any(map(is_object, self.metrics.values())):
            why = "no metric is an object with update, compute and reset"
            raise TrainingError.bad("predict", self.predict, why, "leave it out")
        if self.batch_size is not None:
            checked_size(self.batch_size, "a batch size")

    @property
    def trigger(self) -> Trigger:
        """When it is due."""
        return parse_trigger(self.every)


@final
@dataclass(frozen=True, slots=True)
class Logging:
    """When metrics are logged, when files are flushed, and where metrics go besides the folder.

    >>> Logging("4096sp").trigger
    Every('4096sp')

    Raises:
        TrainingError: something in `loggers` is not a logger.
    """

    every: TimeLike | Trigger = "10ba"
    flush: TimeLike | Trigger = "30s"
    loggers: Sequence[Logger] = ()
    """Objects with the methods of `Logger`, such as `TensorBoardLogger()`."""
    console: bool | None = None
    """Whether the console shows the progress of the run: a bar on a terminal, lines in a pipe.
    None: only if standard output is a terminal."""
    config: Mapping[str, Any] | None = None
    """What loggers get as the settings of the run; None: a description of what the trainer was
    built with."""

    def __post_init__(self) -> None:
        for one in self.loggers:
            methods = [callable(getattr(one, name, None)) for name in ("start", "log", "close")]
            if isinstance(one, type) or not all(methods):
                raise TrainingError.bad(
                    "loggers", one, "it is not a logger", "pass objects such as TensorBoardLogger()"
                )

    @property
    def trigger(self) -> Trigger:
        """When a line is due."""
        return parse_trigger(self.every)

    @property
    def flush_trigger(self) -> Trigger:
        """When what was logged must be on the disk."""
        return parse_trigger(self.flush)


@final
class Timed(NamedTuple):
    """What a `Trainer` is given that has times in it."""

    max_duration: TimeLike
    batch_size: BatchSizePolicy
    schedules: Mapping[str, Any]
    evaluations: Sequence[Evaluation]
    checkpoint: Checkpointing | None
    log: Logging
    callbacks: Sequence[Callback]

    def scaled(self, ratio: Number) -> Timed:
        """Return all of it for a run `ratio` times as long.

        Fractions of the run stay, since they stretch by themselves. Batches, samples and tokens
        come in whole numbers and are rounded up.

        Raises:
            TrainingError: the ratio is not above 0.
            TimeError: the ratio is not a finite number.
        """
        factor = exact(ratio)
        if factor <= 0:
            raise TrainingError.bad(
                "scale_schedule", ratio, "the run has no length", "write a ratio above 0"
            )

        def stretched(schedule: Any) -> Any:
            if isinstance(schedule, Sequence) and not isinstance(schedule, str):
                return [stretched(one) for one in schedule]
            return as_schedule(schedule).scaled(factor)

        run, log, checkpoint = Time(self.max_duration), self.log, self.checkpoint
        return Timed(
            rounded(run.amount * factor, run.unit),
            self.batch_size.scaled(factor),
            {name: stretched(schedule) for name, schedule in self.schedules.items()},
            [replace(one, every=one.trigger.scaled(factor)) for one in self.evaluations],
            checkpoint and replace(checkpoint, every=checkpoint.trigger.scaled(factor)),
            replace(
                log,
                every=log.trigger.scaled(factor),
                flush=log.flush_trigger.scaled(factor),
            ),
            [callback.scaled(factor) for callback in self.callbacks],
        )

    @property
    def triggers(self) -> dict[str, Trigger]:
        """What happens now and then, by the name that it has in a plan."""
        found = {one.name: one.trigger for one in self.evaluations} | {"log": self.log.trigger}
        if self.checkpoint is not None:
            found["checkpoint"] = self.checkpoint.trigger
        return found
