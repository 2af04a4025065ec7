"""Batch size policies as they are written: numbers, text, mappings, functions.

A policy class declares its key (`written`); the other keys are the arguments of its constructor.
Run files use the same `Dialect` with a few more keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias, final

from stretto.batching.functions import SizeCallable, SizeFunction
from stretto.batching.policy import (
    COUPLED,
    ORDER,
    RAMPS,
    WAYS,
    WRAPPERS,
    BatchSizePolicy,
    Path,
    Way,
    checked_size,
    flag,
)
from stretto.batching.steps import Fixed, Steps
from stretto.errors import Argument, BatchSizeError, Text, TimeError, nearest, shown
from stretto.timing import Horizon, Time

PolicyLike: TypeAlias = (
    BatchSizePolicy | int | str | Mapping[str, object] | Mapping[Time, int] | SizeCallable
)
"""Anything that `as_policy` reads as a batch size policy."""
_EXAMPLE = (
    "write a number, '0ep:8 1ep:16', or for example {ramp: double, start: 8, end: 64, over: 40%}"
)


@final
@dataclass(frozen=True, slots=True)
class Dialect:
    """The extra keys of a source of policies, and how it locates errors."""

    at: Callable[[Path], AbstractContextManager[None]] = lambda _: nullcontext()
    """Returns a context that adds a path to errors raised inside."""
    function: Callable[[Any, Path], object] = lambda value, _: value
    """Returns the function that a value names."""
    readers: Mapping[str, Callable[[dict[str, Any], Path], BatchSizePolicy]] = field(
        default_factory=dict
    )
    """More keys: each makes a policy from a mapping."""
    even_unit: int | None = None
    """What `even` sizes are a multiple of; None: the key does not exist."""

    def policy(self, value: object, path: Path) -> BatchSizePolicy:
        """Return `value`, which is written at `path`, as a batch size policy."""
        if isinstance(value, BatchSizePolicy):
            return value
        with self.at(path):
            if isinstance(value, Mapping):
                return self._from_mapping(value, path)
            if value == "auto":
                raise _refused(
                    "use 'auto' as the batch size",
                    "the batch size decides what is trained, and is not found by trying",
                    "write a number such as 256, and micro_batch_size='auto'",
                )
            if isinstance(value, str):
                text = value.strip().replace("_", "")
                is_number = text.isascii() and text.isdigit() and len(text) <= 18
                return Fixed(int(text)) if is_number else Steps(value)
            if callable(value) and not isinstance(value, type):
                return SizeFunction(value)
            if hasattr(value, "policy") and hasattr(value, "schedule"):
                raise _refused(
                    f"take {value!r} for batch sizes",
                    "it is a pair of those and a schedule",
                    "pass its policy as the batch size, and schedules={'lr': its schedule}",
                )
            return Fixed(value)  # type: ignore[arg-type]

    def _from_mapping(self, mapping: Mapping[Any, Any], path: Path) -> BatchSizePolicy:
        words = without_nulls(mapping)
        if words and all(_is_time(key) for key in words):
            return Steps(words)
        _check_place(words)
        key = self._way_of(words, path)
        around = [*WRAPPERS, *([] if self.even_unit is None else ["even"])]
        bounds = {word: words.pop(word) for word in around if word in words}
        policy: BatchSizePolicy
        if key in self.readers:
            kept = {word: value for word, value in mapping.items() if word not in around}
            policy = self.readers[key](kept, path)
        else:
            way = self._ramp(words, path) if key == "ramp" else WAYS[key]
            policy = self.made(way, words, path, others=around)
        wrapped = self._wrapped(policy, bounds, path)
        if wrapped is not policy and "maximum" in words:
            _check_reach(policy, wrapped, words, is_bounded="at_most" in bounds)
        return wrapped

    def _way_of(self, words: Mapping[Any, Any], path: Path) -> str:
        """Return the one key that says what a mapping describes."""
        ways = ["ramp", *WAYS, *self.readers]
        given = [key for key in ways if key in words]
        if len(given) > 1:
            raise _refused(
                f"combine {' and '.join(map(repr, given))}",
                "each of them says what the batch size is",
                "keep one",
            )
        if given:
            return given[0]
        # A key of another way is no misspelt one: 'start' is near to 'target'.
        known = {key for way in (*WAYS.values(), *RAMPS.values()) for key in way.parameters()}
        for key in words:
            if key not in known and key not in WRAPPERS and nearest(key, [*ways, *COUPLED]):
                self.unknown(key, [*ways, *COUPLED], path)
        raise _refused(
            f"read {shown(dict(words))} as a batch size", "no key says what the size is", _EXAMPLE
        )

    def _ramp(self, words: Mapping[str, Any], path: Path) -> Way:
        kind = words["ramp"]
        if isinstance(kind, str) and kind in RAMPS:
            return RAMPS[kind]
        with self.at((*path, "ramp")):
            near = nearest(kind, RAMPS)
            raise _refused(
                f"use {shown(kind)} as a ramp",
                "there is no such ramp",
                f"did you mean {near!r}?" if near else f"write {' or '.join(RAMPS)}",
            )

    def made(
        self, way: Way, words: Mapping[str, Any], path: Path, others: Iterable[str] = ()
    ) -> Any:
        """Return what a mapping describes.

        Args:
            way: the way it is written.
            words: its keys and values.
            path: where it is written.
            others: further keys that are allowed.

        Raises:
            BatchSizeError: a key is unknown or missing, or has no such value.
        """
        known = way.parameters()
        given = {key: value for key, value in words.items() if way.argument or key != way.key}
        for key in given:
            if key not in known:
                self.unknown(key, [*known, *others], path)
        missing = [
            key for key, one in known.items() if one.default is one.empty and key not in words
        ]
        if missing:
            raise _refused(
                f"use {shown(dict(words))}",
                f"it has no {missing[0]!r}",
                f"add the key {missing[0]!r}",
            )
        arguments = {}
        for key, value in given.items():
            here = (*path, key)
            with self.at(here):
                arguments[known[key].name] = self._read(known[key].annotation, key, value, here)
        return way.make(**arguments)

    def _read(self, kind: str, key: str, value: Any, path: Path) -> Any:
        """Return the value of an argument; the class checks what is not checked here."""
        match kind.removesuffix(" | None"):
            case "int" | "Size":
                return checked_size(value, key, instead="write a number such as 64")
            case "TimeLike" | "Interval" | "Length":
                return _time(value)
            case "bool":
                return flag(key, value)
            case "PolicyLike" | "Sizes":
                return self.policy(value, path)
            case "Sequence[TimeLike]":
                return [_time(one) for one in _list(key, value, "[50%, 75%]")]
            case "Sequence[int]":
                return _list(key, value, "[8, 16, 64]")
            case "Periods":
                return self._periods(_list(key, value, "[{duration: 10%, size: 8}]"), path)
            case "IncreaseCallable":
                return self.function(value, path)
        return value

    def _periods(self, periods: list[Any], path: Path) -> list[tuple[object, BatchSizePolicy]]:
        pairs = []
        for number, period in enumerate(periods):
            here = (*path, number)
            with self.at(here):
                if not isinstance(period, Mapping) or period.get("duration") is None:
                    raise _refused(
                        f"use {shown(period)} as a period",
                        "it has no 'duration'",
                        "write for example {duration: 10%, size: 8}, or 'duration: rest'",
                    )
                inner = {key: value for key, value in period.items() if key != "duration"}
                policy = self._from_mapping(inner, here)
                pairs.append((self._duration(period["duration"], here), policy))
        return pairs

    def _duration(self, value: object, path: Path) -> object:
        with self.at((*path, "duration")):
            if value in (-1, "-1"):
                raise _refused(
                    f"use {shown(value)} as a duration",
                    "it is not a time",
                    "write 'rest' for what is left of the run",
                )
            return "rest" if value == "rest" else _time(value)

    def _wrapped(
        self, policy: BatchSizePolicy, bounds: Mapping[str, Any], path: Path
    ) -> BatchSizePolicy:
        bounds = self.evened(bounds, path)
        for key in ORDER:
            with self.at((*path, key)):
                if key == "monotone" and key in bounds:
                    policy = WRAPPERS[key].make(policy) if flag(key, bounds[key]) else policy
                elif key in bounds:
                    policy = WRAPPERS[key].make(policy, bounds[key])
        return policy

    def evened(self, words: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """Return the keys with `even` replaced by its `multiple_of`."""
        rest = {key: value for key, value in words.items() if key != "even"}
        with self.at((*path, "even")):
            unit = (self.even_unit or 1) if flag("even", words.get("even", False)) else 1
        if unit > 1:
            with self.at((*path, "multiple_of")):
                rest["multiple_of"] = math.lcm(checked_size(rest.get("multiple_of", 1)), unit)
        return rest

    def unknown(self, key: object, known: Iterable[str], path: Path) -> NoReturn:
        """Raise the error for a key that does not exist.

        Raises:
            BatchSizeError: always.
        """
        near = nearest(key, known)
        with self.at((*path, str(key))):
            raise _refused(
                f"use the key {shown(key)}",
                "there is no such key here",
                f"did you mean {near!r}?" if near else f"the keys are {', '.join(known)}",
            )


PYTHON = Dialect()
"""The dialect of Python."""


def as_policy(value: object) -> BatchSizePolicy:
    """Return `value` as a batch size policy.

    A number is the size of the whole run. Text is a number or steps. A mapping from times is
    steps. A function `(timestamp, current) -> size` is called before every batch. A mapping with
    keywords has one of `ramp` (`linear`, `double` or `stages`, with `start`, `end`, `sizes`,
    `over`, `increment`, `equal`), `steps`, `size`, `periods` (each with a `duration`), `increase`
    (a function, with `start` and `max_batch_size`), or one that follows what is measured, with
    `start` and `maximum`: `noise_scale` (its `c`), `norm_test` (its `eta`) or `plateau` (a metric).
    It may have `power_of_two` (`down` or `up`), `multiple_of`, `hysteresis` (a ratio),
    `monotone: true`, `at_least` and `at_most`, which apply in this order.

    >>> as_policy(64), as_policy("0ep:32 2ep:64")
    (Fixed(64), Steps('0ep:32 2ep:64'))
    >>> as_policy({"ramp": "double", "start": 8, "end": 64, "over": "40%"})
    DoublingRamp(8, 64, '0.4dur')
    >>> as_policy({"ramp": "linear", "start": 8, "end": 64, "over": "1ep", "multiple_of": 8})
    MultipleOf(LinearRamp(8, 64, '1ep'), 8)
    >>> as_policy({"norm_test": 0.5, "start": 8, "maximum": 64})
    NormTest(start=8, maximum=64, minimum=8, window=100, confidence=0.9, eta=0.5)

    Raises:
        BatchSizeError: it is none of these; the message says what to write.
        TimeError: a time cannot be read.
    """
    return PYTHON.policy(value, ())


def without_nulls(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a mapping without its nulls, which mean left out."""
    return {key: value for key, value in mapping.items() if value is not None}


