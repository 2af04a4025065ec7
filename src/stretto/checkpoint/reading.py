"""Read and describe a checkpoint: verified first, in parts, and never unpickled."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from stretto._location import read_plain
from stretto.checkpoint.manifest import (
    RECORDS,
    DamagedError,
    Entry,
    check_member,
    damage,
    group_of,
    parse_object,
    read_errors,
    read_manifest,
)
from stretto.checkpoint.parts import DTYPES, PLACES, TensorEntry, TensorInfo, stored_entry
from stretto.checkpoint.sharding import Box
from stretto.errors import CheckpointError, shown
from stretto.runtime.compiled import Weights

PAUSES = (0.1, 0.4)
"""Seconds to wait before each retry of a failed read."""
_T = TypeVar("_T")


class Checkpoint(NamedTuple):
    """The content of a checkpoint."""

    tensors: dict[str, dict[str, Tensor]]
    """Tensors by group and name, on the CPU."""
    records: dict[str, Any]
    """All other state, as JSON."""


@final
class CheckpointReader:
    """An open checkpoint; reads one tensor, or part of one, at a time.

    >>> import tempfile, torch
    >>> from stretto.checkpoint import checkpoint_path, write_checkpoint
    >>> path = checkpoint_path(Path(tempfile.mkdtemp()), sample=4096)
    >>> write_checkpoint(path, {"model": {"weight": torch.arange(6)}}, {"epoch": 1})
    >>> reader = open_checkpoint(path)
    >>> reader.records, reader.groups, reader.names("model")
    ({'epoch': 1}, ('model',), ('weight',))
    >>> reader.part("model", "weight", Box((4,), (2,)))
    tensor([4, 5])
    """

    def __init__(self, path: Path, files: Mapping[str, Entry]) -> None:
        self._path = path
        self._open: Callable[[Path], Any] = cache(partial(safe_open, framework="pt", device="cpu"))
        document = parse_object(read_plain(path / RECORDS, files[RECORDS].size), RECORDS)
        with damage(RECORDS):
            self.created: str | None = document["created"]
            """When it was written, in UTC."""
            self.records: dict[str, Any] = {**document["records"]}
            self.position: dict[str, float] = {**self.records.get("position", {})}
            """That of the run, by unit of time."""
            self._aliases: dict[str, dict[str, str]] = {
                group: {**named} for group, named in document["aliases"].items()
            }
            if not f"{self.created}{''.join(self.position)}".isprintable():
                raise ValueError("it has control characters")
            for amount in self.position.values():
                f"{amount:.15g}"
            groups: dict[str, list[str]] = {}
            for name in files:
                if (group := group_of(name)) is not None:
                    groups.setdefault(group, []).append(name)
            self._entries = {group: self._index(own) for group, own in groups.items()}
            for group, named in self._aliases.items():
                for original in named.values():
                    self._entries[group][original]

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of tensors."""
        return tuple(self._entries)

    def names(self, group: str) -> tuple[str, ...]:
        """Return the names of the tensors of a group."""
        return (*self._entries.get(group, ()), *self._aliases.get(group, ()))

    def entry(self, group: str, name: str) -> TensorEntry:
        """Return the type and shape of a whole tensor.

        Raises:
            CheckpointError: there is no such tensor.
        """
        try:
            return self._entries[group][self.original(group, name)]
        except KeyError:
            what, why = f"read {shown(name)} of {shown(group)}", "there is no such tensor"
            instead = "ask for one of names(group)"
            raise CheckpointError.cannot(what, why=why, instead=instead) from None

    def entries(self, group: str) -> tuple[TensorEntry, ...]:
        """Return the stored tensors of a group; shared memory is stored once."""
        return tuple(self._entries.get(group, {}).values())

    def original(self, group: str, name: str) -> str:
        """Return the name under which a tensor is stored."""
        return self._aliases.get(group, {}).get(name, name)

    def tensor(self, group: str, name: str) -> Tensor:
        """Return a whole tensor, in memory of its own.

        Raises:
            CheckpointError: there is no such tensor, or its file cannot be read any more.
        """
        shape = self.entry(group, name).shape
        return self.part(group, name, Box((0,) * len(shape), shape))

    def part(self, group: str, name: str, box: Box) -> Tensor:
        """Return a box of a tensor.

        Raises:
            CheckpointError: there is no such part, or its file cannot be read any more.
        """
        place = self.entry(group, name)
        if not (len(box.offset) == len(box.length) == len(place.shape)) or any(
            not 0 <= at <= at + n <= size for at, n, size in zip(*box, place.shape, strict=True)
        ):
            what = f"read {list(box.length)} from {list(box.offset)} of {shown(name)}"
            why = f"its shape is {place.shape}"
            raise CheckpointError.cannot(what, why=why, instead="ask for a part of it")
        with read_errors(self._path), damage(name):
            result = torch.empty(box.length, dtype=place.dtype)
        for file, own in place.parts:
            begin = tuple(map(max, box.offset, own.offset))
            ends = zip(*box, *own, strict=True)
            end = [min(at + n, start + length) for at, n, start, length in ends]
            length = tuple(last - first for first, last in zip(begin, end, strict=True))
            if any(one <= 0 for one in length):
                continue
            from_file, to = (_within(Box(begin, length), one) for one in (own, box))
            with read_errors(self._path), damage(file):
                opened, original = self._open(self._path / file), self.original(group, name)
                # A slice of a tensor without dimensions cannot be read.
                read = opened.get_slice(original)[from_file] if to else opened.get_tensor(original)
                result[to] = read
        return result

    def _index(self, files: Sequence[str]) -> dict[str, TensorEntry]:
        """Return the tensors of a group by name; each file tells the places of its parts."""
        found: dict[str, dict[str, TensorInfo]] = {}
        for file in files:
            with damage(file):
                opened = self._open(self._path / file)
                places = json.loads((opened.metadata() or {}).get(PLACES, "{}"))
                for name in opened.keys():  # noqa: SIM118  not a mapping
                    header = opened.get_slice(name)
                    length = tuple(header.get_shape())
                    shape, offset = places.get(name, (length, (0,) * len(length)))
                    info = TensorInfo(
                        DTYPES[header.get_dtype()], length, tuple(shape), tuple(offset)
                    )
                    found.setdefault(name, {})[file] = info
        return {name: stored_entry(parts) for name, parts in found.items()}


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return a box as an index of another one that contains it."""
    offset = tuple(at - start for at, start in zip(box.offset, outer.offset, strict=True))
    return Box(offset, box.length).slices


def open_checkpoint(
    path: Path, *, verify: bool = True, sleep: Callable[[float], None] = time.sleep
) -> CheckpointReader:
    """Open the checkpoint at `path` without loading tensors.

    Args:
        path: its folder.
        verify: read every file once and compare it with the manifest. Sizes are always checked.
        sleep: waits some seconds before a retry of a failed read.

    >>> import tempfile
    >>> from stretto.checkpoint import checkpoint_path, write_checkpoint
    >>> path = checkpoint_path(Path(tempfile.mkdtemp()), sample=4096)
    >>> write_checkpoint(path, {}, {"epoch": 1})
    >>> open_checkpoint(path).records
    {'epoch': 1}

    Raises:
        CheckpointError: it is not a checkpoint, has another format, is damaged, or cannot be read.
    """
    with read_errors(path):
        return with_retries(lambda: open_or_damage(path, verify=verify), sleep)


def with_retries(work: Callable[[], _T], sleep: Callable[[float], None]) -> _T:
    """Return `work()`; retry on system errors, from which network file systems recover."""
    for pause in PAUSES:
        try:
            return work()
        except OSError:
            sleep(pause)
    return work()


def open_or_damage(path: Path, *, verify: bool = True) -> CheckpointReader:
    """Open a checkpoint like `open_checkpoint`, but raise `DamagedError` for damage.

    Raises:
        DamagedError: it is damaged.
        OSError: it cannot be read.
        CheckpointError: it is not a checkpoint, or has another format.
    """
    files = read_manifest(path)
    for name, entry in files.items():
        check_member(path, name, entry, content=verify)
    return CheckpointReader(path, files)


def read_checkpoint(path: Path) -> Checkpoint:
    """Return everything that `write_checkpoint` stored at `path`; every byte is verified.

    Raises:
        CheckpointError: it is not a checkpoint, has another format, or is damaged.
    """
    reader = open_checkpoint(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    for group in reader.groups:
        named = tensors[group] = {}
        for name in reader.names(group):  # aliases come last
            original = reader.original(group, name)
            is_alias = original in named
            named[name] = named[original] if is_alias else reader.tensor(group, name)
    return Checkpoint(tensors, reader.records)


def load_weights(model: nn.Module, path: Path, *, averaged: bool = False) -> None:
    """Load the weights of a checkpoint into a model, for inference.

    Args:
        model: the model, as it was built for training.
        path: the checkpoint, such as `trainer.best.path`.
        averaged: whether to load the averages of an `ExponentialMovingAverage`.

    Raises:
        CheckpointError: it is not a checkpoint, is damaged, has no averages, or is of another
            model.
    """
    reader = open_checkpoint(path)
    weights = {name: reader.tensor("model", name) for name in reader.names("model")}
    if averaged:
        found = {
            group: [name for name in reader.names(group) if name.startswith("average.")]
            for group in reader.groups
            if group.startswith("callback_")
        }
        averages = [(group, names) for group, names in found.items() if names]
        if len(averages) != 1:
            what, why = f"load averaged weights from {path}", "no callback has averaged them"
            instead = "train with an ExponentialMovingAverage, or leave averaged out"
            if averages:
                why = f"{len(averages)} callbacks have averaged them"
                instead = "resume the run, and use averaged() of the callback you mean"
            raise CheckpointError.cannot(what, why=why, instead=instead)
        [(group, names)] = averages
        weights |= {name.removeprefix("average."): reader.tensor(group, name) for name in names}
    try:
        Weights(model).load_state_dict(weights)
    except RuntimeError as error:
        why = f"they are another model's ({' '.join(str(error).split())[:300]})"
        instead = "build the model that it was saved from"
        raise CheckpointError.cannot(
            f"load the weights of {path}", why=why, instead=instead
        ) from None


@final
@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The tensors of one group."""

    name: str
    num_tensors: int
    """Tensors that share memory count once."""
    num_elements: int
    num_bytes: int
    dtypes: Mapping[str, int]
    """Number of tensors by type."""


