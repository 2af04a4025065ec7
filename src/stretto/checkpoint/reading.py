"""Read and describe a checkpoint: verified first, in parts, and never unpickled.

Nothing is allocated beyond the size of the files.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stretto.checkpoint.manifest import (
    MANIFEST,
    RECORDS,
    DamagedError,
    Manifest,
    check_member,
    group_of,
    read_document,
    read_errors,
    read_manifest,
    with_file_name,
)
from stretto.checkpoint.parts import DTYPES, TensorEntry, sharded_entry, single_entry
from stretto.checkpoint.writing import REPLACED
from stretto.errors import CheckpointError, StrettoError, shown
from stretto.timing import Horizon, Timestamp

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
    >>> reader.part("model", "weight", 0, 4, 2)
    tensor([4, 5])
    """

    def __init__(self, path: Path, manifest: Manifest, document: Mapping[str, Any]) -> None:
        self._path = path
        self.manifest = manifest
        self.records: dict[str, Any] = _mapping(document, "records")
        self._files: dict[str, Any] = {}
        self._entries: dict[str, dict[str, TensorEntry]] = {}
        self._aliases: dict[str, dict[str, str]] = {}
        shards = _mapping(document, "shards")
        for group, aliases in _mapping(document, "aliases").items():
            places = self._index(group, _mapping(shards, group))
            self._entries[group] = places
            self._aliases[group] = _checked_aliases(group, aliases, places)
        unknown = {group_of(name) for name in manifest.files} - {None, *self._entries}
        if unknown:
            raise DamagedError(
                f"{RECORDS} does not describe {', '.join(sorted(map(str, unknown)))}"
            )

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of tensors."""
        return tuple(self._entries)

    def names(self, group: str) -> tuple[str, ...]:
        """Return the names of the tensors of a group."""
        return (*self._entries.get(group, ()), *self._aliases.get(group, ()))

    def shape(self, group: str, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._entry(group, name).shape

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
        place = self._entry(group, name)
        if place.shape:
            return self.part(group, name, place.dim, 0, place.shape[place.dim])
        with read_errors(self._path), _safetensors_errors(place.parts[0].file):
            opened = self._open(place.parts[0].file)
            tensor: Tensor = opened.get_tensor(self.original(group, name))
            return tensor.clone()

    def part(self, group: str, name: str, dim: int, offset: int, length: int) -> Tensor:
        """Return the indices `[offset, offset + length)` of dimension `dim` of a tensor.

        Raises:
            CheckpointError: there is no such part, or its file cannot be read any more.
        """
        place = self._entry(group, name)
        shape = list(place.shape)
        if not (0 <= dim < len(shape) and 0 <= offset <= offset + length <= shape[dim]):
            raise CheckpointError.cannot(
                f"read {length} indices from {offset} of dimension {dim} of {shown(name)}",
                why=f"its shape is {place.shape}",
                instead="ask for a part of it",
            )
        shape[dim] = length
        with read_errors(self._path), _safetensors_errors(self._path.name):
            result = torch.empty(shape, dtype=place.dtype)
        begin = offset if dim == place.dim else 0
        for part in place.parts:
            first = max(begin, part.offset)
            last = min(begin + shape[place.dim], part.offset + part.length)
            if first >= last or not result.numel():
                continue
            index = [slice(None)] * len(shape)
            index[dim] = slice(offset, offset + length)
            index[place.dim] = slice(first - part.offset, last - part.offset)
            with read_errors(self._path), _safetensors_errors(part.file):
                read = self._open(part.file).get_slice(self.original(group, name))[tuple(index)]
                result.narrow(place.dim, first - begin, last - first).copy_(read)
        return result

    def _entry(self, group: str, name: str) -> TensorEntry:
        try:
            return self._entries[group][self.original(group, name)]
        except KeyError:
            raise CheckpointError.cannot(
                f"read {shown(name)} of {shown(group)} from {self._path}",
                why="there is no such tensor",
                instead="ask for one of names(group)",
            ) from None

    def _open(self, file: str) -> Any:
        if file not in self._files:
            # safetensors maps the file into memory, so check its size and type first.
            check_member(self._path, file, self.manifest.files[file], content=False)
            with with_file_name(self._path / file):
                self._files[file] = safe_open(self._path / file, framework="pt", device="cpu")
        return self._files[file]

    def _index(self, group: str, shards: Mapping[str, Any]) -> dict[str, TensorEntry]:
        """Index the tensors of a group."""
        found: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
        files = [name for name in self.manifest.files if group_of(name) == group]
        if not files:
            raise DamagedError(f"the tensors of {shown(group)} are missing")
        for file in files:
            with _safetensors_errors(file):
                opened = self._open(file)
                for name in opened.keys():  # noqa: SIM118  not a mapping
                    header = opened.get_slice(name)
                    like = DTYPES[header.get_dtype()], tuple(header.get_shape())
                    found.setdefault(name, {})[file] = like
        if not found.keys() >= shards.keys():
            raise DamagedError(f"a tensor of {group} is missing")
        return {
            name: sharded_entry(name, parts, shards[name])
            if name in shards
            else single_entry(name, parts)
            for name, parts in found.items()
        }


def open_checkpoint(
    path: Path, *, verify: bool = True, sleep: Callable[[float], None] = time.sleep
) -> CheckpointReader:
    """Open the checkpoint at `path` without loading tensors.

    Args:
        path: its folder.
        verify: read every file once and compare it with the manifest. Sizes, shapes and the
            manifest itself are always checked.
        sleep: waits some seconds before a retry of a failed read.

    >>> import tempfile
    >>> from stretto.checkpoint import checkpoint_path, write_checkpoint
    >>> path = checkpoint_path(Path(tempfile.mkdtemp()), sample=4096)
    >>> write_checkpoint(path, {}, {"epoch": 1})
    >>> open_checkpoint(path).records
    {'epoch': 1}

    Raises:
        CheckpointError: it is not a checkpoint, has a newer format, is damaged, or cannot be read.
    """
    with read_errors(path):
        return with_retries(lambda: open_or_damage(path, verify=verify), sleep)


def with_retries(work: Callable[[], _T], sleep: Callable[[float], None]) -> _T:
    """Return `work()`; retry on system errors, from which network file systems recover.

    Raises:
        OSError: all attempts failed.
        MemoryError: all attempts failed.
    """
    for pause in PAUSES:
        try:
            return work()
        except (OSError, MemoryError):
            sleep(pause)
    return work()


def open_or_damage(path: Path, *, verify: bool = True) -> CheckpointReader:
    """Open a checkpoint like `open_checkpoint`, but raise `DamagedError` for damage.

    Raises:
        DamagedError: it is damaged.
        OSError: it cannot be read.
        MemoryError: there is too little memory to read it.
        CheckpointError: it is not a checkpoint, or has a newer format.
    """
    path = find(path)
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        check_member(path, name, entry, content=verify)
    return CheckpointReader(path, manifest, read_document(path))


def read_checkpoint(path: Path) -> Checkpoint:
    """Return everything that `write_checkpoint` stored at `path`; every byte is verified.

    Raises:
        CheckpointError: it is not a checkpoint, has a newer format, or is damaged.
    """
    reader = open_checkpoint(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    for group in reader.groups:
        named = tensors[group] = {}
        for name in reader.names(group):  # aliases come last
            original = reader.original(group, name)
            named[name] = named[original] if original != name else reader.tensor(group, name)
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
        names = reader.names("callbacks") if "callbacks" in reader.groups else ()
        parts = [(name, name.partition(".average.")[2]) for name in names]
        found = {own: reader.tensor("callbacks", name) for name, own in parts if own in weights}
        if not found:
            raise CheckpointError.cannot(
                f"load averaged weights from {path}",
                why="no callback of the run has averaged them",
                instead="train with callbacks=[ExponentialMovingAverage(...)], or leave averaged "
                "out",
            )
        weights |= found
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        why = f"they are another model's ({' '.join(str(error).split())[:300]})"
        instead = "build the model that it was saved from"
        raise CheckpointError.cannot(
            f"load the weights of {path}", why=why, instead=instead
        ) from None


def find(path: Path) -> Path:
    """Return the real path of a checkpoint: the old one if a replacement was interrupted."""
    aside = path.with_name(path.name + REPLACED)
    return aside if not os.path.lexists(path) and os.path.lexists(aside) else path


@contextmanager
def _safetensors_errors(file: str) -> Iterator[None]:
    """Turn errors of the safetensors library into `DamagedError`."""
    try:
        yield
    except (
        SafetensorError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        # The message may contain the name of a tensor, which can be any text.
        why = "".join(c if c.isprintable() else " " for c in str(error)[:200])
        raise DamagedError(
            f"{file} is not a file of tensors ({type(error).__name__}: {why})"
        ) from None


def _mapping(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = document.get(key)
    if not isinstance(found, dict):
        raise DamagedError(f"{RECORDS} has no {shown(key)}")
    return found


def _checked_aliases(group: str, aliases: Any, places: Mapping[str, TensorEntry]) -> dict[str, str]:
    if not isinstance(aliases, dict):
        raise DamagedError(f"the aliases in {shown(group)} are damaged")
    for name, original in aliases.items():
        if not isinstance(original, str) or original not in places or name in places:
            raise DamagedError(f"{shown(name)} of {shown(group)} is an alias of {shown(original)}")
    return aliases


@final
@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The tensors of one group."""

    name: str
    num_tensors: int
    """Tensors that share memory count once."""
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
    format: int | None
    """Version of the layout; None if unknown."""
    created: str | None
    """When it was written, in UTC; None for older formats."""
    position: Mapping[str, float]
    """The position of the run, by unit of time; only known units."""
    groups: tuple[TensorGroup, ...]
    num_parameters: int
    """Number of elements in the group `model`, floating-point buffers included."""
    files: Mapping[str, int]
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
            ("format", "" if self.format is None else str(self.format)),
            ("written", self.created or ""),
            ("position", "  ".join(_amount(*pair) for pair in self.position.items())),
            ("weights and buffers", f"{self.num_parameters:,}" if self.groups else ""),
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
    >>> found.is_whole, found.num_parameters, found.groups[0].dtypes
    (True, 6, {'float32': 1})

    Raises:
        CheckpointError: there is no checkpoint, or it has a newer format, or it cannot be read.
    """
    place = find(path)
    with read_errors(path):
        try:
            manifest = read_manifest(place)
        except DamagedError as damage:
            return _described(path, str(damage))
        wrong = []
        for name, entry in manifest.files.items():
            try:
                check_member(place, name, entry)
            except DamagedError as damage:
                wrong.append(str(damage))
        try:
            reader = open_or_damage(place, verify=False)
        except DamagedError as damage:
            # A damaged file explains this error, so do not report it twice.
            return _described(path, "; ".join(wrong) or str(damage), manifest)
    return _described(path, "; ".join(wrong) or None, manifest, reader)


def _described(
    path: Path,
    damage: str | None,
    manifest: Manifest | None = None,
    reader: CheckpointReader | None = None,
) -> Description:
    place = find(path)
    files = {name: entry.size for name, entry in manifest.files.items()} if manifest else {}
    if os.path.lexists(place / MANIFEST):
        files = {MANIFEST: (place / MANIFEST).lstat().st_size, **files}
    return Description(
        path=str(path),
        damage=damage,
        format=manifest.format if manifest else None,
        created=manifest.created if manifest else None,
        position=_position(reader.records) if reader else {},
        groups=tuple(_group(reader, name) for name in reader.groups) if reader else (),
        num_parameters=_num_parameters(reader) if reader else 0,
        files=files,
    )


def _group(reader: CheckpointReader, group: str) -> TensorGroup:
    entries = reader.entries(group)
    dtypes = Counter(str(entry.dtype).removeprefix("torch.") for entry in entries)
    num_bytes = sum(entry.num_bytes for entry in entries)
    ordered = sorted(dtypes.items(), key=lambda pair: (-pair[1], pair[0]))
    return TensorGroup(group, len(entries), num_bytes, dict(ordered))


def _num_parameters(reader: CheckpointReader) -> int:
    return sum(
        entry.num_bytes // entry.dtype.itemsize
        for entry in reader.entries("model")
        if entry.dtype.is_floating_point or entry.dtype.is_complex
    )


def _position(records: Mapping[str, Any]) -> dict[str, float]:
    """The position of a run, in every unit that its records contain."""
    position: dict[str, float] = {}
    try:
        timestamp = Timestamp.from_state(records["loader"]["clock"])
        samples = _num_samples(records["loader"].get("order"))
        within = timestamp.sample_in_epoch / samples if samples else 0
        position |= {"ep": timestamp.epoch + within, "ba": timestamp.batch, "sp": timestamp.sample}
        if timestamp.token:
            position["tok"] = timestamp.token
        position["sec"] = timestamp.run_nanoseconds / 1e9
        horizon = Horizon(records["setup"]["max_duration"], dataset_num_samples=samples)
        position["dur"] = horizon.elapsed(timestamp)
    except (StrettoError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        pass  # foreign records, or an older version: report what is known
    return position


def _num_samples(order: Any) -> int | None:
    found = order.get("num_samples") if isinstance(order, dict) else None
    return found if type(found) is int and found > 0 else None


def _amount(unit: str, value: float) -> str:
    # A count may be too large to be a float.
    return f"{value if isinstance(value, int) else f'{value:.15g}'}{unit}"


def _tensors(group: TensorGroup) -> str:
    types = ", ".join(f"{count} {dtype}" for dtype, count in group.dtypes.items())
    size = f"{group.num_tensors:,} tensors, {group.num_bytes:,} bytes"
    return f"{size} ({types})" if types else size
