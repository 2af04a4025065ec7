"""What a `Trainer` is told, in groups: how data come, how a step is taken, what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeAlias, final

from torch import Tensor, nn

from stretto.batching import RuleLike, as_rule, checked_size
from stretto.data import DataSpec
from stretto.data.spec import is_one_shot
from stretto.errors import TrainingError, cannot, shown
from stretto.timing import LastBatch, TimeLike, Trigger, parse_trigger, read_wall_clock
from stretto.timing.number import whole
from stretto.training.evaluation.metrics import Metric, Predict, check_metric, is_object
from stretto.training.logs.loggers import Logger

LossFunction: TypeAlias = Callable[[nn.Module, Any], Tensor]
"""`loss(model, batch)`: a scalar, the mean over the batch (or its sum, if said so)."""

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How samples are ordered and fetched.

    >>> Loading(seed=7, num_workers=2).seed
    7
    """

    seed: int = 0
    """Seed of the order of samples; nothing else depends on it."""
    shuffle: bool | None = None
    """Whether each epoch has an order of its own; None: yes, or as a given `DataLoader`."""
    last_batch: LastBatch | None = None
    """What happens where an epoch ends inside a batch: `keep` the smaller one, `drop` it, or
    `carry` on; None: `keep`, or `drop` as a given `DataLoader` with `drop_last=True`."""
    num_workers: int | None = None
    """Processes that fetch samples; None: as a `DataLoader` that is given, or 0: this one."""
    prefetch_factor: int | None = None
    """Elements that each worker fetches ahead."""
    pin_memory: bool | None = None
    """Whether batches are copied to pinned memory, where there is an accelerator."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; None: torch's default."""
    keyed_randomness: bool = False
    """Whether chance inside the data set depends on (seed, epoch, sample) alone."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """How one optimizer step is computed.

    >>> Stepping(precision="bf16", clip_norm=1.0).loss_reduction
    'mean'

    Raises:
        TrainingError: a value is not one of those that exist, or `clip_norm` is not a positive
            number, or `measure_noise` no number of steps.
        TimeError: `rank_timeout` is not a wall-clock time.
        BatchSizeError: the learning rate rule cannot be read.
    """

    learning_rate_rule: RuleLike | None = None
    """How the learning rate follows the batch size: `{"sqrt": 256}`, `LinearRule(256)`, a function
    `size -> factor`; None: not at all."""
    loss_weight: Literal["samples", "tokens"] | Callable[[Any], int] = "samples"
    """What the loss is a mean over: samples, target tokens, or what a function counts."""
    shifts_labels: bool | None = None
    """With `loss_weight="tokens"`: whether the model shifts labels of the shape of its inputs, so
    that the first label of each sequence is no target. None: told from each batch. Labels that are
    the inputs are shifted in the model, as Hugging Face's causal models do; labels that are the
    inputs one place further, or anything else, such as classes of tokens, all count."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """What the loss function returns."""
    precision: Precision = "fp32"
    """The type that autocast computes in; weights stay as they are."""
    clip_norm: float | None = None
    """The largest norm of the whole step's gradient."""
    non_finite: Literal["stop", "skip", "ignore"] = "stop"
    """What happens to a step whose loss or gradient is nan or infinite: the run stops with the
    weights from before it; or the step is skipped and counted; or nobody looks. Overflows that the
    loss scaling of fp16 answers to are always skipped."""
    measure_noise: Literal["auto"] | int | None = "auto"
    """How often the noise of the gradient is measured where a policy or a callback reads it: once
    in so many steps; `"auto"`: in each; None: never."""
    compile: bool = False
    """Whether the model runs through `torch.compile`."""
    device: str | None = None
    """Where to compute; None: this rank's CUDA device if there is one, else the CPU."""
    rank_timeout: TimeLike | None = None
    """How long a rank waits for the others before the run ends with an error that names those that
    did not come, such as `"10m"`; None: as long as the process group does (torch: 10 minutes with
    NCCL, 30 with gloo)."""

    def __post_init__(self) -> None:
        if self.learning_rate_rule is not None:
            object.__setattr__(self, "learning_rate_rule", as_rule(self.learning_rate_rule))
        if not callable(self.loss_weight):
            one_of("loss_weight", self.loss_weight, ("samples", "tokens"))
        if self.shifts_labels is not None and self.loss_weight != "tokens":
            raise TrainingError(
                cannot(
                    f"use shifts_labels={self.shifts_labels!r}",
                    why="the loss is not weighed by target tokens",
                    instead="write loss_weight='tokens', or leave it out",
                )
            )
        one_of("loss_reduction", self.loss_reduction, ("mean", "sum"))
        one_of("precision", self.precision, ("fp32", "bf16", "fp16"))
        one_of("non_finite", self.non_finite, ("stop", "skip", "ignore"))
        steps: object = self.measure_noise
        if steps not in ("auto", None) and (whole(steps) or 0) < 1:
            raise TrainingError(
                cannot(
                    f"measure the noise of the gradient in one of {shown(steps)} steps",
                    why="it is not an integer of at least 1",
                    instead="write a number of steps such as 10, or leave measure_noise out",
                )
            )
        norm: object = self.clip_norm
        if norm is not None and (not isinstance(norm, (int, float)) or not norm > 0):
            raise TrainingError(
                cannot(
                    f"clip gradients to a norm of {shown(norm)}",
                    why="it is not a positive number",
                    instead="write a number such as 1.0, or leave clip_norm out",
                )
            )
        if self.rank_timeout is not None:
            read_wall_clock(self.rank_timeout)

    @property
    def longest_wait(self) -> timedelta | None:
        """How long a rank waits for the others; None: as long as the process group does."""
        if self.rank_timeout is None:
            return None
        return timedelta(seconds=float(read_wall_clock(self.rank_timeout).amount))


