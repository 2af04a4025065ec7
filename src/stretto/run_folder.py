"""The files of a run folder: their names and columns, and how they are written, read and cut.

- `metrics.jsonl`: a line for each log and each evaluation; a resume cuts it back.
- `ledger.csv`: a line for each batch; a resume cuts it back.
- `events.jsonl`: a line for each event, of every attempt; it is never cut.
- `plan.json`: the plan, and its hyper-parameters at up to 2,000 batches; `null` if unknown.
- `run.yaml`: the run file, if the run has one.
- `run.lock`: locked while the run is trained.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final

from stretto._location import (
    NotPlainError,
    has_locked,
    local_path,
    open_plain,
    public,
    read_plain,
    replacing,
)
from stretto.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    StrettoError,
    TrainingError,
    first_line,
)
from stretto.timing.grammar import as_float

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

METRICS, LEDGER, EVENTS = "metrics.jsonl", "ledger.csv", "events.jsonl"
PLAN, RUN_FILE = "plan.json", "run.yaml"
CLOCK = ("ep", "ba", "sp", "tok", "dur", "sec")
"""The units of time on each line of metrics and events."""
LEDGER_COLUMNS = (
    *("batch", "epoch", "sample", "token", "size", "tokens", "micro_batches"),
    *("sec", "decided_size"),
)
"""The columns of the ledger; the hyper-parameters and values of your own follow.

`batch`, `epoch`, `sample`, `token` and `sec` (seconds of training) are the clock before the batch.
The end of an epoch may cut a batch: it has `size` samples, and the size in force is `decided_size`.
"""
EventKind: TypeAlias = Literal[
    "start",
    "resume",
    "stop",
    "checkpoint",
    "checkpoint_failed",
    "evaluation",
    "out_of_memory",
    "skipped_step",
    "decided_size",
    "period",
    "step_cost",
]
_LONGEST_LINE = 1 << 20
"""Bytes, and more than a line of metrics or of the ledger has."""
_MOST_BYTES = 1 << 30
"""Of one file that are read: ten million batches are less."""


LOCK = "run.lock"
OWN_FOLDERS = ("checkpoints", "tensorboard", "wandb")
"""Folders in a run folder that a run writes to, or deletes in."""


# ------------------------------------------------------------------------------------- the lock


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder; the system releases the lock when the process ends in any way.

    There is no lock on Windows, and on file systems without locks (some network ones).

    Raises:
        TrainingError: another live run has the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in OWN_FOLDERS:
            if (folder / name).is_symlink():
                why = "It is a link to another folder"
                raise NotPlainError(errno.ELOOP, why, str(folder / name))
        file = open_plain(folder / LOCK, "a+b", buffering=0)
    except OSError as error:
        raise unwritable(folder, error) from error
    with file:
        if os.name == "posix":
            _watch_forks()
            _lock(file, folder)
        _open_locks.add(file)
        try:
            yield
        finally:
            _open_locks.discard(file)
            with suppress(OSError):  # an archive of the folder need not name this machine
                file.truncate(0)


_open_locks: set[IO[bytes]] = set()


def check_lock(folder: Path) -> None:
    """Check that the lock in `folder` is one that this process holds, if it holds any.

    Raises:
        CheckpointError: the folder was moved, or replaced by that of another run.
    """
    held = [os.fstat(file.fileno()) for file in _open_locks]
    with suppress(OSError):
        there = (folder / LOCK).stat()
        if not held or any(os.path.samestat(there, one) for one in held):
            return
    if held:
        why = "the folder was moved or replaced while the run was writing"
        raise CheckpointError.cannot(
            f"write a checkpoint to {folder}", why=why, instead="move it back"
        )


@cache
def _watch_forks() -> None:
    """Release locks in forked children: data workers outlive a killed run for up to 5 s."""
    os.register_at_fork(after_in_child=lambda: [file.close() for file in _open_locks])


def _lock(file: IO[bytes], folder: Path) -> None:
    is_locked = has_locked(file)
    if is_locked is False:
        file.seek(0)
        holder = file.read(200).decode(errors="replace").strip()
        why = f"another run is writing there ({holder or 'unknown'})"
        instead = "wait until it ends, or choose another folder"
        raise TrainingError.cannot(f"train in {folder}", why=why, instead=instead)
    if is_locked:
        with suppress(OSError):  # a full disk: the content is only for the message
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def unwritable(folder: Path, error: OSError) -> TrainingError:
    """Return the error for a run folder that cannot be written to."""
    name = Path(os.fsdecode(error.filename or folder)).name
    why = (error.strerror or str(error)).lower()
    instead = "choose a folder that can be written to"
    if isinstance(error, NotPlainError):
        instead = "move it away, or choose another folder"
        if error.errno in (errno.ELOOP, errno.EMLINK):  # `cp -al` and archives make links
            instead = f"copy the run with 'cp -rL {shlex.quote(str(folder))} NEW', and use NEW"
    why = why if name == folder.name else f"{name}: {why}"
    return TrainingError.cannot(f"keep a run in {folder}", why=why, instead=instead)


# -------------------------------------------------------------------------------------- writing


@final
class Appender:
    """Appends text to a file; text that cannot be written is kept for later.

    >>> lines = Appender(Path("lines.txt"))
    >>> lines.add("one ")
    >>> lines.close()
    >>> Path("lines.txt").read_text()
    'one '

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_plain(path, "ab", buffering=0)
        self.waiting = bytearray()
        """What is not written yet."""

    @property
    def is_empty(self) -> bool:
        """Whether the file is empty and no text is waiting."""
        return not (self.waiting or self._file.tell())

    def add(self, text: str) -> None:
        """Add text, which the next flush writes."""
        self.waiting += text.encode()

    def flush(self) -> None:
        """Write everything to the operating system.

        Raises:
            OSError: not all of it could be written; the rest is kept.
        """
        while self.waiting:
            del self.waiting[: self._file.write(self.waiting)]

    def close(self) -> None:
        """Flush and close the file.

        Raises:
            OSError: not all could be written; the rest is lost.
        """
        try:
            self.flush()
        finally:
            self._file.close()


