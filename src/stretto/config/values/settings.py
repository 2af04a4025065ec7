"""The sections of a run file that hold settings and nothing of their own."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import AfterValidator, ConfigDict, Field, Tag, model_validator

from stretto.batching import LearningRateRule, as_rule
from stretto.config.reading.source import Path
from stretto.config.values.context import Building
from stretto.config.values.fields import (
    Count,
    CountOrAuto,
    Length,
    Natural,
    Part,
    Section,
    Target,
    WallClock,
    shape_of,
    shown,
)
from stretto.errors import ConfigError, cannot
from stretto.timing import Time


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(
            cannot(
                f"use {shown(text)} as a pattern of parameter names",
                why=f"it is not a regular expression ({error.msg})",
                instead="write for example 'embedding'",
            )
        ) from None
    return text


class Data(Target):
    """Where samples come from, and how many there are."""

    num_samples: Count | None = None
    """Samples in an epoch. Stated, the run can be planned without opening the data."""
    num_tokens: Count | None = None
    """Tokens in an epoch."""
    tokens_per_sample: Count | None = None
    """Tokens of a sample, where all have equally many."""
    sharded: bool | None = None
    """Whether each rank makes an iterable of its own share of the samples; left out: no, and the
    first batches are compared over the ranks."""


class Group(Part):
    """Parameters with settings of their own; all other keys are the optimizer's."""

    model_config = ConfigDict(extra="allow")

    parameters: Annotated[str, AfterValidator(_pattern), Field(examples=["embedding"])]
    """A regular expression, found anywhere in a parameter's name."""

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's settings for the group."""
        return dict(self.__pydantic_extra__ or {})


class Optimizer(Target):
    """The optimizer: called with the model's parameters and its other keys."""

    groups: dict[str, Group] = Field(default_factory=dict)
    """Groups by name, for `lr@name`; a parameter belongs to the first whose pattern it matches."""


class Rule(Section):
    """How the learning rate follows the batch size; exactly one of the keys."""

    linear: Count | None = None
    """In proportion to it; the learning rate is meant for batches of this size."""
    sqrt: Count | None = None
    """In proportion to its square root; the learning rate is meant for batches of this size."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_words(cls, values: Any) -> Any:
        return as_rule(cast(Any, values)) if isinstance(values, str) else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                cannot(
                    "follow the batch size with the learning rate",
                    why=f"{' and '.join(given)} are several rules" if given else "no rule is said",
                    instead="write one, such as sqrt: 64",
                )
            )
        return self

    def rule(self) -> LearningRateRule:
        """Return the rule."""
        return as_rule({"sqrt": self.sqrt} if self.linear is None else {"linear": self.linear})


AnyRule: TypeAlias = Annotated[
    Annotated[Rule, Tag("<Rule>")] | Annotated[Target, Tag("<target>")],
    shape_of(
        lambda value: (
            "<target>"
            if isinstance(value, Target) or (isinstance(value, dict) and "target" in value)
            else "<Rule>"
        ),
        "write for example {sqrt: 64}, or {target: my.module:rule}",
    ),
]
"""How the learning rate follows the batch size: a rule, or a function of yours from the size to a
factor."""


def build_rule(value: AnyRule, building: Building, path: Path) -> LearningRateRule:
    """Return the learning rate rule that a run file says.

    Raises:
        ConfigError: the target cannot be imported or called.
    """
    if isinstance(value, Rule):
        return value.rule()
    with building.source.at(*path):
        return as_rule(building.function(value, path))


class LoadingSection(Section):
    """How samples are ordered and fetched."""

    shuffle: bool = True
    """Whether each epoch has an order of its own."""
    num_workers: Natural = 0
    """Processes that fetch samples; 0 fetches in the training process."""
    prefetch_factor: Count | None = None
    """Elements that each worker fetches ahead."""
    pin_memory: bool | None = None
    """Whether batches are copied to pinned memory; left out: where the device is CUDA."""
    collate_fn: Target | None = None
    """Makes a batch of a list of samples: `function(samples) -> batch`."""
    keyed_randomness: bool = False
    """Whether chance inside the data set depends on (seed, epoch, sample) alone."""


LossWeight: TypeAlias = Annotated[
    Annotated[Literal["samples", "tokens"], Tag("<choice>")] | Annotated[Target, Tag("<target>")],
    shape_of(
        lambda value: "<target>" if isinstance(value, (dict, Target)) else "<choice>",
        "write samples, tokens, or {target: my.module:count}",
    ),
]


class SteppingSection(Section):
    """How one optimizer step is computed."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The type that autocast computes in; weights stay as they are."""
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The largest norm of the whole step's gradient."""
    non_finite: Literal["stop", "skip", "ignore"] = "stop"
    """What happens to a step whose loss or gradient is nan or infinite."""
    measure_noise: CountOrAuto = "auto"
    """In how many steps the noise of the gradient is measured once, where something follows it;
    `auto`: in each."""
    compile: bool = False
    """Whether the model runs through torch.compile."""
    loss_weight: LossWeight = "samples"
    """What the loss is a mean over: samples, tokens, or what a function counts in a batch."""
    shifts_labels: bool | None = None
    """With `loss_weight: tokens`: whether the model shifts labels of the shape of its inputs; left
    out: told from the batches."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """What the loss function returns."""
    device: str | None = None
    """Where to compute; left out: CUDA if there is one, else the CPU."""
    rank_timeout: WallClock | None = None
    """How long a rank waits for the others; left out: 10 minutes with NCCL, 30 with gloo."""


class Evaluate(Section):
    """What is measured now and then, and always at the end of the run."""

    every: Length = Time("1ep")
    """How often."""
    data: Target | None = None
    """What to measure on; left out: the run's data with `split: validation`."""
    metrics: dict[str, Target] = Field(default_factory=dict)
    """By name: functions `function(model, batch) -> mean over the batch`, or classes whose objects
    have update, compute and reset, such as those of torchmetrics."""
    predict: Target | None = None
    """A function `(model, batch) -> (outputs, targets)`: what such objects are updated with; left
    out: told from the batch."""
    batch_size: Count | None = None
    """Samples of one forward pass; left out: the training micro-batch."""
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "validation"
    """What its lines in the metrics begin with."""
    loss: Target | None = None
    """Left out: the training loss."""


class Checkpoint(Section):
    """When checkpoints are written, and how many are kept."""

    every: Length = Time("1ep")
    """How often; there is always one at the end."""
    keep: Count = 3
    """How many of the newest are kept."""
    monitor: str | None = None
    """The metric whose best checkpoint is kept besides, such as `validation/loss`."""
    mode: Literal["min", "max"] = "min"
    """Whether less or more of that metric is better."""


AnyLogger: TypeAlias = Annotated[
    Annotated[Literal["tensorboard", "wandb", "mlflow"], Tag("<choice>")]
    | Annotated[Target, Tag("<target>")],
    shape_of(
        lambda value: "<target>" if isinstance(value, (dict, Target)) else "<choice>",
        "write tensorboard, wandb, mlflow, or {target: my.module:Logger}",
    ),
]
"""A logger by its name, or one of yours."""


class Log(Section):
    """When metrics are written, and where they go besides the run folder."""

    every: Length = Time("10ba")
    """How often a line of metrics is written."""
    flush: Length = Time("30s")
    """How often what was written is put on the disk."""
    loggers: list[AnyLogger] | None = None
    """Where metrics go besides metrics.jsonl; left out: TensorBoard where it is installed."""
    console: bool | None = None
    """Whether the console shows the progress of the run; left out: with `stretto train`, and on a
    terminal."""
