"""Write a checkpoint atomically.

The first rank creates a folder that ends in `.tmp`. Every rank with tensors writes them there. Then
the first rank writes the manifest and renames the folder. Each step is flushed to disk before the
next begins. Nothing here communicates with other ranks or warns, so it can run in a thread.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from stretto._location import local_path, open_plain, read_plain
from stretto.checkpoint.manifest import (
    MANIFEST,
    RECORDS,
    Entry,
    group_of,
    manifest_text,
)
from stretto.checkpoint.parts import RankPart, merge, write_tensors
from stretto.checkpoint.sharding import HostCopies, Shard, Staged, Tensors
from stretto.errors import CheckpointError

UNFINISHED = ".tmp"
"""Ending of a folder that is being written or deleted."""


def write_checkpoint(path: Path, tensors: Tensors, records: Mapping[str, Any] | str) -> None:
    """Write a checkpoint at `path` from one process, atomically.

    Args:
        path: the folder to create.
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
        CheckpointError: it cannot be written, the path exists, or the records are not JSON.
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
        CheckpointError: they are not JSON.
    """
    try:
        return _encode(dict(records))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError.cannot(
            "save the state of the run",
            why=f"it is not JSON ({error})",
            instead="return numbers, texts, lists and dicts from state_dict()",
        ) from error


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
    place = f"-{rank:05d}-of-{world_size:05d}" if world_size > 1 else ""
    with _writing(path):
        for group, named in staged.tensors.items():
            file = f"{group}{place}.safetensors"
            if group_of(file) != group:
                raise CheckpointError.bad(
                    "group", group, "it names a file", "use letters, digits and underscores"
                )
            own = {name: one for name, one in named.items() if _is_written_by(rank, one)}
            shards = {name: one for name, one in own.items() if isinstance(one, Shard)}
            part.shards[group] = {name: (one.shape, *one.box) for name, one in shards.items()}
            if own or rank == 0:
                part.files[file] = write_tensors(folder / file, own)
        _write(folder / _part_file(rank), _encode(part))


def _is_written_by(rank: int, tensor: Tensor | Shard) -> bool:
    if not isinstance(tensor, Shard):
        return rank == 0
    # The first rank also writes the shard of an empty tensor, so that its type is known.
    return tensor.local.numel() > 0 or (rank == 0 and not math.prod(tensor.shape))


def finish_checkpoint(
    path: Path,
    records: Mapping[str, Any] | str,
    *,
    world_size: int = 1,
    others: Iterable[Path] = (),
    clock: Callable[[], float] = time.time,
) -> None:
    """Complete a checkpoint and rename it; call it on the first rank when all have written.

    Args:
        path: where it goes.
        records: other state as JSON, or the text of `encode_records`.
        world_size: number of ranks that wrote a part.
        others: files that the records refer to; they are flushed to disk first.
        clock: seconds since 1970.

    Raises:
        CheckpointError: it cannot be written, the path exists, or the parts are incomplete.
    """
    text = records if isinstance(records, str) else encode_records(records)
    folder = _unfinished(path)
    with _writing(path):
        for other in others:
            synchronize(other)
        parts = []
        for rank in range(world_size):
            file = folder / _part_file(rank)
            parts.append(RankPart(*json.loads(read_plain(file))))
            file.unlink()
        aliases = _encode(merge(parts))
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(clock()))
        files = {name: written for part in parts for name, written in part.files.items()}
        files[RECORDS] = _write(
            folder / RECORDS,
            f'{{"created":"{created}",\n"aliases":{aliases},\n"records":{text}}}\n',
        )
        for name, (size, _) in files.items():
            if (folder / name).stat().st_size != size:
                raise OSError(f"{name} was changed while it was written")
        _write(folder / MANIFEST, manifest_text(files))
        synchronize(folder)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        folder.rename(path)
        synchronize(path.parent)


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


def synchronize(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a device, such as /dev/null
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)


def _write(file: Path, text: str) -> Entry:
    """Write a small file with fsync."""
    content = text.encode("ascii")
    with open_plain(file, "xb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    return Entry(len(content), hashlib.sha256(content).hexdigest())


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


def _encode(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError.cannot(
            f"write {path}", why=str(error), instead="free space or choose another folder"
        ) from error
