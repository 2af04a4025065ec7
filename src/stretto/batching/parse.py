"""Batch size policies as they are written: numbers, text, mappings, functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn, TypeAlias

from stretto.batching.adaptive.gradient_norm import NormTest
from stretto.batching.adaptive.hysteresis import Hysteresis
from stretto.batching.adaptive.noise_scale import NoiseScale
from stretto.batching.adaptive.plateau import Plateau
from stretto.batching.policy import BatchSizePolicy
from stretto.batching.scheduled.fixed import Fixed, Steps
from stretto.batching.scheduled.functions import SizeCallable, SizeFunction
from stretto.batching.scheduled.periods import PeriodSizes
from stretto.batching.scheduled.ramps import DoublingRamp, LinearRamp, StagedRamp
from stretto.batching.wrappers import AtLeast, AtMost, Monotone, MultipleOf, PowerOfTwo
from stretto.errors import BatchSizeError, TimeError, cannot, nearest, shown
from stretto.timing import Time

PolicyLike: TypeAlias = (
    BatchSizePolicy | int | str | Mapping[str, object] | Mapping[Time, int] | SizeCallable
)
"""What is accepted as a batch size policy at the edges."""

_RAMPS: dict[str, tuple[Callable[..., BatchSizePolicy], tuple[str, ...], tuple[str, ...]]] = {
    "linear": (LinearRamp, ("start", "end", "over"), ("increment", "equal")),
    "double": (DoublingRamp, ("start", "end", "over"), ("equal",)),
    "stages": (StagedRamp, ("sizes", "over"), ("equal",)),
}
# The word is also the name of what is written behind it.
_FOLLOWING: dict[str, tuple[Callable[..., BatchSizePolicy], str, tuple[str, ...]]] = {
    "noise_scale": (NoiseScale, "c", ("power", "minimum", "window", "confidence")),
    "norm_test": (NormTest, "eta", ("minimum", "window", "confidence")),
    "plateau": (Plateau, "metric", ("factor", "patience", "threshold", "mode")),
}
# In this order, whatever the order they are written in: bounds have the last word.
_WRAPPERS: dict[str, Callable[..., BatchSizePolicy]] = {
    "power_of_two": PowerOfTwo,
    "multiple_of": MultipleOf,
    "hysteresis": Hysteresis,
    "monotone": Monotone,
    "at_least": AtLeast,
    "at_most": AtMost,
}
_ALTERNATIVES = ("ramp", "steps", "size", "periods", *_FOLLOWING)


def as_policy(value: object) -> BatchSizePolicy:
    """Return `value` as a batch size policy.

    A number is a size for the whole run; text is steps, or a number; a mapping from times is
    steps; a function `(timestamp, current) -> size` is asked before every batch. A mapping with
    keywords has one of `ramp` (`linear`, `double` or `stages`, with `start`, `end`, `sizes`,
    `over`, `increment`, `equal`), `steps`, `size`, `periods` (each with a `duration`), or one that
    follows what is measured, with `start` and `maximum`: `noise_scale` (its `c`), `norm_test` (its
    `eta`) or `plateau` (a metric). It may have `power_of_two` (`down` or `up`), `multiple_of`,
    `hysteresis` (a ratio), `monotone: true`, `at_least` and `at_most`, which apply in this order.

    >>> as_policy(64), as_policy("0ep:32 2ep:64")
    (Fixed(64), Steps('0ep:32 2ep:64'))
    >>> as_policy({"ramp": "double", "start": 8, "end": 64, "over": "40%"})
    DoublingRamp(start=8, end=64, over=Time('0.4dur'))
    >>> as_policy({"ramp": "linear", "start": 8, "end": 64, "over": "1ep", "multiple_of": 8})
    MultipleOf(LinearRamp(start=8, end=64, over=Time('1ep'), increment=1), 8)
    >>> as_policy({"norm_test": 0.5, "start": 8, "maximum": 64})
    NormTest(start=8, maximum=64, eta=0.5, minimum=8, window=100, confidence=0.9)

    Raises:
        BatchSizeError: it is none of these; the message says what to write.
        TimeError: a time cannot be read.
    """
    if isinstance(value, BatchSizePolicy):
        return value
    if isinstance(value, str):
        text = value.strip().replace("_", "")
        if text.isascii() and text.isdigit() and len(text) <= 18:
            return Fixed(int(text))
        return Steps(value)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if callable(value) and not isinstance(value, type):
        return SizeFunction(value)
    _check_no_pair(value)
    return Fixed(value)  # type: ignore[arg-type]


def _check_no_pair(value: object) -> None:
    # Here, because a pair reads its own sizes by `as_policy`.
    from stretto.batching.coupled.coupling import Coupling

    if isinstance(value, Coupling):
        raise BatchSizeError(
            cannot(
                f"take {value!r} for batch sizes",
                why="it is a pair of those and a schedule",
                instead="pass its policy as the batch size, and schedules={'lr': its schedule}",
            )
        )


def _from_mapping(mapping: Mapping[object, object]) -> BatchSizePolicy:
    if all(_is_time(key) for key in mapping):
        return Steps(mapping)  # type: ignore[arg-type]
    given = [key for key in _ALTERNATIVES if key in mapping]
    words = {key: value for key, value in mapping.items() if key not in _WRAPPERS}
    known = {*_ALTERNATIVES, *_WRAPPERS}
    if len(given) != 1:
        why = "it has none of the words that say what the size is"
        if given:
            why = f"{' and '.join(map(repr, given))} exclude each other"
        else:
            _check_words(mapping, known)
        _refuse(mapping, why, f"one of {_listed(_ALTERNATIVES)}")
    kind = given[0]
    if kind == "ramp":
        policy = _ramp(words)
    elif kind in _FOLLOWING:
        policy = _following(str(kind), words)
    else:
        _check_words(mapping, {kind, *_WRAPPERS})
        policy = _periods(words[kind]) if kind == "periods" else as_policy(words[kind])
    for name, wrap in _WRAPPERS.items():
        if name == "monotone" and name in mapping:
            policy = _monotone(mapping, policy)
        elif name in mapping:
            policy = wrap(policy, mapping[name])
    return policy


def _ramp(words: Mapping[object, object]) -> BatchSizePolicy:
    kind = words["ramp"]
    if not isinstance(kind, str) or kind not in _RAMPS:
        _refuse(
            words,
            f"there is no ramp {shown(kind)}",
            f"{_nearest(kind, _RAMPS)}one of {_listed(_RAMPS)}",
        )
    make, needed, optional = _RAMPS[kind]
    _check_words(words, {"ramp", *needed, *optional})
    missing = [name for name in needed if name not in words]
    if missing:
        _refuse(words, f"{missing[0]!r} is missing", f"{_listed(needed)} with it")
    return make(**{str(name): value for name, value in words.items() if name != "ramp"})


def _following(kind: str, words: Mapping[object, object]) -> BatchSizePolicy:
    make, name, optional = _FOLLOWING[kind]
    needed = ("start", "maximum")
    _check_words(words, {kind, *needed, *optional})
    missing = [word for word in needed if word not in words]
    if missing:
        _refuse(words, f"{missing[0]!r} is missing", f"{_listed(needed)} with it")
    return make(**{name if word == kind else str(word): value for word, value in words.items()})


def _periods(value: object) -> BatchSizePolicy:
    if isinstance(value, str) or not isinstance(value, Iterable):
        _refuse({"periods": value}, "its periods are not a list", "a list of periods")
    pairs = []
    for item in value:
        if not isinstance(item, Mapping) or "duration" not in item:
            example = "{duration: 10%, size: 8}"
            _refuse({"periods": value}, f"{item!r} is not a period with a duration", example)
        rest = {key: entry for key, entry in item.items() if key != "duration"}
        pairs.append((item["duration"], _from_mapping(rest)))
    return PeriodSizes(pairs)


def _monotone(mapping: Mapping[object, object], policy: BatchSizePolicy) -> BatchSizePolicy:
    if mapping["monotone"] is not True:
        _refuse(mapping, "'monotone' is not true", "monotone: true, or leave it out")
    return Monotone(policy)


def _is_time(key: object) -> bool:
    if isinstance(key, Time):
        return True
    try:
        Time(key)  # type: ignore[arg-type]
    except TimeError:
        # What starts like a number was meant as a time, so that its own error is the right one.
        return not isinstance(key, str) or key[:1].isdigit()
    return True


def _check_words(mapping: Mapping[object, object], known: Iterable[str]) -> None:
    known = sorted(known)
    for word in mapping:
        if word not in known:
            near = _nearest(word, known)
            _refuse(mapping, f"it does not know {word!r}", f"{near}one of {_listed(known)}")


def _nearest(word: object, known: Iterable[str]) -> str:
    close = nearest(word, known)
    return f"{close!r}, or " if close else ""


def _listed(words: Iterable[str]) -> str:
    return ", ".join(map(repr, words))


def _refuse(mapping: Mapping[object, object], why: str, write: str) -> NoReturn:
    raise BatchSizeError(
        cannot(f"read {shown(dict(mapping))} as a batch size", why=why, instead=f"write {write}")
    )