@final
@dataclass(frozen=True, slots=True)
class Description:
    """Describes a checkpoint; `stretto inspect` prints its `str()`."""

    path: str
    damage: str | None
    """What is wrong with it; None if it is undamaged."""
    created: str | None = None
    """When it was written, in UTC; None if unknown."""
    position: Mapping[str, float] = field(default_factory=dict)
    """The position of the run, by unit of time."""
    groups: tuple[TensorGroup, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each file."""

    @property
    def is_whole(self) -> bool:
        """Whether every byte is unchanged since it was written."""
        return self.damage is None

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON."""
        return {"is_whole": self.is_whole, **asdict(self)}

    def __str__(self) -> str:
        rows = [
            ("written", self.created or ""),
            ("position", "  ".join(f"{value:.15g}{unit}" for unit, value in self.position.items())),
            *((group.name, _tensors(group)) for group in self.groups),
            *((name, f"{size:,} bytes") for name, size in self.files.items()),
        ]
        present = [(name, text) for name, text in rows if text]
        width = max((len(name) for name, _ in present), default=0)
        head = f"{self.path}: {'whole' if self.is_whole else f'damaged: {self.damage}'}"
        return "\n".join([head, *(f"  {name:<{width}}  {text}" for name, text in present)])


def describe(path: Path) -> Description:
    """Describe the checkpoint at `path`; every byte is verified.

    >>> import tempfile, torch
    >>> from stretto.checkpoint import checkpoint_path, write_checkpoint
    >>> path = checkpoint_path(Path(tempfile.mkdtemp()), sample=4096)
    >>> write_checkpoint(path, {"model": {"weight": torch.ones(2, 3)}}, {})
    >>> found = describe(path)
    >>> found.is_whole, found.groups[0].num_elements, found.groups[0].dtypes
    (True, 6, {'float32': 1})

    Raises:
        CheckpointError: there is no checkpoint, or it has another format, or it cannot be read.
    """
    files: dict[str, Entry] = {}
    wrong: list[str] = []
    with read_errors(path):
        try:
            files = read_manifest(path)
            for name, entry in files.items():
                try:
                    check_member(path, name, entry)
                except DamagedError as damaged:
                    wrong.append(str(damaged))
            reader = None if wrong else CheckpointReader(path, files)
        except DamagedError as damaged:
            wrong, reader = [str(damaged)], None
    sizes = {name: entry.size for name, entry in files.items()}
    if reader is None:
        return Description(str(path), "; ".join(wrong), files=sizes)
    groups = tuple(_group(reader, name) for name in reader.groups)
    return Description(str(path), None, reader.created, reader.position, groups, sizes)


def _group(reader: CheckpointReader, group: str) -> TensorGroup:
    entries = reader.entries(group)
    dtypes = Counter(str(entry.dtype).removeprefix("torch.") for entry in entries)
    return TensorGroup(
        group,
        len(entries),
        num_elements=sum(math.prod(entry.shape) for entry in entries),
        num_bytes=sum(entry.num_bytes for entry in entries),
        dtypes=dict(dtypes.most_common()),
    )


def _tensors(group: TensorGroup) -> str:
    types = ", ".join(f"{count} {dtype}" for dtype, count in group.dtypes.items())
    return f"{group.num_tensors:,} tensors, {group.num_bytes:,} bytes ({types})"
