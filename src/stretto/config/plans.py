"""Plans from run files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast, final

from stretto.batching import BatchSizePolicy, LearningRateRule, Pair, as_rule
from stretto.batching.metrics import check_monitored, followed_metric, metrics_of
from stretto.config.forms import imported
from stretto.config.run import RunConfig
from stretto.config.targets import Target, bound_target, call_target
from stretto.config.yaml import Path, as_key
from stretto.errors import ConfigError, PlanError
from stretto.planning import Plan, Prepared, bind_run
from stretto.planning.bind import check_tokens
from stretto.planning.plan import plan_prepared
from stretto.schedules import Constant, Product, Schedule
from stretto.schedules.fields import Name, parse_name
from stretto.timing import Every, Horizon, Time, Trigger

if TYPE_CHECKING:
    from stretto.data import DataSpec


def make_spec(config: RunConfig) -> DataSpec:
    """Return the training data with the sizes that the file states.

    Raises:
        ConfigError: they cannot be made, have other sizes, or are a `DataLoader` with
            `drop_last=True` and the file has no `last_batch`.
    """
    from stretto.data import DataSpec  # imports torch, which a plan of stated sizes does without

    data = config.data
    with config.source.at("data"):
        spec = DataSpec.of(
            call_target(data, source=config.source, path=("data",)),
            num_samples=data.num_samples,
            num_tokens=data.num_tokens,
            tokens_per_sample=data.tokens_per_sample,
            sharded=data.sharded,
        )
    if spec.last_batch != config.last_batch and "last_batch" not in config.model_fields_set:
        raise ConfigError.cannot(
            "train on a DataLoader with drop_last=True",
            why=f"last_batch is {config.last_batch!r} by default",
            instead=f"write last_batch: {spec.last_batch}, or last_batch: {config.last_batch}",
            where=config.source.where(("data",)),
        )
    return spec


@final
@dataclass(frozen=True, slots=True)
class TimesAndSizes:
    """The times and sizes of a run file, stretched by `scale_schedule`."""

    horizon: Horizon
    policy: BatchSizePolicy
    schedules: Mapping[str, Schedule]
    triggers: Mapping[str, Trigger]
    rule: LearningRateRule | None


def build_run(config: RunConfig, spec: DataSpec | None = None) -> TimesAndSizes:
    """Return the times and sizes of a run file.

    Args:
        config: the run file.
        spec: the data; by default, they are made if the file does not state the number of samples.

    Raises:
        ConfigError: something cannot be built; the message says where it was written.
    """
    ratio, data, source = scale_of(config), config.data, config.source
    counts: dict[str, int | None] = {
        "dataset_num_samples": data.num_samples,
        "dataset_num_tokens": data.num_tokens,
        "tokens_per_sample": data.tokens_per_sample,
    }
    if spec is not None or data.num_samples is None:
        counts = (spec or make_spec(config)).counts
    with source.at("max_duration"):
        run = Horizon(config.max_duration, **counts, last_batch=config.last_batch).scaled(ratio)
    schedules = {
        name: imported(read.value, source, ("schedules", name))
        for name, read in config.schedules.items()
    }

    def scaled(value: Any, *path: str | int) -> Any:
        with source.at(*path):
            return value.scaled(ratio)

    sizes = imported(config.batch_size.value, source, ("batch_size",))
    intervals, rule = _intervals(config), config.rule
    if isinstance(sizes, Pair):
        schedules["lr"], rule, sizes = sizes.schedule, sizes.rule, sizes.policy
    with source.at("rule"):
        if isinstance(rule, Target):
            rule = bound_target(rule, source=source, path=("rule",))
        rule = None if rule is None else as_rule(rule)
    return TimesAndSizes(
        run,
        scaled(sizes, "batch_size"),
        {name: scaled(one, "schedules", name) for name, one in schedules.items()},
        {name: scaled(Every(every), *path) for name, (path, every) in intervals.items()},
        rule,
    )


def scale_of(config: RunConfig) -> Fraction:
    """Return the factor by which `scale_schedule` stretches the run."""
    return Fraction(repr(config.scale_schedule or 1))


def _intervals(config: RunConfig) -> dict[str, tuple[Path, Time]]:
    """Return the path and the interval of everything that recurs in a run."""
    found: dict[str, tuple[Path, Time]] = {}
    for number, one in enumerate(config.evaluate):
        found[f"evaluate {one.name}"] = (("evaluate", number, "every"), one.every)
    if config.checkpoint is not None:
        found["checkpoint"] = (("checkpoint", "every"), cast(Time, config.checkpoint.every))
    found["log"] = (("log", "every"), config.log.every)
    return found


def base_values(config: RunConfig) -> dict[str, float]:
    """Return the stated values that schedules multiply; a plan shows factors of the others.

    Of several values, such as `betas`, the first counts, as in a run's ledger.
    """
    found = {}
    for text in dict.fromkeys(("lr", *config.schedules)):
        name, value = _stated(config, text)
        if isinstance(value, list):
            value = dict(enumerate(value)).get(name.index or 0)
        # Torch refuses anything else when the optimizer is built.
        if type(value) in (int, float) and 0 <= value < math.inf:  # type: ignore[operator]
            found[text] = float(value)  # type: ignore[arg-type]
    return found


def _stated(config: RunConfig, text: str) -> tuple[Name, object]:
    """Return the name of the value that a schedule multiplies, and the value if it is stated."""
    name, optimizer = parse_name(text), config.optimizer
    if optimizer is None:
        return name, None
    group = optimizer.groups.get(name.group or "")
    stated = optimizer.arguments | ({} if group is None else group.arguments)
    name = name.of(stated)
    return name, stated.get(name.key)


def effective(schedules: Mapping[str, Schedule], config: RunConfig) -> dict[str, Schedule]:
    """Return the schedule of each value: `lr@group` is multiplied by `lr`, as in an optimizer.

    An optimizer has a learning rate even if nothing changes it.
    """
    if config.optimizer is not None or config.rule is not None:
        schedules = {"lr": Constant(), **schedules}
    names = {text: _stated(config, text)[0] for text in schedules}
    found = {}
    for text, schedule in schedules.items():
        others = [
            schedules[other]
            for other, name in names.items()
            if other != text and _reaches(name, names[text])
        ]
        found[text] = Product(*others, schedule) if others else schedule
    return found


def _reaches(name: Name, other: Name) -> bool:
    """Return whether a schedule called `name` also changes the value that `other` shows."""
    return (
        name.key == other.key
        and name.group in (None, other.group)
        and name.index in (None, other.index or 0)
    )


MAX_STAGES = 100_000
"""Most stages of the run of a file; a ramp from 32 to 4,096 in steps of one has 4,065."""


def build_plan(config: RunConfig) -> Plan:
    """Return the plan of the run that a file describes.

    >>> config = RunConfig.parse({
    ...     "max_duration": "2ep",
    ...     "data": {"target": "my.data:make", "num_samples": 1000},
    ...     "batch_size": {"ramp": "double", "start": 8, "end": 32, "over": "50%"},
    ... })
    >>> [(stage.size, stage.batches) for stage in build_plan(config).stages]
    [(8, 63), (16, 31), (32, 32)]

    Raises:
        ConfigError: something in the file cannot be built, or does not fit the run.
        PlanError: the batch sizes are decided during the run.
    """
    return plan_of(config, prepare_run(config, build_run(config)))


def plan_of(config: RunConfig, run: Prepared) -> Plan:
    """Return the plan of a run that was prepared from `config`.

    Raises:
        PlanError: the batch sizes are decided during the run, or the ranks cannot share them.
    """
    micro = config.micro_batch_size
    try:
        return plan_prepared(
            run,
            world_size=config.num_data_ranks or 1,
            idle_ranks=config.idle_ranks,
            micro_batch_size=None if micro == "auto" else micro,
            base=base_values(config),
        )
    except PlanError as error:
        where = config.source.where(("batch_size",))
        raise error.recast(PlanError, where=where, word=as_key) from error


def prepare_checked(config: RunConfig, *, resumes: bool = False) -> tuple[TimesAndSizes, Prepared]:
    """Return the run of a file that is planned, with the data that the file does not state.

    Args:
        config: the run file.
        resumes: whether it may continue a run that had other batch sizes.

    Raises:
        ConfigError: as `prepare_run` does; or it follows tokens that the data do not count.
    """
    spec = make_spec(config) if config.data.num_samples is None else None
    run = build_run(config, spec)
    prepared = prepare_run(config, run, resumes=resumes)
    if spec is not None:
        from stretto.data import StepLoader

        loader = StepLoader(spec, prepared, rank=0, world_size=1)
        if not loader.tracks_tokens:
            check_tokens(prepared)
    return run, prepared


def prepare_run(config: RunConfig, run: TimesAndSizes, *, resumes: bool = False) -> Prepared:
    """Bind a run to its horizon and check it, before anything is built.

    Args:
        config: the run file.
        run: what it says of times and sizes.
        resumes: whether it may continue a run that had other batch sizes.

    Raises:
        ConfigError: a piece does not fit the run, or the file contradicts itself.
    """

    def at(kind: str, name: str = "") -> Any:
        if kind == "triggers":
            return config.source.at(*_intervals(config)[name][0])
        return config.source.at(kind, name) if name else config.source.at(kind)

    prepared = bind_run(
        run.horizon,
        run.policy,
        schedules=effective(run.schedules, config),
        triggers=run.triggers,
        rule=run.rule,
        most_stages=MAX_STAGES,
        at=at,
    )
    if prepared.refused is not None and not resumes:
        raise prepared.refused
    measured = metrics_of(config.evaluate)
    with config.source.at("batch_size"):
        followed_metric(prepared.bound_policy.reads, measured)
    if config.checkpoint is not None and config.checkpoint.monitor is not None:
        with config.source.at("checkpoint", "monitor"):
            check_monitored(config.checkpoint.monitor, measured)
    return prepared
