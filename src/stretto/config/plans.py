"""Plans from run files."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast, final

from stretto.batching import BatchSizePolicy, Fixed, LearningRateRule
from stretto.batching.following import check_monitored, followed_metric, metrics_of
from stretto.config.forms import build_schedule, build_sizes
from stretto.config.run import RunConfig
from stretto.config.settings import Building, Optimizer, build_rule
from stretto.config.targets import call_target, import_target
from stretto.config.yaml import Path, Source, as_key
from stretto.errors import ConfigError, Place, PlanError, shown
from stretto.planning import Plan, Prepared, bind_run
from stretto.planning.plan import plan_prepared
from stretto.schedules import Constant, Product, Schedule
from stretto.schedules.fields import Name, check_index, find_name, parse_name
from stretto.timing import Every, Horizon, Time, Trigger

if TYPE_CHECKING:
    from stretto.data import DataSpec


def make_spec(config: RunConfig) -> DataSpec:
    """Return the training data with the sizes that the file states.

    Raises:
        ConfigError: they cannot be made, have other sizes, or are a `DataLoader` with
            `drop_last=True` and the file does not say `last_batch`.
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
            why=f"last_batch is {config.last_batch!r} if the run file does not say it",
            instead=f"write last_batch: {spec.last_batch}, or last_batch: {config.last_batch}",
            where=config.source.where(("data",)),
        )
    return spec


def data_counts(config: RunConfig, spec: DataSpec | None = None) -> dict[str, int | None]:
    """Return what a `Horizon` has to know of the data, by the names of its arguments.

    Args:
        config: the run file.
        spec: the data; left out, they are made if the file does not state the number of samples.

    Raises:
        ConfigError: the data are needed and cannot be made.
    """
    data = config.data
    if spec is None and data.num_samples is not None:
        return {
            "dataset_num_samples": data.num_samples,
            "dataset_num_tokens": data.num_tokens,
            "tokens_per_sample": data.tokens_per_sample,
        }
    return (spec or make_spec(config)).counts


@final
@dataclass(frozen=True, slots=True)
class TimesAndSizes:
    """What a run file says about time and sizes, as objects; `scale_schedule` is in all of them."""

    horizon: Horizon
    policy: BatchSizePolicy
    schedules: Mapping[str, Schedule]
    triggers: Mapping[str, Trigger]
    places: Mapping[str, Path]
    """The key in the run file of each trigger's time."""
    rule: LearningRateRule | None


def build_run(
    config: RunConfig, spec: DataSpec | None = None, *, world_size: int = 1
) -> TimesAndSizes:
    """Return what a run file says about time and sizes.

    Args:
        config: the run file.
        spec: the data; left out, they are made if the file does not state the number of samples.
        world_size: how many ranks.

    Raises:
        ConfigError: something cannot be built; the message says where it stands.
    """
    building = Building(world_size, planned_micro_batch_size(config))
    ratio, counts = scale_of(config), data_counts(config, spec)
    with config.source.at("max_duration"):
        run = Horizon(config.max_duration, **counts, last_batch=config.last_batch).scaled(ratio)
    written = {
        name: build_schedule(value, building, config.source, ("schedules", name))
        for name, value in config.schedules.items()
    }
    policy, schedules = build_sizes(config.batch_size, written, building, config.source)
    scaled, triggers, intervals = {}, {}, _intervals(config)
    with config.source.at("batch_size"):
        policy = policy.scaled(ratio)
    for name, schedule in schedules.items():
        with config.source.at("schedules", name):
            scaled[name] = schedule.scaled(ratio)
    for name, (path, every) in intervals.items():
        with config.source.at(*path):
            triggers[name] = Every(every).scaled(ratio)
    rule = config.rule
    return TimesAndSizes(
        run,
        policy,
        scaled,
        triggers,
        {name: path for name, (path, _) in intervals.items()},
        None if rule is None else build_rule(rule, config.source, ("rule",)),
    )


def scale_of(config: RunConfig) -> Fraction:
    """Return how many times as long as written the run is."""
    return Fraction(repr(config.scale_schedule or 1))


def planned_micro_batch_size(config: RunConfig) -> int | None:
    """Return the micro-batch size of a plan; None where only training finds it."""
    return None if config.micro_batch_size == "auto" else config.micro_batch_size


