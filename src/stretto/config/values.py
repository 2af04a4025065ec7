"""Batch sizes and schedules in run files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeAlias, final

from pydantic import PlainValidator

from stretto.batching import BatchSizePolicy, SizeFunction, rampup
from stretto.batching.parse import Dialect, without_nulls
from stretto.batching.policy import COUPLED, Way
from stretto.config.fields import read_time, shown
from stretto.config.settings import CHECKING, Building, read_section
from stretto.config.source import Path
from stretto.errors import BatchSizeError, ScheduleError
from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    Periods,
    Polynomial,
    Product,
    Schedule,
    StepDecay,
    as_schedule,
)
from stretto.timing import TimeLike


def coupled_key(value: object) -> str | None:
    """Return the key that couples a batch size with the learning rate, if there is one.

    >>> coupled_key({"seesaw": 16})
    'seesaw'
    """
    words = value if isinstance(value, Mapping) else {}
    return next((key for key in COUPLED if words.get(key) is not None), None)


def build_sizes(
    value: Any, schedules: Mapping[str, Schedule], building: Building, path: Path
) -> tuple[BatchSizePolicy, Mapping[str, Schedule]]:
    """Return the policy that a `batch_size` says, and what becomes of the schedules with it.

    Sizes that take over the decay of the learning rate take it from its schedule.

    >>> from stretto.schedules import Linear
    >>> build_sizes({"seesaw": 16}, {"lr": Linear()}, Building(), ("batch_size",))
    (Seesaw(Linear(), Fixed(16)).policy, {'lr': Seesaw(Linear(), Fixed(16)).schedule})

    Raises:
        ConfigError: it cannot be built; the message says where it stands.
    """
    key = coupled_key(value)
    dialect = FileWords(building).dialect
    if key is None:
        return dialect.policy(value, path), schedules
    way = replace(COUPLED[key], make=partial(COUPLED[key].make, schedules["lr"]))
    with dialect.at(path):
        words = dialect.evened(without_nulls(value), path)
        pair = dialect.made(way, words, path, others=["even"])
    return pair.policy, {**schedules, "lr": pair.schedule}


@final
@dataclass(frozen=True, slots=True)
class FileWords:
    """The keys of a batch size that only a run file has: they need imports, or the ranks."""

    building: Building

    @property
    def dialect(self) -> Dialect:
        """What `as_policy` reads, and these keys."""
        building = self.building
        return Dialect(
            at=building.at,
            function=lambda value, path: building.function(read_section(value, path), path),
            readers={"target": self.of_target, "rampup": self.of_rampup},
            even_unit=building.even_unit,
        )

    def of_target(self, words: dict[str, Any], path: Path) -> BatchSizePolicy:
        """Return a policy of yours, or a function; keys that it does not take are arguments."""
        options = {key: words[key] for key in ("every", "planned") if words.get(key) is not None}
        rest = {key: value for key, value in words.items() if key not in ("every", "planned")}
        target = read_section(rest, path)
        if self.building.is_class(target.target, BatchSizePolicy, path):
            policy: BatchSizePolicy = self.building.made(
                read_section({**rest, **options}, path), path
            )
            return policy
        function = self.building.function(target, path)
        way = Way(partial(SizeFunction, function, None), "target", None)
        return self.dialect.made(way, {**options, "target": ""}, path)  # type: ignore[no-any-return]

    def of_rampup(self, words: dict[str, Any], path: Path) -> BatchSizePolicy:
        """Return a ramp in numbers of micro-batches."""
        way = Way(self.rampup, "rampup", "final_size")
        others = ["rampup"]
        return self.dialect.made(way, without_nulls(words), path, others)  # type: ignore[no-any-return]

    def rampup(
        self,
        final_size: int,
        over: TimeLike,
        *,
        initial_global_train_batch_size: int | None = None,
    ) -> BatchSizePolicy:
        """Doubles up to a final size, by gradient accumulation alone.

        Args:
            final_size: the size from `over` on: a multiple of world_size * micro_batch_size, like
                every other.
            over: how long the ramp is, from the start of the run.
            initial_global_train_batch_size: the size of the first batch; left out, the lowest
                possible, world_size * micro_batch_size.
        """
        building = self.building
        micro = building.micro_batch_size if building.imports else 1  # checking knows no ranks
        if micro is None:
            raise BatchSizeError.cannot(
                f"ramp up to {final_size} by gradient accumulation",
                why="the run file states no micro-batch size",
                instead="write micro_batch_size: 8, or another ramp such as "
                f"{{ramp: double, start: 8, end: {final_size}, over: {over}}}",
            )
        return rampup(
            final_size,
            over,
            world_size=building.world_size,
            micro_batch_size=micro,
            initial_global_train_batch_size=initial_global_train_batch_size,
        )


def _checked(value: Any) -> Any:
    build_sizes(value, {"lr": Cosine()}, CHECKING, ())
    return value


BatchSize: TypeAlias = Annotated[Any, PlainValidator(_checked)]
"""Samples of one optimizer step over all ranks, in any of the ways to write it."""


KINDS: Mapping[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "cosine_restarts": CosineRestarts,
    "polynomial": Polynomial,
    "exponential": Exponential,
    "step": StepDecay,
    "multi_step": MultiStep,
    "inverse_sqrt": InverseSqrt,
    "wsd": WSD,
}
"""The schedules that a run file can name, each by the key that stands for it."""


def build_schedule(value: Any, building: Building, path: Path) -> Schedule:
    """Return the schedule that a run file says; several in a list multiply.

    Raises:
        ConfigError: a target cannot be imported or called, or the schedule cannot be.
    """
    if not isinstance(value, list):
        return _one(value, building, path)
    with building.at(path):
        items = [_one(item, building, (*path, n)) for n, item in enumerate(_items(value))]
    return items[0] if len(items) == 1 else Product(*items)


def _one(value: Any, building: Building, path: Path) -> Schedule:
    with building.at(path):
        if isinstance(value, (int, float)):
            return Constant(value)
        words = _mapping(value, "write for example {cosine: {end: 0.1}}, or a number")
        if "duration" in words:
            why = "this is not one of several periods"
            instead = "leave it out, or write 'periods:' with a list"
            raise ScheduleError.cannot("use the key 'duration'", why=why, instead=instead)
        return _of_kind(words, building, path)


def _of_kind(words: dict[str, Any], building: Building, path: Path) -> Schedule:
    if "target" in words:
        return as_schedule(building.function(read_section(words, path), path))
    names, dialect = [*KINDS, "periods", "target"], Dialect(at=building.at)
    for key in words:
        if key not in names:
            dialect.unknown(key, names, path)
    if len(words) != 1:
        raise ScheduleError.cannot(
            f"follow {' and '.join(words)} at once" if words else "follow no schedule",
            why="a schedule is one of them" if words else "its kind is not said",
            instead="write one, or a list of several, which multiply"
            if words
            else "write for example cosine: {end: 0.1}, or constant: {}",
        )
    [(name, inside)] = words.items()
    here = (*path, name)
    with building.at(here):
        if name != "periods":
            way = Way(KINDS[name], "", "")
            known = way.parameters()
            keys = f"such as {{{next(iter(known))}: ...}} (its keys are {', '.join(known)})"
            arguments = _mapping(inside, f"write keys with values, {keys}")
            return dialect.made(way, arguments, here)  # type: ignore[no-any-return]
        periods = enumerate(_items(inside))
        return Periods([_period(one, building, (*here, number)) for number, one in periods])


def _period(value: Any, building: Building, path: Path) -> tuple[Any, Schedule]:
    with building.at(path):
        words = _mapping(value, "write for example {duration: 5%, linear: {start: 0, end: 1}}")
        duration = words.pop("duration", None)
        if duration is None:
            instead = "write how long it is, such as 'duration: 10%', or 'duration: rest'"
            raise ScheduleError.cannot("use a period", why="it has no 'duration'", instead=instead)
        if duration not in ("rest", -1, "-1"):  # Periods says what to write instead of -1
            with building.at((*path, "duration")):
                duration = read_time(duration)
        return duration, _of_kind(words, building, path)


def _mapping(value: Any, instead: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return without_nulls(value)
    what = f"use {shown(value)} as a schedule"
    raise ScheduleError.cannot(what, why="it is not a mapping", instead=instead)


def _items(value: Any) -> list[Any]:
    if isinstance(value, list) and value:
        return value
    why = "it is empty" if value == [] else "it is not a list"
    instead = "write items in brackets, or one '- item' per line"
    raise ScheduleError.cannot(f"use {shown(value)} here", why=why, instead=instead)


def _checked_of_schedules(value: Any) -> Any:
    build_schedule(value, CHECKING, ())
    return value


ScheduleText: TypeAlias = Annotated[Any, PlainValidator(_checked_of_schedules)]
"""A schedule as a run file holds it, which can be built."""
