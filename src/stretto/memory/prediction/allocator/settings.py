"""The options of PyTorch's caching allocator that change how many bytes it reserves."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from stretto.errors import ConfigError, nearest, shown

_MIB = 1 << 20
_MIN_BLOCK = 512
_LARGE_SEGMENT = 20 * _MIB
_NUM_INTERVALS = 16
"""Intervals of `roundup_power2_divisions`: from 1 MiB on, each twice as large as the last."""
# In this order in torch 2.13 and 2.15, though the comments of AllocatorConfig.h say the other.
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SIZE_OPTIONS = (
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "roundup_power2_divisions",
)
_OTHER_OPTIONS = frozenset(
    {
        "expandable_segments_reserve",  # address space, not memory; since torch 2.15
        "expandable_segments_reserve_by_class",
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "throw_on_cudamalloc_oom",
    }
)
"""Options that do not change how many bytes are reserved."""


@final
@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Options of `PYTORCH_ALLOC_CONF` that change reserved bytes.

    >>> AllocatorSettings.from_text("max_split_size_mb:128").max_split_size // 2**20
    128
    >>> AllocatorSettings.from_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    AllocatorSettings(expandable_segments=True)
    """

    expandable_segments: bool = False
    """Grow one segment for each stream, instead of adding segments."""
    max_split_size: int | None = None
    """Blocks of this many bytes or more are not split; None splits all."""
    max_non_split_rounding: int = _LARGE_SEGMENT
    """A block that is not split may exceed the request by fewer bytes than this."""
    large_segment_size: int = _LARGE_SEGMENT
    """Bytes of the segments from which blocks of 1 to 10 MiB are cut."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Steps between two powers of two to which sizes are rounded up; 0 or 1 does not round.

    One number for each interval: up to 2 MiB, 4 MiB, 8 MiB, and so on, and from 32 GiB.
    """
    garbage_collection_threshold: float | None = None
    """Part of the allowed memory above which unused blocks are released; needs
    `memory_fraction`."""
    memory_fraction: float | None = None
    """Part of the limit that may be reserved (`per_process_memory_fraction`)."""

    def __repr__(self) -> str:
        default = type(self)()
        changed = {name: getattr(self, name) for name in self.__slots__}
        inside = (f"{k}={v!r}" for k, v in changed.items() if v != getattr(default, k))
        return f"{type(self).__name__}({', '.join(inside)})"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return the settings that torch would read from the environment.

        Raises:
            ConfigError: a value that torch would refuse, or another allocator.
        """
        for variable in _VARIABLES:
            if variable in environment:
                return cls.from_text(environment[variable], variable=variable)
        return cls()

    @classmethod
    def from_text(cls, text: str, *, variable: str = "PYTORCH_ALLOC_CONF") -> Self:
        """Return the settings of a text, such as `max_split_size_mb:128`.

        Args:
            text: options as `name:value`, separated by commas.
            variable: where the text comes from, for messages.

        Raises:
            ConfigError: a value that torch would refuse, or another allocator.
        """
        return cls(**_read(text, _Errors(text, variable)))

    def round_up(self, size: int) -> int:
        """Return the bytes of the block that a request needs.

        >>> settings = AllocatorSettings(roundup_power2_divisions=(4,) * 16)
        >>> settings.round_up(33 * 2**20) // 2**20
        40
        """
        if self.roundup_power2_divisions:
            interval = min(max(size.bit_length() - 21, 0), _NUM_INTERVALS - 1)
            divisions = self.roundup_power2_divisions[interval]
            if divisions > 1 and size > _MIN_BLOCK * divisions:
                step = (1 << size.bit_length() - 1) // divisions
                return -(-size // step) * step
        return -(-size // _MIN_BLOCK) * _MIN_BLOCK or _MIN_BLOCK


@final
@dataclass(frozen=True, slots=True)
class _Errors:
    """Makes the errors for a text."""

    text: str
    variable: str

    def cannot(self, why: str, instead: str) -> ConfigError:
        return ConfigError.cannot(
            f"read {self.variable}={shown(self.text)}",
            why=why,
            instead=instead,
            where=self.variable,
        )


def _read(text: str, errors: _Errors) -> dict[str, Any]:
    given = dict(_options(text, errors))  # of an option that is given twice, the last one counts
    fields: dict[str, Any] = {}
    large = _LARGE_SEGMENT
    if "large_segment_size_mb" in given:  # the smallest value of others
        large = _mebibytes(given, "large_segment_size_mb", 11 * _MIB, errors)
        fields["large_segment_size"] = fields["max_non_split_rounding"] = large
    for name, value in given.items():
        if name == "max_split_size_mb":
            fields["max_split_size"] = _mebibytes(given, name, large, errors)
        elif name == "max_non_split_rounding_mb":
            fields["max_non_split_rounding"] = _mebibytes(given, name, large, errors)
        elif name == "expandable_segments":
            if value not in {"True", "False"}:
                raise errors.cannot(f"{name} is {shown(value)}", f"write {name}:True or :False")
            fields["expandable_segments"] = value == "True"
        elif name == "garbage_collection_threshold":
            fields[name] = _fraction(name, value, lambda it: 0 < it < 1, errors)
        elif name == "per_process_memory_fraction":
            fraction = _fraction(name, value, lambda it: 0 <= it <= 1, errors)
            fields["memory_fraction"] = fraction if fraction < 1 else None
        elif name == "roundup_power2_divisions":
            fields[name] = _divisions(value, errors)
        elif name == "backend":
            _check_backend(value, errors)
        elif name != "large_segment_size_mb" and name not in _OTHER_OPTIONS:
            _warn_of(name, errors.variable)
    return fields


_OPTION = re.compile(r"([^\s,:\[\]]+):(\[[^\[\]]*\]|[^\s,:\[\]]+)(?:,|$)")


def _options(text: str, errors: _Errors) -> Iterator[tuple[str, str]]:
    text, place = "".join(text.split()), 0
    while place < len(text):
        found = _OPTION.match(text, place)
        if found is None:
            raise errors.cannot(
                f"{shown(text[place:])} is not name:value",
                "write options as max_split_size_mb:128,expandable_segments:True",
            )
        yield found[1], found[2]
        place = found.end()


def _mebibytes(given: dict[str, str], name: str, least: int, errors: _Errors) -> int:
    value = given[name]
    if not value.isdecimal() or int(value) * _MIB < least:
        raise errors.cannot(
            f"{name} is {shown(value)}", f"write a whole number of {least // _MIB} or more"
        )
    return int(value) * _MIB


def _fraction(name: str, value: str, fits: Callable[[float], bool], errors: _Errors) -> float:
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if not fits(fraction):
        raise errors.cannot(f"{name} is {shown(value)}", "write a number between 0 and 1")
    return fraction


def _divisions(value: str, errors: _Errors) -> tuple[int, ...]:
    """Read one number for all sizes, or a list such as `[256:1,512:2,>:8]`.

    The number after `256` holds for sizes from 256 to 512 MiB; that of the first for all below it.
    """
    if not value.startswith("["):
        return (_power_of_two(value, errors),) * _NUM_INTERVALS
    divisions, last = [0] * _NUM_INTERVALS, None
    for pair in filter(None, value[1:-1].split(",")):
        start, _, text = pair.partition(":")
        number = 0 if text == "0" else _power_of_two(text, errors)
        if start == ">":
            after = 1 if last is None else last + 1
            divisions[after:] = [number] * (_NUM_INTERVALS - after)
            continue
        interval = min(_power_of_two(start, errors).bit_length() - 1, _NUM_INTERVALS - 1)
        if last is None:
            divisions[:interval] = [number] * interval
        divisions[interval] = number
        last = interval
    return tuple(divisions)


def _power_of_two(text: str, errors: _Errors) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1 or number & (number - 1):
        raise errors.cannot(
            f"roundup_power2_divisions has {shown(text)}, which is not a power of two",
            "write one number, or a list such as [256:1,512:2,1024:4,>:8]",
        )
    return number


def _check_backend(value: str, errors: _Errors) -> None:
    if value == "cudaMallocAsync":
        raise errors.cannot("how CUDA's allocator reserves memory is not known", "leave it out")
    if value != "native":
        raise errors.cannot(f"backend is {shown(value)}", "write backend:native")


def _warn_of(name: str, variable: str) -> None:
    close = nearest(name, [*_OTHER_OPTIONS, *_SIZE_OPTIONS])
    hint = f"; did you mean {close!r}?" if close else ""
    warnings.warn(f"ignored unknown option {name!r} of {variable}{hint}", stacklevel=5)
