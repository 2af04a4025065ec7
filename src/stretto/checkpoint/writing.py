"""Write a checkpoint atomically.

The first rank creates a folder that ends in `.tmp`. Every rank with tensors writes them there. Then
the first rank writes the manifest and renames the folder. Each step is flushed to disk before the
next begins. Nothing here communicates with other ranks or warns, so it can run in a thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from stretto._location import local_path
from stretto.checkpoint.manifest import (
    LONGEST_RECORDS,
    MANIFEST,
    RECORDS,
    Entry,
    manifest_text,
)
from stretto.checkpoint.parts import RankPart, ShardEntry, merge, write_tensors
from stretto.checkpoint.sharding import HostCopies, Shard, Staged, Tensors
from stretto.errors import CheckpointError

UNFINISHED = ".tmp"
"""Ending of a folder that is being written or deleted."""
REPLACED = ".replaced"
"""Ending of a checkpoint that is about to be replaced."""
BAD = ".bad"
"""Ending of a path that is named like a checkpoint but is damaged."""
_GROUP = re.compile(r"[A-Za-z0-9_]+")


def write_checkpoint(path: Path, tensors: Tensors, records: Mapping[str, Any] | str) -> None:
    """Write a checkpoint at `path` from one process, atomically.

    Args:
        path: the folder to create. An existing one is replaced when the new one is complete.
        tensors: tensors by group (one safetensors file each) and name; tensors that share memory
            are stored once.
        records: other state as JSON, or the text of `encode_records`.

    >>> import tempfile, torch
    >>> from stretto.checkpoint import checkpoint_path, read_checkpoint
    >>> path = checkpoint_path(Path(tempfile.mkdtemp()), sample=4096)
    >>> write_checkpoint(path, {"model": {"weight": torch.ones(2)}}, {"epoch": 1})
    >>> read_checkpoint(path).records
    {'epoch': 1}

    Raises:
        CheckpointError: it cannot be written, or the records are not JSON. An existing checkpoint
            is kept.
    """
    text = records if isinstance(records, str) else encode_records(records)
    staged = HostCopies().take(tensors)
    begin_checkpoint(path)
    try:
        write_part(path, staged)
        finish_checkpoint(path, text)
    except BaseException:
        abandon_checkpoint(path)
        raise


def encode_records(records: Mapping[str, Any]) -> str:
    """Return records as JSON text.

    Encode them before a thread writes, if the objects can change meanwhile.

    >>> encode_records({"epoch": 1})
    '{"epoch":1}'

    Raises:
        CheckpointError: they are not JSON, or too long.
    """
    try:
        text = json.dumps(dict(records), separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError.cannot(
            "save the state of the run",
            why=f"it is not JSON ({error})",
            instead="return numbers, texts, lists and dicts from state_dict()",
        ) from error
    if len(text) > LONGEST_RECORDS // 2:
        raise CheckpointError.cannot(
            "save the state of the run",
            why=f"it is {len(text):,} bytes long as JSON, apart from the tensors",
            instead="keep large arrays as buffers of the model",
        )
    return text


def begin_checkpoint(path: Path) -> None:
    """Create the folder of an unfinished checkpoint; call it on the first rank.

    Raises:
        CheckpointError: it cannot be created.
    """
    local_path(path, "write a checkpoint to", CheckpointError)
    with _writing(path):
        remove(_unfinished(path))
        made = [parent for parent in path.parents if not parent.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in made:
            synchronize(parent.parent)
        _unfinished(path).mkdir()


def write_part(path: Path, staged: Staged, *, rank: int = 0, world_size: int = 1) -> None:
    """Write one rank's part of a checkpoint, after `begin_checkpoint`.

    The first rank writes tensors that are not sharded.

    Raises:
        CheckpointError: it cannot be written, or the format cannot hold a tensor.
    """
    folder = _unfinished(path)
    part = RankPart({}, staged.aliases, {})
    with _writing(path):
        for group, named in staged.tensors.items():
            _check_group(group)
            file = _file(group, rank, world_size)
            own: dict[str, Tensor] = {}
            entries = part.entries[group] = {}
            for name, entry in named.items():
                if isinstance(entry, Shard):
                    length = entry.local.shape[entry.dim]
                    # The first rank also writes an empty shard, so that the type is known.
                    if length or rank == 0:
                        own[name] = entry.local
                        entries[name] = ShardEntry(
                            entry.shape, entry.dim, entry.offset, length, file
                        )
                elif rank == 0:
                    own[name] = entry
            if own or rank == 0:
                part.files[file] = write_tensors(folder / file, own)
        _write(folder / _part_file(rank), part.to_text())


def finish_checkpoint(
    path: Path,
    records: Mapping[str, Any] | str,
    *,
    world_size: int = 1,
    clock: Callable[[], float] = time.time,
) -> None:
    """Make a checkpoint whole and put it in its place; the first rank does, when all have written.

    Args:
        path: where it goes; one that is there already is replaced.
        records: other state as JSON, or the text of `encode_records`.
        world_size: number of ranks that wrote a part.
        clock: seconds since 1970.

    Raises:
        CheckpointError: it cannot be written, or the parts are incomplete; what was there
            before is still there.
    """
    text = records if isinstance(records, str) else encode_records(records)
    folder = _unfinished(path)
    with _writing(path):
        parts = []
        for rank in range(world_size):
            file = folder / _part_file(rank)
            parts.append(RankPart.from_text(file.read_text()))
            file.unlink()
        aliases, shards = merge(parts)
        document = f'{{"aliases":{aliases},\n"shards":{shards},\n"records":{text}}}\n'
        files = {name: written for part in parts for name, written in part.files.items()}
        files[RECORDS] = _write(folder / RECORDS, document)
        for name, written in files.items():
            if (folder / name).stat().st_size != written.size:
                raise OSError(f"{name} was changed while it was written")
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(clock()))
        _write(folder / MANIFEST, manifest_text(files, created=created))
        synchronize(folder)
        _put_in_place(folder, path)


def abandon_checkpoint(path: Path) -> None:
    """Remove an unfinished checkpoint."""
    # Remains do no harm: the next checkpoint of that name reports them.
    with suppress(OSError):
        remove(_unfinished(path))


def delete_checkpoint(path: Path) -> None:
    """Remove a checkpoint atomically.

    Raises:
        OSError: it cannot be removed.
    """
    remove(_unfinished(path))
    path.rename(_unfinished(path))
    remove(_unfinished(path))


def synchronize(folder: Path) -> None:
    """Flush the names in a folder to disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(folder: Path, path: Path) -> None:
    aside = path.with_name(path.name + REPLACED)
    if os.path.lexists(path) and (path.is_symlink() or not (path / MANIFEST).is_file()):
        rename_bad(path)  # not written by this module
    is_replaced = os.path.lexists(path)
    if is_replaced:
        # A folder cannot replace another in one step. Meanwhile, readers find the renamed one.
        remove(aside)
        path.rename(aside)
    try:
        folder.rename(path)
    except OSError:
        if is_replaced:
            aside.rename(path)
        raise
    synchronize(path.parent)
    remove(aside)