def _intervals(config: RunConfig) -> dict[str, tuple[Path, Time]]:
    """What happens now and then in a run: where that is said, and how often."""
    found: dict[str, tuple[Path, Time]] = {}
    for number, one in enumerate(config.evaluations):
        within = (number,) if isinstance(config.evaluate, list) else ()
        found[f"evaluate {one.name}"] = (("evaluate", *within, "every"), one.every)
    if config.checkpoint is not None:
        found["checkpoint"] = (("checkpoint", "every"), cast(Time, config.checkpoint.every))
    found["log"] = (("log", "every"), config.log.every)
    return found


_SINGLE = ("lr", "momentum", "weight_decay")
"""What is one number in each of torch's optimizers that has it."""


def base_values(config: RunConfig) -> dict[str, float]:
    """Return what the schedules multiply: the optimizer's own values, stated or its defaults.

    Raises:
        ConfigError: the optimizer must be asked for a default and cannot be imported, or it has
            no such value.
    """
    optimizer = config.optimizer
    if optimizer is None:
        return {}
    found = {}
    for text in dict.fromkeys(("lr", *config.schedules)):
        name, value = _value(optimizer, text, config.source)
        if isinstance(value, (list, tuple)):
            # Of several the first stands for all, as in a run's ledger.
            value = dict(enumerate(value)).get(name.index or 0)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[text] = float(value)
    return found


def effective(schedules: Mapping[str, Schedule], config: RunConfig) -> dict[str, Schedule]:
    """Return what each value follows: `lr@group` is multiplied by `lr`, as in an optimizer.

    An optimizer has a learning rate also where nothing moves it.

    Raises:
        ConfigError: the optimizer must be asked for a default and cannot be imported.
    """
    optimizer = config.optimizer
    if optimizer is not None or config.rule is not None:
        schedules = {"lr": Constant(), **schedules}
    names = {
        text: parse_name(text) if optimizer is None else _value(optimizer, text, config.source)[0]
        for text in schedules
    }
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
    """Whether a schedule called `name` also moves the value that `other` is shown as."""
    return (
        name.key == other.key
        and name.group in (None, other.group)
        and name.index in (None, other.index or 0)
    )


def check_optimizer(config: RunConfig) -> None:
    """Refuse values and schedules that the optimizer cannot have, without building it.

    Torch's own optimizers are known to make their parameter groups of their arguments; another
    target is asked for less.

    Raises:
        ConfigError: a value that is scheduled is no number, or there is no such value or group.
    """
    optimizer = config.optimizer
    if optimizer is None:
        return
    names = {text: parse_name(text) for text in config.schedules}
    for text, name in names.items():
        _check_group(optimizer, text, name, config.source.where(("schedules", text)))
    found = {text: _value(optimizer, text, config.source) for text in names}
    for text, (name, value) in found.items():
        if name.index is not None and value is not None:
            with config.source.at("schedules", text):
                check_index(text, name, value)
    keys = {*_SINGLE, "betas", *(name.key for name, _ in found.values())}
    for path, settings in _settings(optimizer):
        for key in sorted(keys & settings.keys()):
            _check_number(optimizer, (*path, key), settings[key], config.source)


def _check_group(optimizer: Optimizer, text: str, name: Name, where: Place) -> None:
    known = [*optimizer.groups, "rest"] if optimizer.groups else ["0"]
    is_known = bool(optimizer.groups) or _is_torchs(optimizer)
    if is_known and name.group is not None and name.group not in known:
        raise ConfigError.cannot(
            f"schedule {text!r}",
            why=f"the optimizer has no such parameter group (it has {', '.join(known)})",
            instead="write the name of one of them, or add it to optimizer.groups",
            where=where,
        )


def _check_number(optimizer: Optimizer, path: Path, value: object, source: Source) -> None:
    items = value if isinstance(value, list) and value and path[-1] not in _SINGLE else [value]
    for item in items:
        is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
        is_finite = is_number and math.isfinite(item)  # type: ignore[arg-type]
        is_right = is_finite and (item >= 0 or not _is_torchs(optimizer))  # type: ignore[operator]
        # What another optimizer makes of a text or a mapping is its own affair.
        if not is_right and (is_number or _is_torchs(optimizer)):
            raise ConfigError.cannot(
                f"use {shown(value)} as {'.'.join(map(str, path))}",
                why="it is not a finite number of at least 0",
                instead="write a number such as 3.0e-4",
                where=source.where(path),
            )