@final
@dataclass(frozen=True, slots=True)
class Evaluation:
    """Data that the model is measured on now and then, and always at the end of the run.

    A metric is either a function like the loss, `metric(model, batch)`, whose mean over all samples
    is logged; or an object with `update`, `compute` and `reset`, such as a metric of torchmetrics,
    which gets all batches and computes one value. All of them share one forward pass.

    >>> Evaluation([1.0, 2.0], every="10%", name="test").trigger
    Every('0.1dur')

    Raises:
        TrainingError: the data can be read only once, a metric is none or is named `loss`, the
            batch size is not at least 1, or no metric is an object that takes what `predict`
            returns.
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
            raise TrainingError(
                cannot(
                    f"evaluate on data of type {type(data).__name__}",
                    why="it can be iterated over only once, and every evaluation reads all of it",
                    instead="pass a data set, or DataLoader(batches, batch_size=None), where "
                    "batches is a list of batches or an object whose __iter__ starts anew",
                )
            )
        if "loss" in self.metrics:
            raise TrainingError(
                cannot(
                    f"measure a metric named 'loss' in {self.name!r}",
                    why="the loss itself has that name",
                    instead="choose another, or pass it as loss=...",
                )
            )
        # A collection of torchmetrics is a mapping as well.
        object.__setattr__(self, "metrics", dict(self.metrics))
        for name, metric in self.metrics.items():
            check_metric(name, metric)
        if self.predict is not None and not any(map(is_object, self.metrics.values())):
            raise TrainingError(
                cannot(
                    f"predict for metrics of {self.name!r}",
                    why="none of them is an object with update, compute and reset",
                    instead="leave predict out; a function gets the model and the batch",
                )
            )
        if self.batch_size is not None:
            checked_size(self.batch_size, "a batch size")

    @property
    def trigger(self) -> Trigger:
        """When it is due."""
        return parse_trigger(self.every)


@final
@dataclass(frozen=True, slots=True)
class Checkpointing:
    """When checkpoints are written and how many of them are kept.

    With `monitor` there is one more: that of the best evaluation so far, written when it is
    measured.

    >>> Checkpointing("30m", keep=2, monitor="validation/loss").trigger
    Every('30m')

    Raises:
        TrainingError: `keep` is not at least 1, or there is no such mode.
    """

    every: TimeLike | Trigger = "1ep"
    keep: int = 3
    """How many of the newest stay."""
    monitor: str | None = None
    """The metric whose best value's checkpoint stays, such as `"validation/loss"`."""
    mode: Literal["min", "max"] = "min"
    """Whether less or more of the metric is better."""

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("min", "max"))
        if (whole(self.keep) or 0) < 1:
            raise TrainingError(
                cannot(
                    f"keep {self.keep!r} checkpoints",
                    why="it is not an integer of at least 1",
                    instead="write how many of the newest to keep, such as 3",
                )
            )

    @property
    def trigger(self) -> Trigger:
        """When one is due."""
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
            given: object = one
            missing = [name for name in _LOGGER if not callable(getattr(given, name, None))]
            if missing or isinstance(given, type):
                raise TrainingError(
                    cannot(
                        f"log to {shown(given)}",
                        why=f"it has no method {missing[0]!r}"
                        if missing
                        else "it is a class and not an object",
                        instead="pass an object with the methods start(config, sample), "
                        "log(record) and close(), such as TensorBoardLogger()",
                    )
                )

    @property
    def trigger(self) -> Trigger:
        """When a line is due."""
        return parse_trigger(self.every)

    @property
    def flush_trigger(self) -> Trigger:
        """When what was logged must be on the disk."""
        return parse_trigger(self.flush)


_LOGGER = ("start", "log", "close")
"""The methods of a logger."""


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that a setting is one of those that exist.

    Raises:
        TrainingError: it is not.
    """
    if value not in choices:
        shown = ", ".join(repr(choice) for choice in choices)
        raise TrainingError(
            cannot(f"use {name}={value!r}", why="there is no such choice", instead=f"write {shown}")
        )