def _check_place(words: Mapping[Any, Any]) -> None:
    """Refuse keys that belong elsewhere."""
    if "duration" in words:
        raise _refused(
            "use the key 'duration'",
            "this is not one of several periods",
            "leave it out, or write 'periods:' with a list",
        )
    for key in COUPLED:
        if key in words:
            raise _refused(
                f"use {key!r} here",
                "its sizes go by the learning rate of the whole run",
                "write it as batch_size itself, and the periods in schedules.lr; "
                f"{key!r} may begin with steps or a ramp",
            )


def _list(key: str, value: object, example: str) -> list[Any]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise _refused(f"use {shown(value)} as {key}", "it is not a list", f"write {example}")
    return [*value]


def _time(value: Any) -> Time:
    # The error about anything else shows it as text, with a unit.
    return Time(value if isinstance(value, (Time, timedelta)) else str(value))


def _check_reach(
    policy: BatchSizePolicy,
    wrapped: BatchSizePolicy,
    words: Mapping[str, Any],
    *,
    is_bounded: bool,
) -> None:
    """Refuse wrappers that exceed the policy's own bounds."""
    horizon = Horizon("1ep")
    inner, outer = policy.bind(horizon).bounds, wrapped.bind(horizon).bounds
    if inner is None or outer is None:
        return
    name = "start" if words.get("minimum") is None else "minimum"
    if outer[1] > inner[1] and not is_bounded:
        name, stated, reached = "maximum", inner[1], outer[1]
    elif outer[0] < inner[0]:
        stated, reached = inner[0], outer[0]
    else:
        return
    raise _refused(
        ("use ", Argument(name, stated)),
        f"the bounds and rounding beside it lead to {reached}",
        f"write {reached}, or other bounds",
    )


def _is_time(key: object) -> bool:
    if isinstance(key, Time):
        return True
    try:
        Time(key)  # type: ignore[arg-type]
    except TimeError:
        # What starts like a number was meant as a time, so that its own error is the right one.
        return not isinstance(key, str) or key[:1].isdigit()
    return True


def _refused(what: Text, why: Text, instead: Text) -> BatchSizeError:
    return BatchSizeError.cannot(what, why=why, instead=instead)
