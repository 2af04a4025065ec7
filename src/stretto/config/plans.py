"""Plans from run files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, final

from stretto.batching import BatchSizePolicy, Rule, as_rules
from stretto.batching.metrics import check_monitored, followed_metric, metrics_of
from stretto.batching.rows import as_lengths
from stretto.batching.seesaw import paired
from stretto.config.run import RunConfig
from stretto.config.targets import Function, Maker, Target, bound_target, call_target, import_target
from stretto.config.yaml import Path
from stretto.errors import ConfigError, PlanError
from stretto.planning import Plan, Prepared, bind_run
from stretto.planning.bind import check_tokens
from stretto.planning.plan import plan_prepared
from stretto.schedules import Constant, Custom, Product, Schedule, as_schedule
from stretto.schedules.fields import Timed
from stretto.schedules.names import Name, parse_name
from stretto.settings import Loading
from stretto.timing import Horizon, TimeLike, TimeUnit, Trigger, parse_trigger

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
            call_target(data),
            num_samples=data.num_samples,
            num_tokens=data.num_tokens,
            tokens_per_sample=data.tokens_per_sample,
            sharded=data.sharded,
        )
    if spec.last_batch != "keep" and config.last_batch is None:
        raise ConfigError.cannot(
            "train on a DataLoader with drop_last=True",
            why="last_batch is 'keep' by default",
            instead=f"write last_batch: {spec.last_batch}, or last_batch: keep",
            where=config.source.where(("data",)),
        )
    return spec


def make_loading(config: RunConfig) -> Loading:
    """Return how samples are ordered and fetched."""
    loading: Loading = imported(config, config.loading, "loading")
    return replace(loading, seed=config.seed, last_batch=config.last_batch)


def imported(config: RunConfig, value: Any, *path: str | int) -> Any:
    """Return a value of a run file with the functions and objects that its targets name, or make.

    Raises:
        ConfigError: a target cannot be imported or called.
    """

    def make(section: Target, path: Path) -> Any:
        with config.source.at(*path):
            if isinstance(section, Maker):
                import_target(section.target)  # it is called with an optimizer
                return section
            return bound_target(section) if isinstance(section, Function) else call_target(section)

    with config.source.at(*path):
        return with_targets(value, path, make)


def with_targets(value: Any, path: Path, make: Callable[[Target, Path], Any]) -> Any:
    """Return a value of a run file with what `make` returns for each target in it."""

    def change(found: object) -> Any:
        if isinstance(found, Target):
            return make(found, path) if found.target else found
        if not isinstance(found, Timed):
            return found
        function = getattr(found, "function", None)
        if not isinstance(function, Function):
            return found.replaced(change)
        made = make(function, path)
        if isinstance(found, Custom):
            return as_schedule(made)
        return made if isinstance(made, BatchSizePolicy) else replace(found, function=made)  # type: ignore[type-var]

    if isinstance(value, dict):
        return {name: with_targets(one, (*path, name), make) for name, one in value.items()}
    if isinstance(value, list):
        return [with_targets(one, (*path, number), make) for number, one in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, (Timed, Target)):
        own = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        return replace(value, **with_targets(own, path, make))  # type: ignore[type-var]
    return change(value)


@final
@dataclass(frozen=True, slots=True)
class TimesAndSizes:
    """The times and sizes of a run file, with its targets imported."""

    horizon: Horizon
    policy: BatchSizePolicy
    schedules: Mapping[str, Schedule]
    values: Mapping[str, Schedule]
    rules: Mapping[str, Rule]


def build_run(config: RunConfig, spec: DataSpec | None = None) -> TimesAndSizes:
    """Return the times and sizes of a run file, before `scale_schedule` stretches them.

    Args:
        config: the run file.
        spec: the data; by default, they are made if the file does not state the number of samples.

    Raises:
        ConfigError: something cannot be built; the message says where it was written.
    """
    data, source = config.data, config.source
    counts: dict[str, int | None] = {
        "dataset_num_samples": data.num_samples,
        "dataset_num_tokens": data.num_tokens,
        "tokens_per_sample": data.tokens_per_sample,
    }
    ends, lengths = config.last_batch or ("carry" if data.is_endless else "keep"), None
    if spec is not None or data.is_opened:
        spec = spec or make_spec(config)
        counts, lengths = spec.counts, spec.ordered_lengths(make_loading(config))
    schedules = imported(config, config.schedules, "schedules")
    sizes = imported(config, config.batch_size, "batch_size")
    with source.at("rule"):
        rules = as_rules(imported(config, config.rule, "rule"))
    with source.at("batch_size"):
        sizes, schedules, rules = paired(sizes, schedules, rules)
    with source.at("max_duration"):
        run = Horizon(config.max_duration, **counts, last_batch=ends, lengths=lengths)
    values = imported(config, config.values, "values")
    return TimesAndSizes(run, sizes, schedules, values, rules)


def _triggers(config: RunConfig) -> dict[str, tuple[Path, TimeLike | Trigger]]:
    """Return the path and the value of each interval in a run file, by the name of its event."""
    found: dict[str, tuple[Path, TimeLike | Trigger]] = {
        f"evaluate {one.name}": (("evaluate", number, "every"), one.every)
        for number, one in enumerate(config.evaluate)
    }
    if config.checkpoint is not None:
        found["checkpoint"] = ("checkpoint", "every"), config.checkpoint.every
    return {**found, "log": (("log", "every"), config.log.every)}


def base_values(config: RunConfig) -> dict[str, float]:
    """Return the stated values that schedules multiply; a plan shows factors of the others.

    Of several values, such as `betas`, the first counts, as in a run's ledger.
    """
    found = {}
    for text in dict.fromkeys(("lr", *as_rules(config.rule), *config.schedules)):
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
    stated = {**optimizer.arguments, **({} if group is None else group.arguments)}
    name = name.of(stated)
    return name, stated.get(name.key)


def effective(schedules: Mapping[str, Schedule], config: RunConfig) -> dict[str, Schedule]:
    """Return the schedule of each value: `lr@group` is multiplied by `lr`, as in an optimizer.

    An optimizer has a learning rate even if nothing changes it.
    """
    unscheduled = [*(["lr"] if config.optimizer is not None else []), *as_rules(config.rule)]
    schedules = {**dict.fromkeys(unscheduled, Constant()), **schedules}
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
    ...     "batch_size": {"DoublingRamp": {"start": 8, "end": 32, "over": "50%"}},
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
        if run.is_read and (config.data.is_endless or config.data.is_opened):
            return _in_full_batches(config, run)
        return plan_prepared(
            run,
            world_size=config.num_data_ranks or 1,
            idle_ranks=config.idle_ranks,
            micro_batch_size=None if micro == "auto" else micro,
            base=base_values(config),
        )
    except PlanError as error:
        where = config.source.where(("batch_size",))
        raise error.recast(PlanError, where=where) from error


def _in_full_batches(config: RunConfig, run: Prepared) -> Plan:
    """Return the plan of a run wholly in tokens as if each was a sample, so batches are full.

    Raises:
        PlanError: something in it follows samples.
    """
    is_in_samples = type(config.micro_batch_size) is int
    if is_in_samples or any(TimeUnit.SAMPLE in units for units in run.reads.values()):
        run.planned_sizes()  # refuses
    sizes = replace(config.data, target=None, arguments={}, num_samples=None, tokens_per_sample=1)
    full = replace(config, data=sizes)
    planned = plan_of(full, prepare_run(full, build_run(full)))
    if config.data.is_endless:
        return planned
    line = "only reading tells how many tokens each sample has: here batches are full, and no "
    return replace(planned, warnings=(f"{line}epoch ends", *planned.warnings))


def prepare_checked(config: RunConfig, *, resumes: bool = False) -> tuple[TimesAndSizes, Prepared]:
    """Return the run of a file that is planned, with the data that the file does not state.

    Args:
        config: the run file.
        resumes: whether it may continue a run that had other batch sizes.

    Raises:
        ConfigError: as `prepare_run` does; or it follows tokens that the data do not count.
    """
    spec = make_spec(config) if config.data.is_opened else None
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
    triggers = _triggers(config)
    paths: dict[Path, Path] = {("triggers", name): path for name, (path, _) in triggers.items()}

    def at(*path: str) -> Any:
        return config.source.at(*paths.get(path, path))

    def scaled(value: Any, *path: str) -> Any:
        with at(*path):
            return value.scaled(config.scale_schedule or 1)

    schedules = {name: scaled(one, "schedules", name) for name, one in run.schedules.items()}
    lengths = config.sequence_length
    prepared = bind_run(
        scaled(run.horizon, "max_duration"),
        scaled(run.policy, "batch_size"),
        schedules=effective(schedules, config),
        values={name: scaled(one, "values", name) for name, one in run.values.items()},
        triggers={
            name: scaled(parse_trigger(every), "triggers", name)
            for name, (_, every) in triggers.items()
        },
        rule=run.rules,
        sequence_length=lengths and scaled(as_lengths(lengths), "sequence_length"),
        most_stages=MAX_STAGES,
        at=at,
    )
    if prepared.refused is not None and not resumes:
        raise prepared.refused
    measured = metrics_of(config.evaluate)
    with config.source.at("schedules" if prepared.metrics else "batch_size"):
        followed_metric(prepared.bound_policy.reads | prepared.metrics, measured)
    if config.checkpoint is not None and config.checkpoint.monitor is not None:
        with config.source.at("checkpoint", "monitor"):
            check_monitored(config.checkpoint.monitor, measured)
    return prepared