def replace_file(path: Path, text: str) -> None:
    """Write a file of a run; a full disk or a kill leaves the old one.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as file:
        file.write(text.encode())


def write_named(path: Path, text: str, is_own: str) -> None:
    """Write a file that the user has named.

    Args:
        path: the file.
        text: what it will hold.
        is_own: the pattern of what it may hold now: what the same command has written.

    Raises:
        ConfigError: it holds something else, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = read_plain(path) if os.path.lexists(path) else b""
        if before and not re.fullmatch(is_own.encode(), before, re.DOTALL):
            raise FileExistsError(errno.EEXIST, "It is there already, and holds something else")
        replace_file(path, text)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError.cannot(f"write {path}", why=why, instead="name a new file") from error


def set_aside(path: Path) -> Path:
    """Rename a path that will be replaced; it ends in `.old1`, or the next free number."""
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.old{number}")):
        number += 1
    return path.rename(target)


def cut_back(path: Path, length: int | None, batch: int) -> str | None:
    """Truncate a file to `length` and to complete lines; return what it lacks, if anything.

    Args:
        path: the file. A missing file counts as empty.
        length: None keeps every complete line.
        batch: the batch after which the file had that length.
    """
    size = path.stat().st_size if path.exists() else 0
    end = size if length is None else min(size, length)
    if size:
        with open_plain(path, "r+b") as file:
            start = max(0, end - _LONGEST_LINE)
            file.seek(start)
            end = start + file.read(end - start).rfind(b"\n") + 1
            file.truncate(end)
    if length is not None and end < length:
        return (
            f"lacks {length - end:,} of the {length:,} bytes it had when the checkpoint "
            f"was written; lines from before batch {batch} are missing"
        )
    return "ends in half a line, which is cut off" if length is None and end < size else None


def json_line(record: Mapping[str, Any]) -> str:
    r"""Return a line as JSON; a number that is not finite becomes null.

    >>> json_line({"sp": 4096, "loss": float("nan")})
    '{"sp": 4096, "loss": null}\n'
    """
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(clean) + "\n"


