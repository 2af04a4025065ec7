"""What a run file says about time and sizes, as objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, cast, final

from stretto.batching import BatchSizePolicy, LearningRateRule
from stretto.config.building.data import data_counts
from stretto.config.reading.source import Path
from stretto.config.run import RunConfig
from stretto.config.values.batch_sizes import build_sizes
from stretto.config.values.context import Building
from stretto.config.values.schedules import build_schedule
from stretto.config.values.settings import build_rule
from stretto.schedules import Schedule
from stretto.timing import Every, Horizon, Time, Trigger

if TYPE_CHECKING:
    from stretto.data import DataSpec


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
    building = Building(world_size, planned_micro_batch_size(config), config.source)
    ratio, counts = scale_of(config), data_counts(config, spec)
    with config.source.at("max_duration"):
        run = Horizon(config.max_duration, **counts, last_batch=config.last_batch).scaled(ratio)
    written = {
        name: build_schedule(value, building, ("schedules", name))
        for name, value in config.schedules.items()
    }
    policy, schedules = build_sizes(config.batch_size, written, building, ("batch_size",))
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
        None if rule is None else build_rule(rule, building, ("rule",)),
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