def _write(file: Path, text: str) -> Entry:
    """Write a small file with fsync."""
    content = text.encode("ascii")
    with file.open("xb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    return Entry(len(content), hashlib.sha256(content).hexdigest())


def rename_bad(path: Path) -> Path:
    """Rename a damaged checkpoint to end in `.bad`, `.bad2` and so on; return its new path.

    Raises:
        OSError: it cannot be renamed.
    """
    target = path.with_name(path.name.removesuffix(REPLACED) + BAD)
    number = 1
    while os.path.lexists(target):
        number += 1
        target = target.with_suffix(f"{BAD}{number}")
    return path.rename(target)


def remove(path: Path) -> None:
    """Remove a file or folder if it exists.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + UNFINISHED)


def _part_file(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _file(group: str, rank: int, world_size: int) -> str:
    place = f"-{rank:05d}-of-{world_size:05d}" if world_size > 1 else ""
    return f"{group}{place}.safetensors"


def _check_group(group: str) -> None:
    if not _GROUP.fullmatch(group):
        raise CheckpointError.cannot(
            f"save the group of tensors {group!r}",
            why="a file is named after it",
            instead="use letters, digits and underscores",
        )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError.cannot(
            f"write {path}", why=str(error), instead="free space or choose another folder"
        ) from error