def event_line(
    kind: EventKind,
    clock: Mapping[str, float],
    text: str,
    *,
    attempt: int,
    utc: float,
    **more: Any,
) -> str:
    """Return the line of an event: what, when in every unit, of which attempt, and details."""
    when = datetime.fromtimestamp(utc, UTC).isoformat(timespec="milliseconds")
    said = {"event": kind, "text": text, "attempt": attempt, "utc": when}
    return json_line(public({**said, **clock, **more}))


def open_events(path: Path) -> tuple[Appender, int]:
    """Open the events of a run folder; return the file and the number of the new attempt.

    Half a line, which a kill or a full disk has left, is ended, so that no line is glued to it.

    Raises:
        OSError: the file cannot be opened.
    """
    attempt, ends = 1, True
    if path.is_file():
        events = map(parsed_event, complete_text(path).splitlines())
        attempt += max((event["attempt"] for event in events if event), default=0)
        with open_plain(path) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                ends = file.read() == b"\n"
    appender = Appender(path)
    appender.add("" if ends else "\n")
    return appender, attempt


def ledger_names(folder: Path) -> list[str]:
    """Return the columns of a ledger; none if there is none yet."""
    try:
        with open_plain(folder / LEDGER) as file:
            text = file.readline(_LONGEST_LINE).decode()
    except (OSError, ValueError):
        return []
    return text.strip().split(",") if text.endswith("\n") else []


def ledger_end(folder: Path) -> tuple[int, int] | None:
    """Return the batches and samples after the last line of a ledger; None if it has none."""
    names = ledger_names(folder)
    try:
        with open_plain(folder / LEDGER) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE))
            *_, last, _ = file.read().decode().split("\n")
        row = {
            name: int(cell)
            for name, cell in zip(names, last.split(","), strict=False)
            if name in ("batch", "sample", "size")
        }
        return row["batch"] + 1, row["sample"] + row["size"]
    except (OSError, ValueError, KeyError):
        return None


# -------------------------------------------------------------------------------------- reading


class LedgerRow(NamedTuple):
    """One batch of a run."""

    counts: Mapping[str, int]
    """The clock before it (`batch`, `epoch`, `sample`, `token`), its `size` and `tokens` over all
    ranks, its `decided_size`, and its `micro_batches` on one rank."""
    values: Mapping[str, float]
    """The hyper-parameters and values of your own."""


def unreadable(path: Path, why: str) -> DataError:
    """Return the error for a file of a run that cannot be read."""
    return DataError.cannot(
        f"read {path}", why=why, instead="name the folder of a run, such as runs/default"
    )


UNFIT = (TypeError, LookupError, ValueError, AttributeError, ArithmeticError, MemoryError)
"""What the content of a foreign file raises."""


