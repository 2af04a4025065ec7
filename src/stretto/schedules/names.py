"""Names of hyper-parameters: `lr`, `betas.0`, `lr@head`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat, TypeVar, final

from stretto.errors import ScheduleError, nearest

Found = TypeVar("Found")
_FORM = re.compile(r"([^\W\d]\w*)(?:\.([0-9]{1,4}))?(?:@(.+))?", re.DOTALL)


@final
@dataclass(frozen=True, slots=True)
class Name:
    """A hyper-parameter, an index into its values, and a parameter group."""

    key: str
    index: int | None = None
    """The index of one value, such as 0 for beta1; None: all values."""
    group: str | None = None
    """The name or the number of a parameter group; None: all groups."""

    def of(self, settings: Mapping[str, Any]) -> Name:
        """Return the name; `momentum` means beta1 if `settings` only have betas.

        Torch's `OneCycleLR` and `CyclicLR` do the same.

        >>> Name("momentum").of({"lr": 0.1, "betas": (0.9, 0.999)})
        Name(key='betas', index=0, group=None)
        """
        if self.key == "momentum" and "momentum" not in settings and "betas" in settings:
            return Name("betas", self.index or 0, self.group)
        return self


def parse_name(text: object) -> Name:
    """Return the parts of the name of a scheduled value.

    >>> parse_name("betas.0@head")
    Name(key='betas', index=0, group='head')

    Raises:
        ScheduleError: it is not the name of a scheduled value.
    """
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        why = "it is not the name of a hyper-parameter"
        instead = "write for example 'lr' or 'betas.0'"
        raise ScheduleError.cannot(f"schedule {text!r}", why=why, instead=instead)
    key, index, group = match.groups()
    return Name(key, None if index is None else int(index), group)


def find_name(text: str, settings: Mapping[str, Any]) -> Name:
    """Return the name of a number among the `settings` of an optimizer.

    >>> find_name("momentum", {"lr": 0.1, "betas": (0.9, 0.999), "amsgrad": False})
    Name(key='betas', index=0, group=None)

    Raises:
        ScheduleError: there is no such number.
    """
    name = parse_name(text).of(settings)
    keys = [key for key, value in settings.items() if _is_numeric(value)]
    if name.key not in keys:
        is_rate = name.key.lower() in ("learning_rate", "learningrate")
        close = "lr" if is_rate else nearest(name.key, keys)
        why = f"the optimizer has no such number (it has {', '.join(keys)})"
        instead = f"write {close!r}" if close else "write one of those"
        raise ScheduleError.cannot(f"schedule {text!r}", why=why, instead=instead)
    check_index(text, name, settings[name.key])
    return name


def most_specific(
    found: Mapping[str, Found], name: Name, settings: Mapping[str, Any]
) -> Found | None:
    """Return what is said of one value, by the name that says most; a group counts before an index.

    >>> most_specific({"lr": 1, "lr@head": 2}, Name("lr", group="head"), {"lr": 0.1})
    2

    Raises:
        ScheduleError: two names say it alike, such as `momentum` and `betas.0`.
    """
    reach: dict[tuple[bool, bool], str] = {}
    for text in found:
        other = parse_name(text).of(settings)
        is_of_value = other.index in (None, name.index or 0) and other.group in (None, name.group)
        if other.key == name.key and is_of_value:
            place = other.group is not None, other.index is not None
            if place in reach:
                why, instead = "both are of one value", "leave one out"
                what = f"follow {reach[place]!r} and {text!r}"
                raise ScheduleError.cannot(what, why=why, instead=instead)
            reach[place] = text
    return found[reach[max(reach)]] if reach else None


def check_group(text: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a name of a hyper-parameter in a group that there is not.

    Raises:
        ScheduleError: no group has that name.
    """
    name = parse_name(text)
    names = [group_name(number, other) for number, other in enumerate(groups)]
    if names.count(str(name.group)) > 1 and not all("name" in one for one in groups):
        why = f"a group is called {name.group!r}, and that is the number of another"
        raise ScheduleError.cannot(f"schedule {text!r}", why=why, instead="name all groups")
    if name.group is not None and name.group not in names:
        raise ScheduleError.cannot(
            f"schedule {text!r}",
            why=f"the optimizer has no such parameter group (it has {', '.join(names)})",
            instead=f"write '{name.key}@{names[0]}', or give the group that name",
        )


_INDEX = re.compile(r"\.[0-9]+$")
_OWN = re.compile(r"[^\W\d][\w.-]*")
_TAKEN = frozenset(
    (
        *("lr", "loss", "ep", "ba", "sp", "tok", "dur", "sec", "batch", "epoch", "sample", "token"),
        *("size", "tokens", "micro_batches", "decided_size", "batch_size", "micro_batch_size"),
        *("samples_per_second", "tokens_per_second", "memory_peak_bytes", "skipped_steps"),
        *("grad_norm", "noise_scale", "noise_scale_low", "noise_scale_high"),
        *("step_seconds", "sample_seconds"),
    )
)
"""What the ledger and the metrics have columns for."""


def check_value_names(values: Iterable[object], taken: Iterable[str]) -> None:
    """Refuse names of values of your own that are no words, or that something else has.

    >>> check_value_names(["mtp_weight", "mixture.code"], taken=["lr", "weight_decay"])

    Raises:
        ScheduleError: a name is one of the clock, the metrics or a hyper-parameter, or no word.
    """
    others = _TAKEN.union(taken)
    for name in values:
        why = "a hyper-parameter, its rule, or a column of the metrics has that name"
        if not isinstance(name, str) or _OWN.fullmatch(name) is None:
            why = "it is not a word, in which '.' and '-' may be"
        elif _INDEX.sub("", name) not in others:
            continue
        instead = "write another one, such as 'mtp_weight' or 'mixture.code'"
        raise ScheduleError.cannot(f"name a value {name!r}", why=why, instead=instead)


def group_name(number: int, group: Mapping[str, Any]) -> str:
    """Return the name of a parameter group; of one without a name, its number."""
    return str(group.get("name", number))


def check_index(text: str, name: Name, value: object) -> None:
    """Refuse an index that the value of a hyper-parameter does not have.

    Raises:
        ScheduleError: `value` does not have it.
    """
    several = len(value) if isinstance(value, (list, tuple)) else 0
    if name.index is not None and name.index >= several:
        why = f"the optimizer has {several or 'no list of'} values of {name.key!r}"
        instead = f"write '{name.key}.{several - 1}'" if several else f"write {name.key!r}"
        raise ScheduleError.cannot(f"schedule {text!r}", why=why, instead=instead)


def _is_numeric(value: object) -> bool:
    items = value if isinstance(value, tuple) else (value,)
    is_each = [isinstance(one, SupportsFloat) and not isinstance(one, bool) for one in items]
    return bool(is_each) and all(is_each)
