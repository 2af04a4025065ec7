"""`RunConfig`: the content of a run file, and its sections."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, final

import yaml

from stretto._location import local_path, open_plain, public
from stretto.batching import AsManyAsFit, Fixed, Pair, PiecewiseConstant, SizeFunction, Tokens
from stretto.batching.policy import FoundSize, PositiveInt
from stretto.batching.rows import as_lengths
from stretto.batching.rules import Referenced, RuleLike
from stretto.batching.steps import PolicyLike
from stretto.config.kinds import Mistakes, parameters_of, section
from stretto.config.targets import TARGET_PATTERN, Function, Target, TargetText
from stretto.config.yaml import (
    MAX_BYTES,
    NO_SOURCE,
    Dumper,
    Source,
    apply_overrides,
    parse_yaml,
)
from stretto.errors import ConfigError, StrettoError
from stretto.schedules import Custom, Periods, Product, ScheduleLike
from stretto.schedules.fields import Check, Interval, Positive, Timed
from stretto.schedules.names import parse_name
from stretto.schedules.periods import Until
from stretto.settings import DATA_DIMENSIONS, Checkpointing, Loading, Precision, Stepping
from stretto.timing import LastBatch, Time, TimeLike
from stretto.timing.time import read_run


def _pattern(value: str, name: str, error: type[StrettoError]) -> str:
    try:
        re.compile(value)
    except (re.error, OverflowError) as wrong:
        why = f"it is not a regular expression: {wrong}"
        raise error.bad(name, value, why, "write for example embedding") from None
    return value


def _valid(is_valid: Callable[[Any], object], text: str, example: object) -> Check:
    def checked(value: Any, name: str, error: type[StrettoError]) -> Any:
        if not is_valid(value):
            raise error.bad(name, value, f"it is not {text}", f"write for example {example}")
        return value

    return Check(checked)


RunLength: TypeAlias = Annotated[TimeLike, Check(lambda value, *_: read_run(value))]
Seed: TypeAlias = Annotated[int, _valid(range(2**63).__contains__, "from 0 to 2^63 - 1", 7)]
_WORD = _valid(re.compile(r"[\w.-]+").fullmatch, "one word, in which '.' and '-' may be", "test")
_FOLDER = Check(lambda value, *_: str(local_path(value, "keep a run in", ConfigError)))
Folder: TypeAlias = Annotated[str, _FOLDER]
_LENGTHS = Check(lambda value, *_: str(as_lengths(value)))
SequenceLength: TypeAlias = Annotated[int | str | dict[str, PositiveInt], _LENGTHS]
HyperparameterName: TypeAlias = Annotated[str, Check(lambda value, *_: parse_name(value) and value)]


@final
@dataclass(frozen=True, kw_only=True)
class Data(Target):
    """Where samples come from, and how many there are."""

    target: TargetText | None = None  # type: ignore[assignment]
    """Makes the data. A plan needs none if it needs no more than the sizes that follow."""
    num_samples: PositiveInt | None = None
    """Samples in an epoch. With it, a plan does not open the data."""
    num_tokens: PositiveInt | None = None
    """Tokens in an epoch."""
    tokens_per_sample: PositiveInt | None = None
    """Tokens of a sample, if all have equally many."""
    sharded: bool | None = None
    """Whether the iterable of each rank has only its share of the samples; by default no, and the
    first batches are compared over the ranks."""

    def __post_init__(self) -> None:
        if self.target is None and self.arguments:
            key, why = next(iter(self.arguments)), "these data have no target that could take it"
            instead = "write 'target: my.data:make', or only sizes such as num_samples"
            raise ConfigError.cannot(f"use the key {key!r}", why=why, instead=instead)

    @property
    def is_opened(self) -> bool:
        """Whether a plan has to make the data to know the number of samples."""
        return self.target is not None and self.num_samples is None

    @property
    def is_endless(self) -> bool:
        """Whether no epoch ends in a plan, as nothing says how long one is."""
        return self.target is None and self.num_samples is None


@final
@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters with settings of their own; all other keys are the optimizer's."""

    parameters: Annotated[str, Check(_pattern)]
    """A regular expression, found anywhere in a parameter's name."""
    arguments: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True)
class Optimizer(Target):
    """The optimizer: called with the model's parameters and its other keys."""

    groups: dict[str, Group] = field(default_factory=dict)
    """Groups by name, for `lr@name`; a parameter belongs to the first whose pattern it matches."""


@final
@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """What is measured during the run, and always at its end."""

    every: Interval = Time("1ep")
    """How often."""
    data: Target | None = None
    """What to measure on; by default the run's data with `split: validation`."""
    metrics: dict[str, Function] = field(default_factory=dict)
    """By name: functions `function(model, batch) -> mean over the batch`, or classes whose objects
    have update, compute and reset, such as those of torchmetrics."""
    predict: Function | None = None
    """A function `(model, batch) -> (outputs, targets)` for the `update` of such objects; by
    default both are read from the batch."""
    batch_size: PositiveInt | None = None
    """Samples of one forward pass; by default the training micro-batch."""
    name: Annotated[str, _WORD] = "validation"
    """What its lines in the metrics begin with."""
    loss: Function | None = None
    """By default the training loss."""


