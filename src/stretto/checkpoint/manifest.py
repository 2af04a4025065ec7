"""The manifest of a checkpoint: its files with their sizes and SHA-256 digests.

It is written last, in one spelling, so that every changed byte of a checkpoint shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from stretto._location import NotPlainError, open_plain, read_plain
from stretto.errors import CheckpointError, first_line, shown

FORMAT = 3
"""The version of the layout. No other one is read."""
MANIFEST = "manifest.json"
RECORDS = "state.json"

CHECKPOINT = re.compile(r"checkpoint-\d{12,}")
"""Names of checkpoint folders."""
_TENSORS = re.compile(r"(?P<group>\w+)(-\d{5}-of-\d{5})?\.safetensors", re.ASCII)


_UNFIT = (
    SafetensorError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class DamagedError(Exception):
    """A checkpoint is damaged; `read_errors` turns this into a `CheckpointError`."""


class Entry(NamedTuple):
    """The size and digest of a file."""

    size: int
    digest: str


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading into a `CheckpointError`."""
    instead = "resume from another checkpoint"
    try:
        yield
    except DamagedError as damage:
        why = str(damage)
    except OSError as error:
        name = Path(os.fsdecode(error.filename)).name if error.filename else path.name
        why = error.strerror or str(error)
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
    found = _TENSORS.fullmatch(file)
    return found["group"] if found else None


def manifest_text(files: Mapping[str, tuple[int, str]]) -> str:
    """Return the manifest for files of these sizes and digests."""
    return json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n"


def read_manifest(path: Path) -> dict[str, Entry]:
    """Return the files of the checkpoint at `path`.

    Raises:
        DamagedError: the manifest is missing or changed.
        CheckpointError: there is no checkpoint, or it has another format.
    """
    try:
        text = read_plain(path / MANIFEST).decode()
    except NotPlainError as error:
        raise DamagedError(f"{MANIFEST} is not what was written ({error.strerror})") from None
    except (FileNotFoundError, NotADirectoryError):
        if CHECKPOINT.match(path.name) and os.path.lexists(path):
            raise DamagedError(f"{MANIFEST} is missing") from None
        instead = "pass the path of one, such as runs/a/checkpoints/checkpoint-000000004096"
        raise CheckpointError.cannot(
            f"read {path}", why="no finished checkpoint is there", instead=instead
        ) from None
    except UnicodeDecodeError:
        raise DamagedError(f"{MANIFEST} is not what was written") from None
    return parse_manifest(text, path)


def parse_manifest(text: str, place: object) -> dict[str, Entry]:
    """Return the files that a manifest names.

    Raises:
        DamagedError: it is changed.
        CheckpointError: it has another format.
    """
    document = parse_object(text, MANIFEST)
    version = document.get("format")
    if type(version) is int and version > 0 and version != FORMAT:
        why = f"it has format {shown(version)} and this version reads only {FORMAT}"
        age = "a newer" if version > FORMAT else "the older"
        instead = f"install {age} stretto that wrote it"
        raise CheckpointError.cannot(f"read {place}", why=why, instead=instead)
    with damage(MANIFEST):
        files = {name: Entry(*entry) for name, entry in document["files"].items()}
        names = [name for name in files if name != RECORDS and not group_of(name)]
        if names or RECORDS not in files or text != manifest_text(files):
            raise DamagedError(f"{MANIFEST} is not what was written")
        return files


def check_member(path: Path, name: str, entry: Entry, *, content: bool = True) -> None:
    """Check the size of a file, and its digest if `content` is set.

    Raises:
        DamagedError: the file is missing or changed.
    """
    try:
        with open_plain(path / name, buffering=0) as file:
            if os.fstat(file.fileno()).st_size != entry.size:
                raise DamagedError(f"{name} is not as long as it was written")
            if content and _digest(file) != entry.digest:
                raise DamagedError(f"{name} is not what was written")
    except NotPlainError:
        raise DamagedError(f"{name} is not a plain file") from None
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(f"{name} is missing") from None


def _digest(file: Any) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def parse_object(text: str | bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        DamagedError: it is something else.
    """
    with damage(name):
        document = json.loads(text)
    if not isinstance(document, dict):
        raise DamagedError(f"{name} is not a JSON object")
    return document


@contextmanager
def damage(name: str) -> Iterator[None]:
    """Turn errors from the content of a file into `DamagedError`; `OSError` stays."""
    try:
        yield
    except OSError:
        raise
    except _UNFIT as error:
        # The message may contain the name of a tensor, which can be any text.
        why = "".join(letter if letter.isprintable() else " " for letter in first_line(error))
        raise DamagedError(f"{name} is not what was written ({why})") from None