def _settings(optimizer: Optimizer) -> Iterator[tuple[Path, dict[str, Any]]]:
    yield ("optimizer",), optimizer.arguments
    for name, group in optimizer.groups.items():
        yield ("optimizer", "groups", name), group.options


def _value(optimizer: Optimizer, text: str, source: Source) -> tuple[Name, object]:
    """The value that a schedule multiplies: stated, or the default in the optimizer's signature."""
    name = parse_name(text)
    group = optimizer.groups.get(name.group or "")
    stated = {**optimizer.arguments, **({} if group is None else group.options)}
    if stated.get(name.key) is not None:
        return name, stated[name.key]
    settings = _defaults(optimizer, source) | {
        key: tuple(value) if isinstance(value, list) else value for key, value in stated.items()
    }
    if _is_torchs(optimizer):
        with source.at("schedules", text):
            name = find_name(text, settings)
    else:
        name = name.of(settings)
    return name, settings.get(name.key)


def _defaults(optimizer: Optimizer, source: Source) -> dict[str, object]:
    function = import_target(optimizer.target, where=source.where(("optimizer", "target")))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}  # written in C without a signature
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _is_torchs(optimizer: Optimizer) -> bool:
    module = optimizer.target.partition(":")[0]
    return module == "torch.optim" or module.startswith("torch.optim.")


MAX_STAGES = 100_000
"""Most stages of the run of a file; a ramp from 32 to 4,096 in steps of one has 4,065."""


def build_plan(config: RunConfig, *, world_size: int | None = None) -> Plan:
    """Return the plan of the run that a file describes.

    >>> config = RunConfig.parse({
    ...     "max_duration": "2ep",
    ...     "data": {"target": "my.data:make", "num_samples": 1000},
    ...     "batch_size": {"ramp": "double", "start": 8, "end": 32, "over": "50%"},
    ... })
    >>> [(stage.size, stage.batches) for stage in build_plan(config).stages]
    [(8, 63), (16, 31), (32, 32)]

    Args:
        config: the run file.
        world_size: how many ranks; left out, those that the file states, or one.

    Raises:
        ConfigError: what it says cannot be built, or not on this run.
        PlanError: only the run itself can tell its batch sizes.
    """
    world_size = world_size or config.world_size or 1
    run = build_run(config, world_size=world_size)
    prepared = prepare_run(config, run)
    return plan_of(config, prepared, world_size=world_size)


def plan_of(config: RunConfig, run: Prepared, *, world_size: int = 1) -> Plan:
    """Return the plan of a run that was prepared from `config`.

    Raises:
        PlanError: only the run itself can tell its batch sizes, or the ranks cannot share them.
    """
    try:
        return plan_prepared(
            run,
            world_size=world_size,
            micro_batch_size=planned_micro_batch_size(config),
            base=base_values(config),
        )
    except PlanError as error:
        raise error.recast(
            PlanError, where=config.source.where(("batch_size",)), word=as_key
        ) from error


def ends_of(
    config: RunConfig,
    run: TimesAndSizes,
    bounds: tuple[int, int],
    *,
    world_size: int = 1,
) -> tuple[Plan, Plan]:
    """Return the plans of a run with the smallest and with the largest size that it may decide.

    Raises:
        ConfigError: a piece does not fit the run.
        PlanError: the ranks cannot share the smallest size.
    """
    smallest, largest = (
        plan_of(
            config,
            prepare_run(config, replace(run, policy=Fixed(size))),
            world_size=world_size,
        )
        for size in bounds
    )
    return smallest, largest


def prepare_run(config: RunConfig, run: TimesAndSizes) -> Prepared:
    """Bind a run, and refuse what cannot be, as far as that is known before anything is built.

    Raises:
        ConfigError: a piece does not fit the run, or the file contradicts itself.
    """

    def at(kind: str, name: str = "") -> Any:
        if kind == "triggers":
            return config.source.at(*run.places[name])
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
    check_optimizer(config)
    measured = metrics_of(config.evaluations)
    with config.source.at("batch_size"):
        followed_metric(prepared.bound_policy.reads, measured)
    if config.checkpoint is not None and config.checkpoint.monitor is not None:
        with config.source.at("checkpoint", "monitor"):
            check_monitored(config.checkpoint.monitor, measured)
    return prepared
