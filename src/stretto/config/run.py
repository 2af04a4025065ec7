"""`RunConfig`: the content of a run file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)

from stretto._location import local_path
from stretto.batching import Coupling
from stretto.config.fields import Count, CountOrAuto, RunLength, Section, shape_of, without_nulls
from stretto.config.forms import AnySchedule, BatchSize
from stretto.config.messages import explain
from stretto.config.settings import (
    AnyRule,
    Checkpoint,
    Data,
    Evaluate,
    LoadingSection,
    Log,
    Optimizer,
    SteppingSection,
)
from stretto.config.targets import Target
from stretto.config.yaml import (
    MAX_BYTES,
    NO_SOURCE,
    Dumper,
    Source,
    apply_overrides,
    parse_yaml,
    source_name,
)
from stretto.errors import ConfigError
from stretto.schedules.fields import parse_name
from stretto.settings import Loading, Precision, Stepping
from stretto.timing import LastBatch


def _local(folder: str) -> str:
    local_path(folder, "keep a run in", ConfigError)
    return folder


Evaluations: TypeAlias = Annotated[
    Annotated[Evaluate, Tag("<Evaluate>")] | Annotated[list[Evaluate], Tag("<list>")],
    shape_of(
        lambda value: "<list>" if isinstance(value, list) else "<Evaluate>",
        "write for example {every: 1ep}",
    ),
]


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
    evaluate: Evaluations | None = None
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
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several ranks share the model: each has all of it, or a part of each block (FSDP2)."""
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

    @property
    def evaluations(self) -> tuple[Evaluate, ...]:
        """The evaluations, in their order."""
        if self.evaluate is None:
            return ()
        return tuple(self.evaluate) if isinstance(self.evaluate, list) else (self.evaluate,)

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        names = [evaluation.name for evaluation in self.evaluations]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError.cannot(
                f"evaluate twice as {twice!r}",
                why="their metrics would have the same names",
                instead="give each evaluation another 'name'",
            )
        is_coupled = isinstance(self.batch_size.value, Coupling)
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


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run file at `path`, with `key=value` overrides.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode()
    except (OSError, ValueError) as error:
        raise ConfigError.cannot(
            f"read {str(path)!r}",
            why=(getattr(error, "strerror", None) or str(error)).lower(),
            instead="write the path of a run file in UTF-8, or none for the packaged one",
        ) from None
    return parse_run_file(text, source_name(path), overrides)


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
    """Return a run file with all of `config`, defaults included.

    >>> config = RunConfig.parse(
    ...     {"max_duration": "2ep", "data": {"target": "my.data:make"}, "batch_size": 64}
    ... )
    >>> parse_run_file(dump_run_file(config)) == config
    True
    """
    values = config.model_dump(mode="json")
    for section, key in ((values, "callbacks"), (values.get("optimizer", {}), "groups")):
        if not section.get(key):
            section.pop(key, None)
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=90)
