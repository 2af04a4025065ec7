"""A checkpoint on disk: a folder with tensors in safetensors and everything else in JSON.

The manifest, with the size and checksum of every file, is written last; then the folder is moved
into place by one rename. So a reader sees a whole checkpoint or none. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.errors import CheckpointError, cannot

FORMAT = 1
"""Version of the layout; raised when an older reader could not understand it."""
MANIFEST = "manifest.json"
RECORDS = "state.json"
_PREFIX = "checkpoint-"


class Checkpoint(NamedTuple):
    """What is in a checkpoint."""

    tensors: dict[str, dict[str, Tensor]]
    """Tensors by group and name, on the CPU."""
    records: dict[str, Any]
    """Everything else, as JSON."""


def checkpoint_path(folder: Path, sample: int) -> Path:
    """Return where the checkpoint at position `sample` belongs; names sort by position.

    >>> checkpoint_path(Path("runs/a"), 4096).name
    'checkpoint-000000004096'
    """
    return folder / f"{_PREFIX}{sample:012d}"


def write_checkpoint(
    path: Path, tensors: Mapping[str, Mapping[str, Tensor]], records: Mapping[str, Any]
) -> None:
    """Write a checkpoint at `path` so that nobody ever sees part of it.

    Args:
        path: the folder to create; one that is there already is replaced.
        tensors: tensors by group (one safetensors file each) and name; tensors that share memory
            are stored once.
        records: what is not a tensor, as JSON.

    Raises:
        CheckpointError: it cannot be written, or the records are not JSON; what was there before
            is still there.
    """
    _check_json(path, records)
    unfinished = path.with_name(path.name + ".tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        aliases = {}
        for group, named in tensors.items():
            distinct, aliases[group] = _distinct(named)
            save_file(distinct, unfinished / f"{group}.safetensors")
        document = {"aliases": aliases, "records": dict(records)}
        (unfinished / RECORDS).write_text(json.dumps(document, allow_nan=True, indent=1))
        files = {file.name: _fingerprint(file) for file in sorted(unfinished.iterdir())}
        manifest = {"format": FORMAT, "files": files}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for file in unfinished.iterdir():
            _sync(file)
        _sync(unfinished)
        if path.exists():
            shutil.rmtree(path)
        unfinished.rename(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            cannot(f"write {path}", why=str(error), instead="make room or choose another folder")
        ) from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Return what `write_checkpoint` stored at `path`, after verifying every byte.

    Raises:
        CheckpointError: it is not a checkpoint, is of a newer format, or is damaged.
    """
    manifest = _manifest(path)
    for name, (size, digest) in manifest["files"].items():
        file = path / name
        if Path(name).name != name or not file.is_file() or file.is_symlink():
            raise _broken(path, f"{name} is missing")
        if file.stat().st_size != size or _fingerprint(file) != [size, digest]:
            raise _broken(path, f"{name} is not what was written")
    document = json.loads((path / RECORDS).read_text())
    tensors = {}
    for group, aliases in document["aliases"].items():
        named = load_file(path / f"{group}.safetensors")
        tensors[group] = named | {name: named[original] for name, original in aliases.items()}
    return Checkpoint(tensors, document["records"])


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder` that were finished, oldest first."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.name.startswith(_PREFIX))
    return sorted(path for path in found if path.suffix != ".tmp" and (path / MANIFEST).is_file())


def keep_newest(folder: Path, count: int) -> None:
    """Delete all but the newest `count` checkpoints in `folder`."""
    for path in checkpoints(folder)[:-count]:
        shutil.rmtree(path, ignore_errors=True)


def _manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            cannot(
                f"read {path}",
                why="no finished checkpoint is there",
                instead="pass the path of one, such as "
                f"runs/name/checkpoints/{checkpoint_path(path, 4096).name}",
            )
        )
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        version, files = manifest["format"], manifest["files"]
        known = isinstance(version, int) and RECORDS in files
        pairs = all(len(entry) == 2 for entry in files.values())  # size, digest
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _broken(path, f"its manifest cannot be read ({error})") from None
    if not known or not pairs:
        raise _broken(path, "its manifest is not one of ours")
    if version > FORMAT:
        raise CheckpointError(
            cannot(
                f"read {path}",
                why=f"it has format {version} and this version knows up to {FORMAT}",
                instead="install a newer stretto",
            )
        )
    return {"format": version, "files": files}


def _check_json(path: Path, records: Mapping[str, Any]) -> None:
    try:
        json.dumps(dict(records))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            cannot(
                f"write {path}",
                why=f"its records are not JSON ({error})",
                instead="return numbers, texts, lists and dicts from state_dict()",
            )
        ) from error


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        cannot(f"read {path}", why=why, instead="resume from another checkpoint")
    )


def _distinct(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split tensors into those to store and the names that stand for the same memory."""
    first: dict[tuple[Any, ...], str] = {}
    distinct, aliases = {}, {}
    for name, tensor in named.items():
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        original = first.setdefault(key, name) if tensor.numel() else name
        if original == name:
            # A copy of its own: safetensors refuses views into one storage.
            distinct[name] = tensor.detach().to("cpu", copy=True).contiguous()
        else:
            aliases[name] = original
    return distinct, aliases


def _fingerprint(file: Path) -> list[Any]:
    with file.open("rb") as opened:
        return [file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest()]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
