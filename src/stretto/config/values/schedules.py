"""How schedules are written in a run file; the keys are the arguments of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator

from stretto.batching.parse import Dialect, without_nulls
from stretto.batching.written import Way
from stretto.config.reading.source import Path
from stretto.config.values.context import CHECKING, Building, read_section
from stretto.config.values.fields import read_time, shown
from stretto.errors import ScheduleError
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


def _checked(value: Any) -> Any:
    build_schedule(value, CHECKING, ())
    return value


ScheduleText: TypeAlias = Annotated[Any, PlainValidator(_checked)]
"""A schedule as a run file holds it, which can be built."""
