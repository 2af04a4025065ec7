"""Where a run is kept or read from: folders, which are no URLs, and how their files are opened.

A folder may be somebody else's, and an archive keeps links and pipes. What is read must be a plain
file, so that nothing waits for ever; what is written must not lead elsewhere. No other module
opens a path that it is given.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from stretto.errors import StrettoError, cannot, shown, without_credentials

# `pathlib` makes one slash of two; a drive of Windows has one letter.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>.*)", re.DOTALL)


def url_of(path: str | Path) -> str | None:
    """Return a path as a URL, if it is one.

    >>> url_of("s3://bucket/run"), url_of("runs/a")
    ('s3://bucket/run', None)
    """
    found = _URL.match(str(path))
    if found is None or "://" in str(path):
        return found and str(path)
    slashes = "///" if found["scheme"].lower() == "file" else "//"  # `pathlib` made them one
    return f"{found['scheme']}:{slashes}{found['rest']}"


def local_path(path: str | Path, what: str, error: type[StrettoError]) -> Path:
    """Return a path; a URL, of which `pathlib` would make a folder in the working one, is refused.

    Args:
        path: as it was given.
        what: what it is for, such as "keep a run in".
        error: the type to raise.

    >>> local_path("runs/a", "keep a run in", StrettoError).as_posix()
    'runs/a'

    Raises:
        StrettoError: it is a URL, empty, or has a NUL character.
    """
    url = _URL.match(str(path))
    if not str(path) or "\0" in str(path):
        why = "it has a NUL character" if str(path) else "it names no folder"
        instead = "write a path such as 'runs/name'"
        raise error(cannot(f"{what} {shown(str(path))}", why=why, instead=instead))
    if url is None:
        return Path(path)
    instead = "write the path of a local folder such as 'runs/name', and copy or mount the storage"
    if url["scheme"].lower() == "file":
        instead = f"write {shown('/' + url['rest'])}"
    raise error(
        cannot(
            f"{what} {shown(url['scheme'] + '://' + url['rest'])}",
            why="it is a URL, and only paths of the file system are read and written",
            instead=instead,
        )
    )


_SECRET = re.compile(r"(.*_)?(password|passwd|api_?key|access_key|secret)", re.IGNORECASE)
_OPTION = re.compile(
    r"(.*_)?(key|secret|token|password|passwd|credentials?|connection_string|sas|auth)",
    re.IGNORECASE,
)
"""In `storage_options`, where `key` and `token` are no names of data."""


def public(value: Any, *, is_option: bool = False) -> Any:
    """Return JSON values without credentials: in addresses, and in what opens a storage.

    Args:
        value: any JSON value.
        is_option: whether it is in `storage_options`, or the arguments of a store.

    >>> public({"upload": "s3://KEY:SECRET@bucket", "storage_options": {"key": "KEY"}})
    {'upload': 's3://bucket', 'storage_options': {'key': '***'}}
    """
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, (list, tuple)):
        return [public(one, is_option=is_option) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: "***"
        if one
        and isinstance(one, (str, dict, list))
        and (_OPTION if is_option else _SECRET).fullmatch(str(name))
        else public(one, is_option=is_option or name in ("storage_options", "upload"))
        for name, one in value.items()
    }


class NotPlainError(OSError):
    """A file is of another kind than a run writes; `strerror` says of which."""


MOST_BYTES = 1 << 28
"""More than a small file of a run or a checkpoint has, such as its plan or its manifest."""


def open_plain(path: Path, mode: str = "rb", **more: Any) -> IO[Any]:
    """Open a file of a run like `open`; it never waits, and never writes through a link.

    Args:
        path: the file.
        mode: as for `open`. "w" is refused: it empties what it opens before one can look.
        more: further arguments of `open`.

    Raises:
        NotPlainError: it is a pipe, a device or a folder; or it is a link and would be written to.
        OSError: it cannot be opened.
    """
    assert "w" not in mode
    return open(path, mode, opener=_descriptor, **more)


def _descriptor(path: str, flags: int) -> int:
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    flags |= getattr(os, "O_NONBLOCK", 0) | (getattr(os, "O_NOFOLLOW", 0) if writes else 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        # A pipe that nobody reads from has no such device or address.
        kinds = {errno.ELOOP: "It is a link to another file", errno.ENXIO: "It is not a plain file"}
        if writes and error.errno in kinds:
            raise NotPlainError(error.errno, kinds[error.errno], path) from None
        raise
    found, why = os.fstat(descriptor), ""
    if not stat.S_ISREG(found.st_mode):
        why = "It is not a plain file"
    elif writes and found.st_nlink > 1:
        why = "It is a hard link: what is written to it would change another file, too"
    if why:
        os.close(descriptor)
        raise NotPlainError(errno.EMLINK if found.st_nlink > 1 else errno.EINVAL, why, path)
    return descriptor


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a plain file.

    Raises:
        NotPlainError: it is another kind of file, or has more than `most` bytes.
        OSError: it cannot be read.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise NotPlainError(errno.EFBIG, f"It has more than {most:,} bytes", str(path))
        content: bytes = file.read(size)  # more would be allocated at once
        return content


def own_name(path: Path) -> Path:
    """Return a name beside `path` that no other process uses, for what is not complete yet."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file; an error, a full disk or a kill leaves the old one.

    Other processes may write the same path: the last one that is complete stays.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = own_name(path)
    file = open_plain(unfinished, "xb")
    try:
        with file:
            yield file
            file.flush()
            check_same(file, unfinished, file.tell())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether a path leads to an open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    return False


def check_same(file: IO[bytes], path: Path, size: int) -> None:
    """Check, before a file is renamed, that its name leads to it and all was written.

    Args:
        file: the file, still open.
        path: its name.
        size: the bytes that it must have.

    Raises:
        OSError: another process has changed or replaced it.
    """
    if not is_at(file, path) or os.fstat(file.fileno()).st_size != size:
        raise OSError(errno.EBUSY, "Another process has written to it", str(path))


def has_locked(file: IO[bytes]) -> bool | None:
    """Lock an open file, until it is closed; return whether this process has the lock now.

    None: there are no locks, as on Windows and some network file systems.
    """
    if os.name != "posix":
        return None
    import fcntl  # POSIX only

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
