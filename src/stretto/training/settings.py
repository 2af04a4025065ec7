"""The settings of a `Trainer` that hold objects, and how a run is stretched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

from torch import Tensor, nn

from stretto.batching import checked_size
from stretto.data import DataSpec
from stretto.data.spec import is_one_shot
from stretto.errors import TrainingError
from stretto.schedules.fields import stretched
from stretto.settings import Checkpointing
from stretto.timing import TimeLike, Trigger, parse_trigger
from stretto.timing.time import Number
from stretto.training.callback import Callback, overrides, unique
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

    >>> Evaluation([1.0, 2.0], every="10%", name="test").metrics
    {}

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


@final
@dataclass(frozen=True, slots=True)
class Logging:
    """When metrics are logged, when files are flushed, and where metrics go besides the folder.

    >>> Logging("4096sp").flush
    '30s'

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


def scaled(value: Any, ratio: Number) -> Any:
    """Return a time, sizes, schedules, settings or callbacks for a run `ratio` times as long.

    Fractions of the run stay, since they stretch by themselves. Batches, samples and tokens come in
    whole numbers and are rounded up.

    >>> scaled([Logging("8ba", flush="1m")], 0.5)[0].flush
    Every('30s')

    Raises:
        TimeError: the ratio is not a finite number.
    """
    if isinstance(value, Mapping):
        return {name: scaled(each, ratio) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [scaled(each, ratio) for each in value]
    if isinstance(value, (Evaluation, Checkpointing, Logging)):
        names = [name for name in ("every", "flush") if hasattr(value, name)]
        triggers = {name: parse_trigger(getattr(value, name)).scaled(ratio) for name in names}
        return replace(value, **triggers)  # type: ignore[arg-type]
    return value.scaled(ratio) if isinstance(value, Callback) else stretched(value, ratio)


def named_settings(
    evaluations: Sequence[Evaluation], checkpoint: Checkpointing | None, log: Logging
) -> dict[str, Evaluation | Checkpointing | Logging]:
    """Return the settings of what is due now and then, by the name that it has in a plan."""
    named: dict[str, Any] = {one.name: one for one in evaluations} | {"log": log}
    return named if checkpoint is None else named | {"checkpoint": checkpoint}


def named_callbacks(callbacks: Sequence[Callback], taken: Iterable[str]) -> dict[str, Callback]:
    """Return the callbacks that are due now and then, by names that are not taken."""
    own = [one for one in callbacks if one.every is not None and overrides(one, "on_due")]
    others = [*taken, "flush"]
    names = unique([*others, *(type(one).__name__ for one in own)])
    return dict(zip(names[len(others) :], own, strict=True))
