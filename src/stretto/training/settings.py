"""The settings of a `Trainer` that hold objects, and the checks of its arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from stretto._foreign import knows_foreign
from stretto.batching import Pair, as_policy, checked_size
from stretto.batching.metrics import check_monitored, metrics_of
from stretto.data import DataSpec
from stretto.data.spec import is_one_shot
from stretto.errors import TrainingError
from stretto.runtime import TrainStep
from stretto.schedules.fields import stretched
from stretto.settings import Checkpointing, Computing, Stepping, read_settings
from stretto.timing import Time, TimeLike, Trigger, parse_trigger
from stretto.timing.grammar import exact
from stretto.timing.time import Number
from stretto.training.callback import Callback, overrides, unique
from stretto.training.criterion import as_loss
from stretto.training.logs.loggers import Logger
from stretto.training.metrics import Metric, Predict, check_metric, is_object

LossFunction: TypeAlias = Callable[[nn.Module, Any], Tensor]
"""`loss(model, batch)`: a scalar, the mean over the batch (see `Stepping.loss_reduction`)."""


@knows_foreign
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


@knows_foreign
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


def scale(value: Any, ratio: Number) -> Any:
    """Return a time, sizes, schedules, settings or callbacks for a run `ratio` times as long.

    Fractions of the run stay, since they stretch by themselves. Batches, samples and tokens come in
    whole numbers and are rounded up.

    >>> from stretto import Cosine
    >>> scale("90ep", 0.5), scale(Cosine(warmup="100ba"), 0.5)
    (Time('45ep'), Cosine(warmup='50ba'))
    >>> scale([Logging("8ba", flush="1m")], 0.5)[0].flush
    Every('30s')

    Raises:
        TimeError: the ratio is not a finite number, or a text is not a time.
    """
    if isinstance(value, str):
        value = Time(value)
    if isinstance(value, Mapping):
        return {name: scale(each, ratio) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [scale(each, ratio) for each in value]
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
    if not own:
        return {}
    others = [*taken, "flush"]
    names = unique([*others, *(type(one).__name__ for one in own)])
    return dict(zip(names[len(others) :], own, strict=True))


_PARTS = {
    "model": (nn.Module, "pass a torch.nn.Module"),
    "optimizer": (Optimizer, "write torch.optim.AdamW(model.parameters(), lr=1e-3)"),
}


def check_parts(
    model: Any, optimizer: Any, loss: Any, computing: Computing, stepping: Stepping
) -> None:
    """Refuse what is not a model, an optimizer or a loss, and an optimizer of another model.

    Raises:
        TrainingError: something is of another kind.
    """
    optimizers = [optimizer]
    if isinstance(model, TrainStep):
        _check_step(model, optimizer, loss, computing, stepping)
        model, optimizers = model.model, list(model.optimizers)
    elif not callable(loss):
        raise _not_a("loss", loss, "pass a function (model, batch) -> mean loss")
    for name, given in [("model", model), *(("optimizer", one) for one in optimizers or [None])]:
        kind, instead = _PARTS[name]
        if not isinstance(given, kind):
            raise _not_a(name, given, instead)
    own = set(map(id, model.parameters()))
    for one in optimizers:
        if own.isdisjoint([id(p) for group in one.param_groups for p in group["params"]]):
            raise TrainingError.cannot(
                f"train {type(model).__name__} with this {type(one).__name__}",
                why="the optimizer has none of the model's parameters",
                instead="build the optimizer of model.parameters(), after the model",
            )


def check_listeners(
    model: Any, evaluations: Sequence[Evaluation], callbacks: Sequence[Any]
) -> None:
    """Refuse evaluations without a loss or with one name, and what is not a callback.

    Raises:
        TrainingError: there is one.
    """
    # Events of a plan have the first two names already.
    names = ["checkpoint", "log", *(one.name for one in evaluations), *metrics_of(evaluations)]
    for name, count in Counter(names).items():
        if count > 1:
            raise TrainingError.bad("name", name, "the name is not unique", "choose another name")
    for evaluation in evaluations:
        if isinstance(model, TrainStep) and model.loss is None and evaluation.loss is None:
            raise TrainingError.cannot(
                f"evaluate {evaluation.name!r} with {type(model).__qualname__}",
                why="the step has no loss(model, batch)",
                instead=f"write Evaluation(data, loss=..., name={evaluation.name!r})",
            )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise _not_a("callbacks", callback, "pass a list of Callback objects")
        if callback.monitor is not None:
            check_monitored(callback.monitor, metrics_of(evaluations))


def given_sizes(
    batch_size: Any, micro_batch_size: Any, data: Any, *, uses_maximum: bool
) -> tuple[Any, Any]:
    """Return the policy of batch sizes, and the micro-batch size, that were given.

    Raises:
        TrainingError: no batch size was, or a micro-batch size that is to be found.
    """
    if uses_maximum and batch_size is None:
        batch_size = "auto"
    elif uses_maximum:
        if micro_batch_size not in (None, "auto"):
            why, instead = "use_maximum_batch_size finds it", "leave one of them out"
            raise TrainingError.bad("micro_batch_size", micro_batch_size, why, instead)
        micro_batch_size = "auto"
    if batch_size is None:
        inner = data.data if isinstance(data, DataSpec) else data
        own = getattr(inner, "batch_size", None) if isinstance(inner, DataLoader) else None
        why = "that of the DataLoader is for one rank" if own else "it is missing"
        raise TrainingError.bad("batch_size", None, why, f"write batch_size={own or 32}")
    is_pair = isinstance(batch_size, Pair)
    return batch_size if is_pair else as_policy(batch_size), micro_batch_size


def check_ratio(ratio: Number) -> Number:
    """Return the ratio of `scale_schedule`.

    Raises:
        TrainingError: it is not above 0.
        TimeError: it is not a finite number.
    """
    if exact(ratio) <= 0:
        why, instead = "the run has no length", "write a ratio above 0"
        raise TrainingError.bad("scale_schedule", ratio, why, instead)
    return ratio


def read_evaluations(given: Any) -> list[Evaluation]:
    """Return evaluations from one, several, or the data of one; each may be a mapping.

    Raises:
        StrettoError: there is something else.
    """
    several = given if isinstance(given, (list, tuple)) else [given]
    if given is None or not several:
        return []
    if several is given and any(isinstance(one, (Dataset, DataLoader)) for one in several):
        why, instead = "a list is one of samples", "write [Evaluation(data, name='first'), ...]"
        raise TrainingError.cannot("evaluate on a list of data sets", why=why, instead=instead)
    if not any(isinstance(one, (Evaluation, Mapping, str)) for one in several):
        several = [Evaluation(given)]
    read = [read_settings(Evaluation, one, "evaluate") for one in several]
    return [
        replace(one, loss=as_loss(one.loss, "mean")) if callable(one.loss) else one for one in read
    ]


def _check_step(
    step: TrainStep, optimizer: object, loss: object, computing: Computing, stepping: Stepping
) -> None:
    """Refuse a step without its parts, and settings that it would not read."""
    name = type(step).__qualname__
    for attribute in ("model", "optimizers"):
        if not hasattr(step, attribute):
            raise TrainingError.cannot(
                f"train with {name}",
                why=f"it has no attribute {attribute!r}",
                instead=f"set self.{attribute} in {name}.__init__",
            )
    if not isinstance(step.optimizers, Sequence):
        raise _not_a("optimizers", step.optimizers, "write self.optimizers = [optimizer]")
    plain = Computing()
    ignored = {
        "optimizer": optimizer is not None,
        "loss": loss is not None,
        "precision": computing.precision != plain.precision,
        "clip_norm": computing.clip_norm is not None,
        "compile": computing.compile,
        "loss_reduction": stepping.loss_reduction != "mean",
    }
    for setting in (one for one, is_given in ignored.items() if is_given):
        raise TrainingError.cannot(
            f"use {setting} with {name}",
            why="a step of your own decides that itself",
            instead=f"do it in {name}, and leave {setting} out",
        )


def _not_a(name: str, given: object, instead: str) -> TrainingError:
    shown = given if given is None or isinstance(given, (str, type)) else type(given)
    return TrainingError.bad(name, shown, "it is of another kind", instead)
