"""Settings of a run: how data are loaded, how a step is computed, which checkpoints are kept.

Each field is declared here, once. Run files derive their keys, checks and schema from these
classes, so this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, replace
from dataclasses import fields as fields_of
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, final

from stretto._foreign import check_foreign, knows_foreign
from stretto.errors import ConfigError, TrainingError, shown
from stretto.schedules import fields
from stretto.timing import LastBatch, Time, TimeLike, Trigger, read_wall_clock
from stretto.timing.grammar import checked_whole

__all__ = ["Checkpointing", "Loading", "Precision", "Stepping"]

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
DATA_DIMENSIONS = ("dp", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp")
"""Names of dimensions of a mesh that are data-parallel unless something else is said."""
WallClock: TypeAlias = Annotated[TimeLike, fields.Check(lambda value, *_: read_wall_clock(value))]
"""A time on the wall clock that is longer than nothing."""
Kind = TypeVar("Kind")


@knows_foreign
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How samples are ordered and fetched.

    >>> Loading(seed=7, num_workers=2).seed
    7

    Raises:
        ConfigError: a number is out of range.
    """

    seed: int = 0
    """Seed of the order of samples; nothing else depends on it."""
    shuffle: bool | None = None
    """Whether each epoch has an order of its own; by default yes, or as a given `DataLoader`."""
    last_batch: LastBatch | None = None
    """What happens where an epoch ends inside a batch: `keep` the smaller one, `drop` it, or
    `carry` on; None: `keep`, or `drop` as a given `DataLoader` with `drop_last=True`."""
    num_workers: int | None = None
    """Processes that fetch samples; 0 fetches in the training process. By default 0, or as a given
    `DataLoader`."""
    prefetch_factor: int | None = None
    """Elements that each worker fetches ahead."""
    pin_memory: bool | None = None
    """Whether batches are copied to pinned memory; of no effect without an accelerator. By default
    no, or as a given `DataLoader`."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; by default as torch does."""
    packed: bool = False
    """Whether `collate_fn` joins samples without padding. A micro-batch with a budget of tokens
    then costs the sum of its lengths, else its rows times its longest sample."""
    keyed_randomness: bool = False
    """Whether chance inside the data set depends on (seed, epoch, sample) alone."""

    def __post_init__(self) -> None:
        for name, least in (("num_workers", 0), ("prefetch_factor", 1)):
            value = getattr(self, name)
            if value is not None:
                instead = "write a number such as 2, or leave it out"
                checked_whole(
                    value, ConfigError, f"use {name}={shown(value)}", instead, least=least
                )
        if self.prefetch_factor is not None and self.num_workers == 0:
            why, instead = "nothing is fetched ahead without workers", "write num_workers=2"
            raise ConfigError.bad("prefetch_factor", self.prefetch_factor, why, instead)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """The arguments of a `Trainer`, and the keys of a run file, that say how a model computes.

    >>> Computing(precision="bf16", clip_norm=1.0).compile
    False

    Raises:
        ConfigError: there is no such precision, or `clip_norm` is not a positive number.
    """

    precision: Precision = "fp32"
    """The type that autocast computes in; weights stay as they are."""
    clip_norm: float | None = None
    """The largest norm of the whole step's gradient."""
    compile: bool = False
    """Whether the model runs through `torch.compile`."""
    device: str | None = None
    """Where to compute; by default this rank's CUDA device if there is one, else the CPU."""

    def __post_init__(self) -> None:
        fields.one_of(self.precision, "precision", ("fp32", "bf16", "fp16"), ConfigError)
        norm: object = self.clip_norm
        is_number = isinstance(norm, (int, float)) and not isinstance(norm, bool)
        if norm is not None and not (is_number and norm > 0):  # type: ignore[operator]
            raise ConfigError.bad("clip_norm", norm, "it is not positive", "write 1.0")


