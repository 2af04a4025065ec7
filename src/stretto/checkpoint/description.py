"""Describe a checkpoint without loading it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from stretto.checkpoint.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    check_member,
    read_errors,
    read_manifest,
)
from stretto.checkpoint.reading import CheckpointReader, find, open_or_damage
from stretto.errors import StrettoError
from stretto.timing import Horizon, Timestamp


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
