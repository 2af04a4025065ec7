"""Settings of the trainer in run files, and what a value is built with."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast, final, get_type_hints

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic_core import InitErrorDetails

from stretto.batching import LearningRateRule, as_rule
from stretto.batching.split import RULES
from stretto.config.fields import (
    TARGET_PATTERN,
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
    summary_of,
)
from stretto.config.targets import bound_target, import_target
from stretto.config.yaml import Path, Source
from stretto.errors import ConfigError, StrettoError
from stretto.schedules import Cosine, Schedule
from stretto.settings import Checkpointing, Loading, Stepping
from stretto.timing import Time, TimeLike, Trigger


@final
@dataclass(frozen=True, slots=True)
class Building:
    """The surroundings that a batch size or a schedule is built in.

    >>> Building(world_size=8, micro_batch_size=4).even_unit
    32
    """

    world_size: int = 1
    micro_batch_size: int | None = None
    decay: Schedule = Cosine()  # noqa: RUF009  a frozen value
    """The schedule of the learning rate, for batch sizes that are coupled with it."""
    imports: bool = True
    """Whether targets are imported; when a file is only checked, a stand-in takes their place."""

    @property
    def even_unit(self) -> int:
        """What an evenly split batch size is a multiple of."""
        return self.world_size * (self.micro_batch_size or 1)

    def function(self, section: Target) -> Callable[..., Any]:
        """Return the function that a section names, with its arguments bound."""
        if not self.imports:
            return _stand_in
        with refused_at(("target",)):
            import_target(section.target)
        return bound_target(section, source=None)  # type: ignore[no-any-return]

    def is_class(self, target: str, kind: type) -> bool:
        """Return whether a target is a class of `kind`; False if targets are not imported."""
        if not self.imports:
            return False
        with refused_at(("target",)):
            found = import_target(target)
        return isinstance(found, type) and issubclass(found, kind)


CHECKING = Building(imports=False)
"""Builds what can be built of a run file on its own: what is wrong there is wrong in any run."""


def _stand_in(*_: Any) -> int:
    return 1


@contextmanager
def refused_at(path: Path) -> Iterator[None]:
    """Let pydantic list an error of ours raised within, at the path that it comes from."""
    try:
        yield
    except StrettoError as error:
        details = InitErrorDetails(type="value_error", loc=path, input=None, ctx={"error": error})
        raise ValidationError.from_exception_data("batch_size", [details]) from error


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError.cannot(
            f"use {shown(text)} as a pattern of parameter names",
            why=f"it is not a regular expression ({error.msg})",
            instead="write for example 'embedding'",
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


def _checked_rule(value: Any) -> Any:
    if isinstance(value, dict) and "target" in value:
        return Target.model_validate(value)
    as_rule(value)
    return value


_SIZE = {"type": "integer", "minimum": 1, "description": "The size that the rate is meant for."}
_TARGET = {"type": "string", "pattern": TARGET_PATTERN}
AnyStore: TypeAlias = Annotated[
    Annotated[str, Tag("<address>")] | Annotated[Target, Tag("<target>")],
    shape_of(
        lambda value: "<target>" if isinstance(value, (dict, Target)) else "<address>",
        "write s3://bucket/run, or {target: my.module:Store}",
    ),
]
AnyRule: TypeAlias = Annotated[
    Any,
    PlainValidator(_checked_rule),
    WithJsonSchema(
        {
            "oneOf": [
                {"type": "object", "properties": {name: schema}, "required": [name]}
                | {"additionalProperties": name == "target"}
                for name, schema in ((*dict.fromkeys(RULES, _SIZE).items(), ("target", _TARGET)))
            ]
        }
    ),
]
"""How the learning rate follows the batch size: a rule, or a function of yours from the size to a
factor."""


def build_rule(value: AnyRule, source: Source, path: Path) -> LearningRateRule:
    """Return the learning rate rule that a run file says.

    Raises:
        ConfigError: the target cannot be imported or called.
    """
    with source.at(*path):
        is_target = isinstance(value, Target)
        return as_rule(bound_target(value, source=source, path=path) if is_target else value)


LossWeight: TypeAlias = Annotated[
    Annotated[Literal["samples", "tokens"], Tag("<choice>")] | Annotated[Target, Tag("<target>")],
    shape_of(
        lambda value: "<target>" if isinstance(value, (dict, Target)) else "<choice>",
        "write samples, tokens, or {target: my.module:count}",
    ),
]


_TYPES: dict[Any, Any] = {
    int: Count,
    int | None: Count | None,
    TimeLike | Trigger: Length,
    Callable[[list[Any]], Any] | None: Target | None,
}
"""What a run file holds for the annotation of a setting; for any other, the annotation itself."""


def _derived(kind: type, *without: str, types: dict[str, Any], **defaults: Any) -> type[Section]:
    """The section whose keys are the fields of `kind`."""
    hints = get_type_hints(kind)
    fields = {
        one.name: (
            types.get(one.name, _TYPES.get(hints[one.name], hints[one.name])),
            defaults.get(one.name, one.default),
        )
        for one in dataclasses.fields(kind)
        if one.name not in without
    }
    name = f"{kind.__name__}Section"
    section = create_model(name, __base__=Section, __doc__=summary_of(kind), **cast(Any, fields))
    section.settings = kind
    return section


if TYPE_CHECKING:
    LoadingSection: TypeAlias = Loading
    SteppingSection: TypeAlias = Stepping
    Checkpoint: TypeAlias = Checkpointing
else:
    LoadingSection = _derived(
        Loading, "seed", "last_batch", types={"num_workers": Natural}, shuffle=True, num_workers=0
    )
    SteppingSection = _derived(
        Stepping,
        types={
            "measure_noise": CountOrAuto,
            "loss_weight": LossWeight,
            "rank_timeout": WallClock | None,
        },
    )
    Checkpoint = _derived(Checkpointing, types={"upload": AnyStore | None}, every=Time("1ep"))


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