@knows_foreign
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """How one optimizer step is computed.

    >>> Stepping(loss_weight="tokens").loss_reduction
    'mean'

    Raises:
        ConfigError: a value is not one of those that exist, or `measure_noise` no number of steps.
        TimeError: `rank_timeout` is not a wall-clock time.
    """

    loss_weight: Literal["samples", "tokens"] | Callable[[Any], int] = "samples"
    """What the loss is a mean over: samples, target tokens, or what a function counts."""
    shifts_labels: bool | None = None
    """With `loss_weight="tokens"`: whether the model shifts labels of the shape of its inputs, so
    that the first label of each sequence is no target. By default, the first labels that differ
    from each other decide: labels that are the inputs are shifted in the model, as Hugging Face's
    causal models do; labels that are the inputs one place further, or anything else, such as
    classes of tokens, all count."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """What the loss function returns."""
    non_finite: Literal["stop", "skip", "ignore"] = "stop"
    """What happens to a step whose loss or gradient is nan or infinite. `stop`: the run ends with
    the weights from before it. `skip`: the step is skipped and counted. `ignore`: there is no
    check. If the loss scaling of fp16 overflows, the step is always skipped."""
    measure_noise: Literal["auto"] | int | None = "auto"
    """How often the noise of the gradient is measured where a policy or a callback reads it: once
    in so many steps; `"auto"`: in each; None: never."""
    rank_timeout: WallClock | None = None
    """How long a rank waits for the others before the run ends with an error that names those that
    did not come, such as `"10m"`; by default as long as the process group does (torch: 10 minutes
    with NCCL, 30 with gloo)."""

    def __post_init__(self) -> None:
        if not callable(self.loss_weight) or isinstance(self.loss_weight, type):
            fields.one_of(self.loss_weight, "loss_weight", ("samples", "tokens"), ConfigError)
        if self.shifts_labels is not None and self.loss_weight != "tokens":
            why = "the loss is not weighed by target tokens"
            raise ConfigError.bad("shifts_labels", self.shifts_labels, why, "leave it out")
        fields.one_of(self.loss_reduction, "loss_reduction", ("mean", "sum"), ConfigError)
        fields.one_of(self.non_finite, "non_finite", ("stop", "skip", "ignore"), ConfigError)
        steps: object = self.measure_noise
        if steps not in ("auto", None):
            what = f"measure the noise of the gradient in one of {shown(steps)} steps"
            instead = "write a number of steps such as 10, or leave measure_noise out"
            checked_whole(steps, ConfigError, what, instead)
        if self.rank_timeout is not None:
            read_wall_clock(self.rank_timeout)

    @property
    def steps_between_noise(self) -> int:
        """In how many steps the noise is measured once.

        Raises:
            TrainingError: it is never measured.
        """
        if self.measure_noise is None:
            raise TrainingError.cannot(
                "follow the noise of the gradient",
                why="measure_noise is None",
                instead="leave measure_noise out",
            )
        return 1 if self.measure_noise == "auto" else self.measure_noise

    def counted(self, count: Callable[[Any], Any]) -> Stepping:
        """Return these settings with a function that counts what the loss is a mean over."""
        return self if callable(self.loss_weight) else replace(self, loss_weight=count)

    @property
    def longest_wait(self) -> timedelta | None:
        """How long a rank waits for the others; None: as long as the process group does."""
        if self.rank_timeout is None:
            return None
        return timedelta(seconds=float(read_wall_clock(self.rank_timeout).amount))


@knows_foreign
@final
@dataclass(frozen=True, slots=True)
class Checkpointing:
    """When checkpoints are written and how many of them are kept.

    With `monitor` there is one more: that of the best evaluation so far, written when it is
    measured.

    >>> Checkpointing("30m", keep=2, monitor="validation/loss").mode
    'min'

    Raises:
        ConfigError: `keep` is not at least 1, or there is no such mode.
    """

    every: TimeLike | Trigger = "1ep"
    """How often; there is always one at the end."""
    keep: int = 3
    """How many of the newest stay."""
    monitor: str | None = None
    """The metric whose best value's checkpoint stays, such as `"validation/loss"`."""
    mode: Literal["min", "max"] = "min"
    """Whether less or more of the metric is better."""
    upload: Any = None
    """Where copies go in the background: an address that fsspec knows, such as `"s3://bucket/run"`,
    or a `stretto.checkpoint.Store` of yours. Training never waits for it. Endpoints and keys are
    those of fsspec, such as `FSSPEC_S3='{"endpoint_url": ...}'`."""

    def __post_init__(self) -> None:
        fields.one_of(self.mode, "mode", ("min", "max"), ConfigError)
        what = f"keep {self.keep!r} checkpoints"
        instead = "write how many of the newest to keep, such as 3"
        checked_whole(self.keep, ConfigError, what, instead)


def is_needed(one: Field[Any]) -> bool:
    """Return whether a field has no default."""
    return one.default is MISSING and one.default_factory is MISSING


def read_settings(kind: type[Kind], given: Any, name: str) -> Kind:
    """Return settings from themselves, a mapping of their fields, or how often they are due.

    >>> read_settings(Checkpointing, "30m", "checkpoint").every, read_settings(
    ...     Loading, {"seed": 3}, "loading"
    ... ).seed
    ('30m', 3)

    Raises:
        ConfigError: it is none of these, or has another field.
    """
    if isinstance(given, kind):
        return given
    needed = [one.name for one in fields_of(kind) if is_needed(one)]  # type: ignore[arg-type]
    names = [one.name for one in fields_of(kind)]  # type: ignore[arg-type]
    is_time = "every" in names and isinstance(given, (str, Time, Trigger, timedelta))
    if isinstance(given, Mapping) or is_time:
        fields_given: Mapping[str, Any] = {"every": given} if is_time else given
        check_foreign(map(str, fields_given), names)
        for missing in (one for one in needed if one not in fields_given):
            raise ConfigError.cannot(
                f"use {name}={shown(given)}",
                why=f"it has no {missing}",
                instead=f"write {name}={kind.__name__}({missing}, ...)",
            )
        return kind(**fields_given)
    example = f"{name}='1ep'" if "every" in names else f"{name}={{{names[0]!r}: ...}}"
    raise ConfigError.cannot(
        f"use {name}={shown(given)}",
        why=f"it is a {type(given).__name__}",
        instead=f"write {example}, or {name}={kind.__name__}(...)",
    )