@final
@dataclass(frozen=True, kw_only=True)
class Log:
    """When metrics are written, and where they go besides the run folder."""

    every: Interval = Time("10ba")
    """How often a line of metrics is written."""
    flush: Interval = Time("30s")
    """How often written lines are flushed to the disk."""
    loggers: list[Literal["tensorboard", "wandb", "mlflow"] | Target] | None = None
    """Where metrics go besides metrics.jsonl; by default TensorBoard if it is installed."""
    console: bool | None = None
    """Whether the console shows the progress of the run; by default with `stretto train`, and on a
    terminal."""


@final
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run file: its length, data, model, batch sizes, schedules and settings.

    >>> config = RunConfig.parse(
    ...     {"max_duration": "2ep", "data": {"target": "my.data:make"}, "batch_size": 64}
    ... )
    >>> config.max_duration, config.batch_size
    (Time('2ep'), Fixed(64))
    """

    max_duration: RunLength
    """The length of the run, in any unit but `dur`."""
    model: Target | None = None
    """Makes the model. A plan needs none."""
    data: Data = Data()
    """Makes the training data. A plan needs none."""
    optimizer: Optimizer | None = None
    """Makes the optimizer. A plan needs none."""
    loss: Function | None = None
    """`function(model, batch) -> loss`; by default the `loss` of the model's class."""
    step: Target | None = None
    """Makes a `stretto.TrainStep` of yours: called with `model`, with `optimizer` if the file has
    one, and with `loss` if it takes one."""
    micro_batch_size: FoundSize | None = None
    """Most samples of one forward and backward pass on one rank, or most tokens, such as `8Ktok`;
    `auto`: as many samples as fit into memory; by default all its share."""
    world_size: PositiveInt | None = None
    """How many ranks a plan is for; by default one. Training has those that torchrun starts."""
    schedules: dict[HyperparameterName, ScheduleLike] = field(default_factory=dict)
    """What multiplies each hyper-parameter, by its name: `lr`, `weight_decay`, `betas.0`,
    `lr@group`."""
    batch_size: PolicyLike | Pair
    """Samples of one optimizer step, over all ranks."""
    values: dict[str, ScheduleLike] = field(default_factory=dict)
    """Numbers of your own on the clock, by name, for your loss or callbacks: `mtp_weight`."""
    rule: RuleLike | None = None
    """How the learning rate follows the batch size, a rule or a function of yours; or values by
    name, `{betas.1: {half_life: 256}}`; by default not at all."""
    sequence_length: SequenceLength | None = None
    """Tokens of a sequence, which consecutive samples are joined to; by default those of a
    sample."""
    last_batch: LastBatch | None = None
    """What happens if an epoch ends inside a batch: `keep` a smaller one (the default), `drop` it,
    or `carry` on."""
    precision: Precision = "fp32"
    """The type that autocast computes in; weights stay as they are."""
    clip_norm: Positive | None = None
    """The largest norm of the whole step's gradient."""
    compile: bool = False
    """Whether the model runs through `torch.compile`."""
    device: str | None = None
    """Where to compute; by default this rank's CUDA device if there is one, else the CPU."""
    loading: Loading = Loading()
    """How samples are ordered and fetched."""
    stepping: Stepping = Stepping()
    """How a step is computed."""
    evaluate: list[Evaluate] = field(default_factory=list)
    """What is measured during the run; one mapping or a list of them."""
    checkpoint: Checkpointing | None = None
    """When checkpoints are written; by default never."""
    log: Log = Log()
    """When metrics are written."""
    callbacks: list[Target] = field(default_factory=list)
    """Listeners and algorithms: each makes a `stretto.training.Callback`."""
    folder: Folder | None = None
    """Where the run is kept; by default a new folder in `runs`."""
    seed: Seed = 0
    """Seed of the order of samples, and of all chance in building and training the model."""
    parallel: Literal["ddp", "fsdp"] | Target = "ddp"
    """How several ranks share the model: each has all of it, or a part of each block (FSDP2); or a
    function of yours, `function(model, mesh) -> model`."""
    mesh: dict[str, PositiveInt] | None = None
    """The sizes of a device mesh of all ranks, by the names of its dimensions, such as
    `{dp_replicate: 2, dp_shard: 4}`. Those that `stretto.distributed.Mesh` knows share out the
    samples, all others the model."""
    idle_ranks: bool = False
    """Whether a batch may have fewer samples than there are ranks; the others then run dummies."""
    scale_schedule: Positive | None = None
    """Makes the run this many times as long, with every time that is not a fraction of it. The
    number of samples in the data stays."""
    source: Source = field(default=NO_SOURCE, repr=False)
    """Where the values were written, for messages."""

    @classmethod
    def parse(cls, values: object, source: Source = NO_SOURCE) -> Self:
        """Return the configuration that plain values describe.

        Raises:
            ConfigError: some are wrong; every mistake is listed.
        """
        mistakes = Mistakes(source)
        found: Self = mistakes.read(section(RunConfig), of_seeds(values), ())
        mistakes.check()
        return replace(found, source=source)

    def __post_init__(self) -> None:
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
        if self.mesh is None:
            return self.world_size
        return math.prod(size for name, size in self.mesh.items() if name in DATA_DIMENSIONS)


