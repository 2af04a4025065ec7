"""The parts of a checkpoint that ranks write, and how they are merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stretto.checkpoint.manifest import Entry
from stretto.errors import CheckpointError


class ShardEntry(NamedTuple):
    """One rank's shard of a tensor, and its file."""

    shape: Sequence[int]
    """Shape of the whole tensor."""
    dim: int
    offset: int
    length: int
    file: str


class RankPart(NamedTuple):
    """The files and shards that one rank wrote."""

    files: dict[str, Entry]
    aliases: Mapping[str, Mapping[str, str]]
    entries: dict[str, dict[str, ShardEntry]]
    """By group and name."""

    def to_text(self) -> str:
        """Return it as JSON, for the first rank."""
        return json.dumps(self)

    @staticmethod
    def from_text(text: str) -> RankPart:
        """Read the text of `to_text`."""
        files, aliases, entries = json.loads(text)
        for named in entries.values():
            named.update((name, ShardEntry(*entry)) for name, entry in named.items())
        return RankPart({name: Entry(*one) for name, one in files.items()}, aliases, entries)


def merge(parts: Sequence[RankPart]) -> tuple[str, str]:
    """Return aliases and shards of the whole checkpoint as JSON; parts are in rank order.

    Raises:
        CheckpointError: the shards of a tensor are incomplete or overlap.
    """
    aliases = parts[0].aliases
    shards: dict[str, dict[str, Any]] = {group: {} for group in aliases}
    for group in aliases:
        gathered: dict[str, list[ShardEntry]] = {}
        for part in parts:
            for name, entry in part.entries.get(group, {}).items():
                gathered.setdefault(name, []).append(entry)
        for name, entries in gathered.items():
            entries.sort(key=lambda entry: entry.offset)
            shape, dim, *_ = entries[0]
            ends = [entry.offset + entry.length for entry in entries]
            if (
                any((entry.shape, entry.dim) != (shape, dim) for entry in entries)
                or [entry.offset for entry in entries] != [0, *ends[:-1]]
                or ends[-1] != shape[dim]
                or name in aliases[group]
            ):
                raise CheckpointError.cannot(
                    f"save {name!r} of {group}",
                    why=f"the shards of the ranks do not form a tensor of shape {tuple(shape)}",
                    instead="save from every rank that has a shard, all at the same step",
                )
            pieces = [[entry.file, entry.offset] for entry in entries]
            shards[group][name] = {"shape": shape, "dim": dim, "pieces": pieces}
    encode = json.JSONEncoder(separators=(",", ":")).encode
    return encode(aliases), encode(shards)
