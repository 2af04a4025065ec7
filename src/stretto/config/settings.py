"""Sections of run files."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, GetPydanticSchema, PlainValidator, Tag, WithJsonSchema

from stretto.batching import LearningRateRule, as_rule
from stretto.batching.split import RULES
from stretto.config.fields import (
    Count,
    CountOrAuto,
    Interval,
    Natural,
    Section,
    WallClock,
    read_as,
    shape_of,
)
from stretto.config.forms import settings_form
from stretto.config.targets import TARGET_PATTERN, Target, bound_target
from stretto.config.yaml import Path, Source
from stretto.settings import Checkpointing, Loading, Stepping
from stretto.timing import Time


class Data(Target):
    """Where samples come from, and how many there are."""

    num_samples: Count | None = None
    """Samples in an epoch. With it, a plan does not open the data."""
    num_tokens: Count | None = None
    """Tokens in an epoch."""
    tokens_per_sample: Count | None = None
    """Tokens of a sample, if all have equally many."""
    sharded: bool | None = None
    """Whether the iterable of each rank has only its share of the samples; by default no, and the
    first batches are compared over the ranks."""


class Group(Section):
    """Parameters with settings of their own; all other keys are the optimizer's."""

    model_config = ConfigDict(extra="allow")

    parameters: Annotated[re.Pattern[str], Field(examples=["embedding"])]
    """A regular expression, found anywhere in a parameter's name."""


class Optimizer(Target):
    """The optimizer: called with the model's parameters and its other keys."""

    groups: dict[str, Group] = Field(default_factory=dict)
    """Groups by name, for `lr@name`; a parameter belongs to the first whose pattern it matches."""


def _checked_rule(value: Any) -> Any:
    if isinstance(value, dict) and "target" in value:
        return Target.model_validate(value)
    as_rule(value)
    return value


_SIZE = {"type": "integer", "minimum": 1, "description": "The size that the rate is meant for."}
_TARGET = {"type": "string", "pattern": TARGET_PATTERN}
AnyRule: TypeAlias = Annotated[
    Any,
    PlainValidator(_checked_rule),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {**dict.fromkeys(RULES, _SIZE), "target": _TARGET},
            "minProperties": 1,
        }
    ),
]
"""How the learning rate follows the batch size: a rule, or a function of yours from the size to a
factor."""


def build_rule(value: AnyRule, source: Source, path: Path) -> LearningRateRule:
    """Return the learning rate rule of a run file.

    Raises:
        ConfigError: the target cannot be imported or called.
    """
    with source.at(*path):
        is_target = isinstance(value, Target)
        return as_rule(bound_target(value, source=source, path=path) if is_target else value)


def _or_target(word: Any, instead: str) -> GetPydanticSchema:
    """Return a reader of a word or a target."""
    tagged = Annotated[word, Tag("<word>")] | Annotated[Target, Tag("<target>")]

    def shape(value: object) -> str:
        return "<target>" if isinstance(value, (dict, Target)) else "<word>"

    return read_as(Annotated[tagged, shape_of(shape, instead)])


LossWeight: TypeAlias = Annotated[
    Any,
    _or_target(Literal["samples", "tokens"], "write samples, tokens, or {target: my.module:count}"),
]
AnyStore: TypeAlias = Annotated[
    Any, _or_target(str, "write s3://bucket/run, or {target: my.module:Store}")
]
AnyLogger: TypeAlias = Annotated[
    str | Target,
    _or_target(
        Literal["tensorboard", "wandb", "mlflow"],
        "write tensorboard, wandb, mlflow, or {target: my.module:Logger}",
    ),
]
LoadingSection: TypeAlias = Annotated[
    Loading,
    settings_form(
        Loading,
        "seed",
        "last_batch",
        types={"num_workers": Natural},
        shuffle=True,
        num_workers=0,
    ),
]
SteppingSection: TypeAlias = Annotated[
    Stepping,
    settings_form(
        Stepping,
        "rule",
        types={
            "measure_noise": CountOrAuto,
            "loss_weight": LossWeight,
            "rank_timeout": WallClock | None,
        },
    ),
]
Checkpoint: TypeAlias = Annotated[
    Checkpointing,
    settings_form(Checkpointing, types={"upload": AnyStore | None}, every=Time("1ep")),
]


class Evaluate(Section):
    """What is measured during the run, and always at its end."""

    every: Interval = Time("1ep")
    """How often."""
    data: Target | None = None
    """What to measure on; by default the run's data with `split: validation`."""
    metrics: dict[str, Target] = Field(default_factory=dict)
    """By name: functions `function(model, batch) -> mean over the batch`, or classes whose objects
    have update, compute and reset, such as those of torchmetrics."""
    predict: Target | None = None
    """A function `(model, batch) -> (outputs, targets)` for the `update` of such objects; by
    default both are read from the batch."""
    batch_size: Count | None = None
    """Samples of one forward pass; by default the training micro-batch."""
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "validation"
    """What its lines in the metrics begin with."""
    loss: Target | None = None
    """By default the training loss."""


class Log(Section):
    """When metrics are written, and where they go besides the run folder."""

    every: Interval = Time("10ba")
    """How often a line of metrics is written."""
    flush: Interval = Time("30s")
    """How often written lines are flushed to the disk."""
    loggers: list[AnyLogger] | None = None
    """Where metrics go besides metrics.jsonl; by default TensorBoard if it is installed."""
    console: bool | None = None
    """Whether the console shows the progress of the run; by default with `stretto train`, and on a
    terminal."""