def of_seeds(values: Any) -> Any:
    """Return values with the keys of torchtune's adaptive batching (its RFC 2199) as ours.

    >>> of_seeds({"batch_size": 8, "use_maximum_batch_size": True})
    {'batch_size': 8, 'micro_batch_size': 'auto'}
    >>> of_seeds({"use_maximum_batch_size": True})
    {'batch_size': 'auto'}
    """
    if not isinstance(values, dict):
        return values
    found, uses = dict(values), values.get("use_maximum_batch_size")
    size = "micro_batch_size" if "batch_size" in found else "batch_size"
    if uses is False or (uses is True and size not in found):
        del found["use_maximum_batch_size"]
        found |= {size: "auto"} if uses else {}
    function = found.get("batch_increase_function")
    if type(found.get("batch_size")) is int and isinstance(function, dict):
        grow = {"function": found.pop("batch_increase_function"), "start": found["batch_size"]}
        found["batch_size"] = {"IncreaseFunction": {**grow, "max_batch_size": "auto"}}
    return found


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
    >>> parse_run_file(text, overrides=["batch_size=32"]).batch_size
    Fixed(32)

    Raises:
        ConfigError: it is not YAML, or something in it is wrong.
    """
    return RunConfig.parse(*apply_overrides(*parse_yaml(text, name), overrides))


def dump_run_file(config: RunConfig) -> str:
    """Return a run file with all of `config`, defaults included, and without credentials.

    >>> config = RunConfig.parse(
    ...     {"max_duration": "2ep", "data": {"target": "my.data:make"}, "batch_size": 64}
    ... )
    >>> parse_run_file(dump_run_file(config)) == config
    True
    """
    values = public(written(config))
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=90)


_ALONE: Mapping[type, str] = {Fixed: "size", Product: "schedules", Custom: "function"}
"""What is written as its one argument alone."""


def written(value: Any) -> Any:
    """Return the plain values that a run file has for a value: what it is read from.

    >>> from stretto import Cosine
    >>> written({"lr": Cosine(end=0.1, warmup="5%")})
    {'lr': {'Cosine': {'end': 0.1, 'warmup': '0.05dur'}}}
    """
    if isinstance(value, (Time, Tokens, Until, PiecewiseConstant)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [written(one) for one in value]
    if isinstance(value, dict):
        return {name: written(one) for name, one in value.items()}
    if value == AsManyAsFit():
        return value.size
    if type(value) in _ALONE:
        return written(getattr(value, _ALONE[type(value)]))
    if isinstance(value, (Timed, Referenced)):
        kind: Any = type(value)
        own = {
            name: getattr(value, name)
            for name, one in parameters_of(kind).items()
            if one.default is one.empty or getattr(value, name) != one.default
        }
        if isinstance(value, Periods) and value.names:
            own = {"periods": dict(zip(value.names, value.periods, strict=True))}
        # A bare target is read as this policy, or as `Custom`; others have a function as well.
        is_plain = kind is SizeFunction and [*own] == ["function"]
        name = "from_torch" if "factory" in own else kind.__name__
        return written(own["function"] if is_plain else {name: own})
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = [name for name in parameters_of(type(value)) if name != "arguments"]
    found = {name: written(getattr(value, name)) for name in names}
    kept = {name: one for name, one in found.items() if one is not None}
    return kept | written(getattr(value, "arguments", {}))


TIME_PATTERN = (
    r"^\s*[0-9][0-9_]*(\.[0-9]+|/[0-9][0-9_]*)?([eE][+-]?[0-9]+)?"
    r"(%|([KMBT]|[KMGT]i)?(ep|ba|sp|tok|dur|sec)|[dhms]([0-9dhm./]*[hms])?)\s*$"
)
"""What an editor can check of a time; the whole grammar is that of `Time`."""


def run_file_schema() -> dict[str, Any]:
    """Return the JSON Schema of run files.

    What needs the whole file or Python (that a warm-up fits, that a target exists) is beyond a
    schema. Nulls, which count as absent, are not among the suggestions.

    >>> run_file_schema()["required"]
    ['max_duration', 'batch_size']
    """
    parts: dict[str, Any] = {
        "Time": {
            "description": "An amount and a unit: 90ep, 500ba, 1_000sp, 2Btok, 0.1dur, 10%, 1h30m.",
            "type": "string",
            "pattern": TIME_PATTERN,
        }
    }
    section(RunConfig).schema(parts)
    for part in parts.values():
        if "target" in part.get("properties", ()):
            part["properties"]["target"]["pattern"] = TARGET_PATTERN
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **parts.pop("RunConfig"),
        "title": "stretto run file",
        "description": "What a training run is. Times have a unit, as in docs/guides/time.md.",
        "$defs": parts,
    }
