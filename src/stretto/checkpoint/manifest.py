"""The manifest of a checkpoint, and the functions that open files of a checkpoint.

The manifest lists the files with their sizes and SHA-256 digests, and ends with its own digest. Its
text is canonical: any other text with the same content is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from stretto.errors import CheckpointError, shown

FORMAT = 2
"""Version of the layout; it grows if older readers cannot read it."""
MANIFEST = "manifest.json"
RECORDS = "state.json"
LONGEST_MANIFEST = 16 << 20
"""Bytes; 100,000 files fit."""
LONGEST_RECORDS = 128 << 20
"""Bytes; parsed, it needs up to about twenty times as much."""

CHECKPOINT = re.compile(r"checkpoint-\d{12,}")
"""Names of checkpoint folders."""
_MEMBER = re.compile(r"state\.json|(?P<group>[A-Za-z0-9_]+)(-(\d{5})-of-(\d{5}))?\.safetensors")
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")


class DamagedError(Exception):
    """A checkpoint is damaged; `read_errors` turns this into a `CheckpointError`."""


class Entry(NamedTuple):
    """The size and digest of a file."""

    size: int
    digest: str


class Manifest(NamedTuple):
    """The content of a manifest."""

    format: int
    created: str
    """When it was written, in UTC."""
    files: dict[str, Entry]


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading into a `CheckpointError`."""
    instead = "resume from another checkpoint"
    try:
        yield
    except DamagedError as damage:
        why = str(damage)
    except MemoryError:
        why, instead = "there is not enough memory", "free memory and try again"
    except OSError as error:
        name = Path(os.fsdecode(error.filename)).name if error.filename else path.name
        why = error.strerror or " ".join(map(str, error.args))
        why = why if name == path.name else f"{name}: {why}"
        instead = "try again, or resume from another checkpoint by its path"
    else:
        return
    raise CheckpointError.cannot(f"read {path}", why=why, instead=instead) from None


def group_of(file: str) -> str | None:
    """Return the group of tensors in a file; None for other files.

    >>> group_of("model-00000-of-00002.safetensors"), group_of("state.json")
    ('model', None)
    """
    found = _MEMBER.fullmatch(file)
    return found["group"] if found else None


def manifest_text(files: Mapping[str, tuple[int, str]], *, created: str) -> str:
    """Return the manifest for files of these sizes and digests."""
    return _seal(_spell({"format": FORMAT, "created": created, "files": _listed(files)}))


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at `path`.

    Raises:
        DamagedError: it is not a manifest of stretto.
        CheckpointError: there is no checkpoint, or it has a newer format.
    """
    if not _is_there(path / MANIFEST):
        if CHECKPOINT.match(path.name) and _is_there(path):
            raise DamagedError(f"{MANIFEST} is missing" if path.is_dir() else "it is not a folder")
        raise CheckpointError.cannot(
            f"read {path}",
            why="no finished checkpoint is there",
            instead="pass the path of one, such as runs/name/checkpoints/checkpoint-000000004096",
        )
    text, document = _read_object(path, MANIFEST, LONGEST_MANIFEST)
    version = document.get("format")
    if type(version) is int and version > FORMAT:
        raise CheckpointError.cannot(
            f"read {path}",
            why=f"it has format {shown(version)} and this version knows up to {FORMAT}",
            instead="install a newer stretto",
        )
    if type(version) is not int or version < FORMAT or not isinstance(document.get("files"), dict):
        raise DamagedError("its manifest is not one of ours")
    files = {name: _entry(name, value) for name, value in document["files"].items()}
    created = document.get("created")
    expected = _seal(_spell({"format": version, "created": created, "files": _listed(files)}))
    is_dated = isinstance(created, str) and _CREATED.fullmatch(created) is not None
    if text != expected or not is_dated or RECORDS not in files:
        raise DamagedError("its manifest is not what was written")
    return Manifest(version, str(created), files)


def check_member(path: Path, name: str, entry: Entry, *, content: bool = True) -> None:
    """Check the size of a file, and its digest if `content` is set.

    Raises:
        DamagedError: the file is missing or changed.
    """
    with with_file_name(path / name), open(_open(path, name), "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != entry.size:
            raise DamagedError(f"{name} is not as long as it was written")
        if content and hashlib.file_digest(file, "sha256").hexdigest() != entry.digest:
            raise DamagedError(f"{name} is not what was written")


def read_member(path: Path, name: str, limit: int) -> bytes:
    """Return the content of a file of at most `limit` bytes.

    Raises:
        DamagedError: the file is missing, not a regular file, or longer.
    """
    with with_file_name(path / name), open(_open(path, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size  # so much is allocated at once
        if size > limit:
            raise DamagedError(f"{name} is longer than {limit} bytes")
        return file.read(size)


def parse_json(text: str, name: str) -> Any:
    """Parse JSON; duplicate keys are refused.

    Raises:
        DamagedError: it is not JSON, or too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{name} is not JSON ({str(error)[:200]})") from None


def read_document(path: Path) -> dict[str, Any]:
    """Return the content of `state.json`.

    Raises:
        DamagedError: it is not a JSON object.
    """
    return _read_object(path, RECORDS, LONGEST_RECORDS)[1]


def _read_object(path: Path, name: str, limit: int) -> tuple[str, dict[str, Any]]:
    """Return the text of a file and the JSON object that it is."""
    try:
        text = read_member(path, name, limit).decode("utf-8")
    except UnicodeDecodeError:
        raise DamagedError(f"{name} is not text") from None
    document = parse_json(text, name)
    if not isinstance(document, dict):
        raise DamagedError(f"{name} is not a JSON object")
    return text, document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _entry(name: str, value: Any) -> Entry:
    if not _MEMBER.fullmatch(name):
        raise DamagedError(f"its manifest names {shown(name)}, which is not a file of a checkpoint")
    match value:
        case [int(size), str(digest)] if type(size) is int and size >= 0:
            if _DIGEST.fullmatch(digest):
                return Entry(size, digest)
    raise DamagedError(f"its manifest does not say how long {name} is")


def _listed(files: Mapping[str, tuple[int, str]]) -> dict[str, list[Any]]:
    return {name: list(entry) for name, entry in files.items()}


def _spell(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1)


def _seal(text: str) -> str:
    """Add the digest of a manifest to it."""
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    return f'{text[:-2]},\n "digest": "{digest}"\n}}\n'


@contextmanager
def with_file_name(file: Path) -> Iterator[None]:
    """Add the file's name to an `OSError`, which lacks it for descriptors and libraries."""
    try:
        yield
    except OSError as error:
        error.filename = str(file)
        raise


def _is_there(path: Path) -> bool:
    """Whether anything is at the path; unlike `os.path.lexists`, other errors are raised."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True


def _open(path: Path, name: str) -> int:
    """Open a regular file directly in the folder; nothing else is ever opened."""
    try:
        mode = (path / name).lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(f"{name} is missing") from None
    if not stat.S_ISREG(mode):
        raise DamagedError(f"{name} is not a plain file")
    # If another file has taken its place since, do not follow links and do not block.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path / name, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError(f"{name} is not a plain file")
    return descriptor