@contextmanager
def reading_run(folder: Path) -> Iterator[None]:
    """Turn what the content of a run folder raises into an error that names the folder.

    Raises:
        DataError: in place of any of `UNFIT`, or an `OSError`.
    """
    try:
        yield
    except StrettoError:
        raise
    except (*UNFIT, OSError) as error:
        raise unreadable(folder, getattr(error, "strerror", None) or first_line(error)) from error


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file, without half a last one, which a killed or running run leaves.

    Raises:
        DataError: it is missing or no plain file, is larger than a run writes, or is not UTF-8.
    """
    try:
        block = read_plain(path, _MOST_BYTES)
        return block[: block.rfind(b"\n") + 1].decode().split("\n")[:-1]
    except OSError as error:
        raise unreadable(path, (error.strerror or str(error)).lower()) from None
    except UnicodeDecodeError:
        raise unreadable(path, "it is not UTF-8 text") from None


def read_ledger(folder: Path | str) -> Iterator[LedgerRow]:
    """Yield every batch of the run in `folder`.

    Raises:
        DataError: there is no ledger, or it is invalid.
    """
    path = Path(folder) / LEDGER
    header, *lines = _whole_lines(path) or [""]
    columns = header.split(",")
    names = [name for name in columns if name not in LEDGER_COLUMNS]
    if not set(LEDGER_COLUMNS) <= set(columns):
        raise unreadable(path, "its first line does not name the columns of a ledger")
    for number, line in enumerate(lines, 2):
        try:
            row = dict(zip(columns, line.split(","), strict=True))
            counts = {name: int(row[name]) for name in LEDGER_COLUMNS if name != "sec"}
            yield LedgerRow(counts, {name: float(row[name]) for name in names})
        except ValueError:
            raise unreadable(path, f"line {number} is not a batch") from None


def metrics_lines(folder: Path) -> Iterator[dict[str, float]]:
    """Yield the lines of metrics of the run in `folder`.

    Raises:
        DataError: there are no metrics, or a line is not valid.
    """
    path = local_path(folder, "read the run in", DataError) / METRICS
    for number, text in enumerate(_whole_lines(path), 1):
        line = parsed_metrics(text)
        if line is None:
            raise unreadable(path, f"line {number} is not a line of metrics")
        yield line


def parsed_metrics(text: str) -> dict[str, float] | None:
    """Return the numbers of a line of metrics; None if it is not one."""
    line = _parsed(text)
    if line is None:
        return None
    # Values that are not finite were written as null.
    return {
        name: math.nan if value is None else as_float(value)
        for name, value in line.items()
        if value is None or isinstance(value, (int, float))
    }


def parsed_event(text: str) -> dict[str, Any] | None:
    """Return an event, with `utc` in seconds; None if the line is not one."""
    event = _parsed(text)
    if event is None or not all(
        isinstance(event.get(key), str) for key in ("event", "text", "utc")
    ):
        return None
    attempt = event.get("attempt")
    if type(attempt) is not int or not 0 < attempt < 1 << 31:
        return None
    try:
        return {**event, "utc": datetime.fromisoformat(event["utc"]).timestamp()}
    except (ValueError, OverflowError, OSError):
        return None


def _parsed(text: str) -> dict[str, Any] | None:
    """Return a JSON object that has the whole clock."""
    try:
        line: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    clock = [line.get(name) for name in CLOCK]
    is_whole = all(
        isinstance(value, (int, float)) and math.isfinite(as_float(value)) for value in clock
    )
    return line if is_whole else None


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; None if it is missing or is not JSON."""
    try:
        return json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError):
        return None


def complete_text(path: Path) -> str:
    """Return the complete lines of a file that may be growing; none if there is no file yet.

    Raises:
        OSError: it is no plain file, or has more than a run writes, as with a hole.
    """
    try:
        block = read_plain(path, _MOST_BYTES)
    except FileNotFoundError:
        return ""
    return block[: block.rfind(b"\n") + 1].decode("utf-8", "replace")


def whole_ledger(folder: Path) -> dict[str, npt.NDArray[np.float64]]:
    """Return the columns of a ledger, as far as it is one; none if it is none.

    Raises:
        OSError: there is more than a run writes, as in a file with a hole.
    """
    header, _, rows = complete_text(folder / LEDGER).partition("\n")
    columns = header.strip().split(",")
    return parsed_ledger(columns, rows) if set(LEDGER_COLUMNS) <= set(columns) else {}


def parsed_ledger(columns: Sequence[str], block: str) -> dict[str, npt.NDArray[np.float64]]:
    """Return the columns of complete lines of a ledger; lines that are not whole are left out."""
    import numpy as np

    if not block:
        return {}
    width = len(columns)
    try:
        numbers = np.loadtxt(block.splitlines(), delimiter=",", ndmin=2, comments=None)
    except ValueError:
        numbers = np.empty((0, 0))
    if numbers.shape[1] != width:
        rows = []
        for line in block.splitlines():
            try:
                row = [float(cell) for cell in line.split(",")]
            except ValueError:
                continue
            if len(row) == width:
                rows.append(row)
        numbers = np.array(rows).reshape(-1, width)
    return {name: numbers[:, index] for index, name in enumerate(columns)}
