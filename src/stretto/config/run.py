"""`RunConfig`: the content of a run file, and its sections."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainValidator,
    PrivateAttr,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails

from stretto._location import local_path, open_plain, public
from stretto.batching import Pair, as_rule
from stretto.batching.split import RULES
from stretto.config.fields import (
    Count,
    CountOrAuto,
    Interval,
    Natural,
    RunLength,
    Section,
    WallClock,
    read_as,
    shape_of,
    without_nulls,
)
from stretto.config.forms import AnySchedule, BatchSize, data_ranks, settings_form
from stretto.config.targets import TARGET_PATTERN, Target
from stretto.config.yaml import (
    MAX_BYTES,
    NO_SOURCE,
    Dumper,
    Source,
    apply_overrides,
    as_key,
    parse_yaml,
    show_path,
)
from stretto.errors import ConfigError, Message, StrettoError, cannot, nearest, shown
from stretto.schedules.fields import parse_name
from stretto.settings import DATA_DIMENSIONS, Checkpointing, Loading, Precision, Stepping
from stretto.timing import LastBatch, Time


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
Parallel: TypeAlias = Annotated[
    str | Target,
    _or_target(Literal["ddp", "fsdp"], "write ddp, fsdp, or {target: my.models:spread}"),
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


def _local(folder: str) -> str:
    local_path(folder, "keep a run in", ConfigError)
    return folder


class RunConfig(Section):
    """A run file: its length, data, model, batch sizes, schedules and settings.

    >>> config = RunConfig.parse(
    ...     {"max_duration": "2ep", "data": {"target": "my.data:make"}, "batch_size": 64}
    ... )
    >>> config.max_duration, config.last_batch
    (Time('2ep'), 'keep')
    """

    max_duration: RunLength
    """The length of the run, in any unit but `dur`."""
    model: Target | None = None
    """Makes the model. A plan needs none."""
    data: Annotated[Data, Field(examples=["{target: my.data:make}"])]
    """Makes the training data."""
    optimizer: Optimizer | None = None
    """Makes the optimizer. A plan needs none."""
    loss: Target | None = None
    """`function(model, batch) -> loss`; by default the `loss` of the model's class."""
    step: Target | None = None
    """Makes a `stretto.TrainStep` of yours: called with `model`, with `optimizer` if the file has
    one, and with `loss` if it takes one."""
    micro_batch_size: CountOrAuto | None = None
    """Most samples of one forward and backward pass on one rank; `auto`: as many as fit into
    memory; by default all its share."""
    world_size: Count | None = None
    """How many ranks a plan is for; by default one. Training has those that torchrun starts."""
    schedules: Annotated[
        dict[
            Annotated[str, AfterValidator(lambda text: parse_name(text) and text)],
            AnySchedule,
        ],
        BeforeValidator(lambda value: without_nulls(value) if isinstance(value, dict) else value),
    ] = Field(default_factory=dict)
    """What multiplies each hyper-parameter, by its name: `lr`, `weight_decay`, `betas.0`,
    `lr@group`."""
    batch_size: Annotated[BatchSize, Field(examples=[64])]  # after what it depends on
    """Samples of one optimizer step, over all ranks."""
    rule: AnyRule = None
    """How the learning rate follows the batch size, a rule or a function of yours; by default not
    at all."""
    last_batch: LastBatch = "keep"
    """What happens if an epoch ends inside a batch: `keep` a smaller one, `drop` it, or `carry`
    on."""
    precision: Precision = "fp32"
    """The type that autocast computes in; weights stay as they are."""
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The largest norm of the whole step's gradient."""
    compile: bool = False
    """Whether the model runs through `torch.compile`."""
    device: str | None = None
    """Where to compute; by default this rank's CUDA device if there is one, else the CPU."""
    loading: LoadingSection = Loading(shuffle=True, num_workers=0)
    """How samples are ordered and fetched."""
    stepping: SteppingSection = Stepping()
    """How a step is computed."""
    evaluate: Annotated[
        list[Evaluate],
        BeforeValidator(
            lambda value: [value] if isinstance(value, dict) else value,
            json_schema_input_type=Evaluate | list[Evaluate],
        ),
    ] = Field(default_factory=list)
    """What is measured during the run; one mapping or a list of them."""
    checkpoint: Checkpoint | None = None
    """When checkpoints are written; by default never."""
    log: Log = Log()
    """When metrics are written."""
    callbacks: list[Target] = Field(default_factory=list)
    """Listeners and algorithms: each makes a `stretto.training.Callback`."""
    folder: Annotated[str, AfterValidator(_local)] | None = None
    """Where the run is kept; by default a new folder in `runs`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the order of samples, and of all chance in building and training the model."""
    parallel: Parallel = "ddp"
    """How several ranks share the model: each has all of it, or a part of each block (FSDP2); or a
    function of yours, `function(model, mesh) -> model`."""
    mesh: Annotated[dict[str, Count], Field(min_length=1)] | None = None
    """The sizes of a device mesh of all ranks, by the names of its dimensions, such as
    `{dp_replicate: 2, dp_shard: 4}`. Those that `stretto.distributed.Mesh` knows share out the
    samples, all others the model."""
    idle_ranks: bool = False
    """Whether a batch may have fewer samples than there are ranks; the others then run dummies."""
    scale_schedule: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Makes the run this many times as long, with every time that is not a fraction of it. The
    number of samples in the data stays."""
    _source: Source = PrivateAttr(default=NO_SOURCE)

    @classmethod
    def parse(cls, values: object, source: Source = NO_SOURCE) -> Self:
        """Return the configuration that plain values describe.

        Raises:
            ConfigError: some are wrong; every mistake is listed.
        """
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            raise explain(error, source) from None
        config._source = source
        return config

    def changed(self, **values: Any) -> Self:
        """Return this configuration with other plain values of some keys."""
        return self.parse(self.model_dump(mode="json") | values, self.source)

    @property
    def source(self) -> Source:
        """Where the values were written, for messages."""
        return self._source

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        # The first two are events of a plan.
        names = ["checkpoint", "log", *(evaluation.name for evaluation in self.evaluate)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError.cannot(
                f"evaluate twice as {twice!r}",
                why="their metrics would have the same names",
                instead="give each evaluation another 'name'",
            )
        self._check_mesh()
        is_coupled = isinstance(self.batch_size.value, Pair)
        if is_coupled and "lr" not in self.schedules:
            raise ConfigError.cannot(
                "grow the batch as the learning rate decays",
                why="there is no 'schedules.lr'",
                instead="write for example 'schedules: {lr: {cosine: {warmup: 5%}}}'",
            )
        if is_coupled and self.rule is not None:
            raise ConfigError.cannot(
                "follow the batch size by a 'rule'",
                why="the batch size itself determines the learning rate",
                instead="leave the rule out",
            )
        return self

    def _check_mesh(self) -> None:
        """Refuse a mesh that the file contradicts."""
        if self.mesh is None:
            return
        what = f"train on a mesh of {self.mesh}"
        ranks, names = math.prod(self.mesh.values()), [*self.mesh]
        if self.world_size not in (None, ranks):
            why = f"it has {ranks} ranks, and world_size is {self.world_size}"
            raise ConfigError.cannot(what, why=why, instead="leave world_size out")
        if not set(names) & set(DATA_DIMENSIONS):
            why = "no dimension shares out the samples"
            raise ConfigError.cannot(what, why=why, instead="add one such as 'dp: 1'")
        others = [name for name in names if name not in DATA_DIMENSIONS and self.mesh[name] > 1]
        if others and isinstance(self.parallel, str):
            why = f"parallel: {self.parallel} does not share the model over {', '.join(others)}"
            instead = "write 'parallel: {target: my.models:spread}', a function (model, mesh)"
            raise ConfigError.cannot(what, why=why, instead=instead)
        sharded = [name for name in names if "shard" in name or name == "fsdp"]
        if self.parallel == "ddp" and sharded:
            why = f"parallel is ddp, which shards nothing over {', '.join(sharded)}"
            raise ConfigError.cannot(what, why=why, instead="write 'parallel: fsdp'")

    @property
    def num_data_ranks(self) -> int | None:
        """How many ranks share out the samples, as far as the file says."""
        return data_ranks(self.mesh, self.world_size)


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run file at `path`, with `key=value` overrides.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    try:
        with open_plain(Path(path)) as file:
            text = file.read(MAX_BYTES + 1).decode()
    except (OSError, ValueError) as error:
        raise ConfigError.cannot(
            f"read {str(path)!r}",
            why=(getattr(error, "strerror", None) or str(error)).lower(),
            instead="write the path of a run file in UTF-8, or none for the packaged one",
        ) from None
    return parse_run_file(text, Path(path).name, overrides)


def parse_run_file(text: str, name: str = "run.yaml", overrides: Sequence[str] = ()) -> RunConfig:
    r"""Read the text of a run file, with `key=value` overrides.

    >>> text = "max_duration: 2ep\ndata: {target: my.data:make}\nbatch_size: 64"
    >>> parse_run_file(text, overrides=["batch_size=32"]).batch_size.value
    Fixed(32)

    Raises:
        ConfigError: it is not YAML, or something in it is wrong.
    """
    document = parse_yaml(text, name)
    values, source = apply_overrides(document.value, Source(name, document.lines), overrides)
    return RunConfig.parse(values, source)


def dump_run_file(config: RunConfig) -> str:
    """Return a run file with all of `config`, defaults included, and without credentials.

    >>> config = RunConfig.parse(
    ...     {"max_duration": "2ep", "data": {"target": "my.data:make"}, "batch_size": 64}
    ... )
    >>> parse_run_file(dump_run_file(config)) == config
    True
    """
    values = public(config.model_dump(mode="json"))
    for section in (values, values.get("optimizer", {})):
        for key in ("callbacks", "evaluate", "groups"):
            if section.get(key) in ([], {}):
                del section[key]
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=90)


MAX_ERRORS = 20
"""Most errors that one message lists."""


def explain(error: ValidationError, source: Source) -> ConfigError:
    """Return all that pydantic found in a run file, one message each."""
    found = error.errors(include_url=False)
    messages = list(dict.fromkeys(_message(details, source) for details in found))
    explained = ConfigError(*messages[:MAX_ERRORS])
    if len(messages) > MAX_ERRORS:
        explained.add_note(f"and {len(messages) - MAX_ERRORS} more")
    return explained


def _message(details: ErrorDetails, source: Source) -> Message:
    # Names of shapes, and the mark of a key's own error, are pydantic's and not the file's.
    path = tuple(
        part for part in details["loc"] if part != "[key]" and not str(part).startswith("<")
    )
    where, context = source.where(path), details.get("ctx", {})
    if details["type"] == "value_error":
        error: StrettoError = context["error"]
        return error.message.recast(where, as_key)
    said = details["msg"]
    asked = said.removeprefix("Input should be ")
    number = "a value " if asked.startswith(("greater", "less")) else ""
    instead = said[:1].lower() + said[1:] if said == asked else f"write {number}{asked}"
    if details["type"] == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        near = nearest(details["input"], choices)
        instead = f"did you mean '{near}'?" if near else instead
    return cannot(
        f"use {shown(details['input'])} as {show_path(path)}",
        why="it is not valid here",
        instead=instead,
        where=where,
    )
