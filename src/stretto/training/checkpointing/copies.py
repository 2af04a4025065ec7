"""Copies of checkpoints in a store: made by a background thread, found and fetched on resume."""

from __future__ import annotations

import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import Any, final

from stretto._location import MOST_BYTES, NotPlainError, open_plain, read_plain
from stretto.checkpoint import open_checkpoint
from stretto.checkpoint.folder import Store, UrlStore, position_of
from stretto.checkpoint.manifest import (
    MANIFEST,
    RECORDS,
    DamagedError,
    Entry,
    check_member,
    damage,
    parse_manifest,
    parse_object,
)
from stretto.checkpoint.reading import open_or_damage
from stretto.errors import CheckpointError, StrettoError, TrainingError, first_line
from stretto.run_folder import set_aside
from stretto.runtime.ranks import Ranks
from stretto.timing import Timestamp

LIST_PAUSES = (0.1, 0.4, 1.0, 2.0, 4.0)
"""Seconds between looks for a copy that was written."""
UNFINISHED_COPY = ".upload"
"""Ends the names of folders that are copied to or from a store."""
PATIENCE_SECONDS = 20.0
"""How long the end of a run waits for its last upload; torchrun kills after 30 s."""


def open_store(address: Any, ranks: Ranks, *, call: str) -> Store:
    """Return the store at an address, or the store itself; every rank must call it.

    Args:
        address: an address that fsspec knows, or a store.
        ranks: the processes of the run.
        call: what the user has called.

    Raises:
        CheckpointError: it is not a store, or the first rank cannot reach it.
    """
    stores: list[Store] = []

    def reach() -> None:
        try:
            is_path = isinstance(address, (str, Path))
            stores.append(UrlStore(str(address)) if is_path else address)
            if ranks.is_first:
                stores[0].list()
        except Exception as error:
            raise CheckpointError.cannot(
                f"copy checkpoints to or from {address!r}",
                why=first_line(error),
                instead="write an address that fsspec knows, such as 's3://bucket/run', with s3fs "
                "installed, or pass a stretto.checkpoint.Store",
            ) from error

    ranks.together(reach, call=call)
    return stores[0]


# -------------------------------------------------------------------------------------- reading


def newest_copy(
    store: Store, than: Path | None, damaged: dict[str, str], only: str = ""
) -> tuple[str, str] | None:
    """Return the name and the manifest of the newest copy, if it is newer than a checkpoint.

    Of one position, the one that was written last is the newer one.

    Args:
        store: where copies are.
        than: the newest whole checkpoint on this disk.
        damaged: what is wrong with damaged copies, by name; those are left out.
        only: the name of the copy that is asked for; by default any.

    Raises:
        CheckpointError: the store cannot be read, has the checkpoints of another run or of several,
            or has lost their manifests.
    """
    with reading(store):
        names = store.list()
        if not only:
            _check_one_run(store, names, begins_anew=than is None)
        for name in reversed(names):
            if name in damaged or only not in ("", name):
                continue
            try:
                if than is not None and not _is_newer(store, name, than):
                    return None
                manifest = text_of(store, name, MANIFEST)
                parse_manifest(manifest, name)
            except DamagedError as error:
                damaged[name] = f"{name} in {store!r} is damaged: {error}"
            else:
                return name, manifest
    return None


def _check_one_run(store: Store, names: Sequence[str], *, begins_anew: bool) -> None:
    """Refuse to choose between runs, or to begin anew where there were copies."""
    lost = store.without_manifest() if isinstance(store, UrlStore) and not names else []
    if lost and begins_anew:
        raise CheckpointError.cannot(
            f"resume from {store!r}",
            why=f"the {MANIFEST} of {', '.join(lost)} is gone",
            instead="put it back, or delete what is left of them to begin anew",
        )
    if len(names) > 1 and len({*run_ids(store, names).values()}) > 1:
        raise CheckpointError.cannot(
            f"resume from {store!r}",
            why="several runs have checkpoints there",
            instead=f"name one, such as {names[-1]}, by its address, and give each run its own",
        )


def _is_newer(store: Store, name: str, than: Path) -> bool:
    """Return whether a copy is newer than a checkpoint of this disk; equal ones are not."""
    there, here = position_of(name), position_of(than.name)
    if there < here or (
        there == here and text_of(store, name, MANIFEST) == read_plain(than / MANIFEST).decode()
    ):
        return False
    own = open_checkpoint(than, verify=False)
    run_id, created = _origin(store, name)
    _check_run(store, {run_id}, own.records.get("setup", {}).get("run"))
    return there > here or created > str(own.created)


def run_ids(store: Store, names: Iterable[str]) -> dict[str, str]:
    """Return of which run each copy is that can be read."""
    found: dict[str, str] = {}
    for name in names:
        with suppress(DamagedError):
            found[name], _ = _origin(store, name)
    return found


def _origin(store: Store, name: str) -> tuple[str, str]:
    """Return of which run a copy is, and when the checkpoint was written.

    Raises:
        DamagedError: it is damaged.
    """
    document = parse_object(text_of(store, name, RECORDS), RECORDS)
    with damage(RECORDS):
        return str(document["records"]["setup"]["run"]), str(document["created"])


def _check_run(store: Store, there: set[str], own: str | None) -> None:
    """Refuse the copies of another run.

    Raises:
        CheckpointError: there are some.
    """
    if there - {own}:
        raise CheckpointError.cannot(
            f"continue a run that copies checkpoints to {store!r}",
            why="another run has checkpoints there",
            instead="choose another address for upload, or resume from that address in a new "
            "folder",
        )


def text_of(store: Store, name: str, file: str) -> str:
    """Return a small file of a copy; empty text if it is missing or is no small file."""
    with TemporaryDirectory(prefix="stretto-") as folder:
        target = Path(folder) / file
        try:
            _check_size(store, name, file, 1, MOST_BYTES)
            store.open(name, file, target)
            return read_plain(target).decode(errors="replace")
        except (FileNotFoundError, NotPlainError, DamagedError):
            return ""


def _check_size(store: Store, copy: str, file: str, least: int, most: int) -> None:
    """Check the size of a file before it is fetched, if the store is ours.

    Raises:
        DamagedError: the file has another size.
    """
    if isinstance(store, UrlStore) and not least <= store.size_of(copy, file) <= most:
        raise DamagedError(f"{file} is not as long as it was written")


def _unreadable(store: Store, error: Exception) -> CheckpointError:
    return CheckpointError.cannot(
        f"resume from {store!r}",
        why=first_line(error),
        instead="check the address and the rights, or copy a checkpoint into the run folder",
    )


@contextmanager
def reading(store: Store) -> Iterator[None]:
    """Turn what a store raises into a `CheckpointError`."""
    try:
        yield
    except (StrettoError, DamagedError):
        raise
    except Exception as error:
        raise _unreadable(store, error) from error


def checkpoint_of(copy: str) -> str:
    """Return the name of the checkpoint of a copy.

    >>> checkpoint_of("checkpoint-000000000640-0a1b2c3d")
    'checkpoint-000000000640'
    """
    return copy.rpartition("-")[0]


def fetch(
    store: Store, copy: str, manifest: str, folder: Path, ranks: Ranks, *, needs: bool
) -> Path:
    """Copy a checkpoint of a store into a folder of each node; every rank must call it.

    Each file is fetched once for each folder: ranks that see the same one share the files out, and
    verify what they fetch. The manifest is written last, and then the folder is renamed.

    Args:
        store: where copies are.
        copy: the name of one.
        manifest: its manifest.
        folder: a folder of checkpoints.
        ranks: the processes of the run.
        needs: whether this rank does not see the checkpoint yet.

    Returns:
        Its path.

    Raises:
        DamagedError: it is damaged, on every rank.
        CheckpointError: the store cannot be read.
    """
    attempt = ranks.from_first(lambda: secrets.token_hex(4))  # killed ones have left files
    path, unfinished = folder / checkpoint_of(copy), folder / f"{copy}-{attempt}{UNFINISHED_COPY}"
    files = parse_manifest(manifest, copy)

    def meet() -> None:
        if needs:
            unfinished.mkdir(parents=True, exist_ok=True)
            (unfinished / f"rank{ranks.rank}").touch()

    def finish() -> None:
        if members[:1] == [ranks.rank]:
            for mark in unfinished.glob("rank*"):
                mark.unlink()
            with open_plain(unfinished / MANIFEST, "xb") as file:
                file.write(manifest.encode())
            open_or_damage(unfinished, verify=False)
            if path.exists():
                set_aside(path)
            unfinished.rename(path)

    try:
        with writing():
            ranks.together(meet)
            # Ranks that see the same marks see one folder.
            seen = ranks.together(lambda: sorted(mark.name for mark in unfinished.glob("rank*")))
            own = seen[ranks.rank]
            members = [rank for rank, marks in enumerate(seen) if own and marks == own]
            own_files = list(files)[members.index(ranks.rank) :: len(members)] if members else []
            share = {name: files[name] for name in own_files}
            ranks.together(lambda: _get(store, copy, share, unfinished))
            ranks.together(finish)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


@contextmanager
def writing() -> Iterator[None]:
    """Translate errors of this disk.

    Raises:
        CheckpointError: in place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError.cannot(
            "fetch a checkpoint",
            why=first_line(error),
            instead="free space or choose another folder",
        ) from error


def _get(store: Store, copy: str, files: Mapping[str, Entry], folder: Path) -> None:
    """Fetch files and verify them."""

    def get(file: str, entry: Entry) -> None:
        with reading(store), suppress(FileNotFoundError):  # then `check_member` misses it
            _check_size(store, copy, file, entry.size, entry.size)
            store.open(copy, file, folder / file)
        check_member(folder, file, entry)

    for file, entry in files.items():
        try:
            get(file, entry)
        except DamagedError:  # a transfer may have been cut
            get(file, entry)


# -------------------------------------------------------------------------------------- writing


def newer_copies(store: Store, at: Timestamp, run_id: str) -> list[str]:
    """Return the copies after this position, of an earlier attempt; refuse those of another run.

    If a run that resumes does not reach its copies, that is a warning.

    Raises:
        CheckpointError: another run has copies there; or a new run does not reach the store.
        TrainingError: a new run finds copies.
    """
    try:
        names = store.list()
        lost = store.without_manifest() if isinstance(store, UrlStore) else ()
        if (names or lost) and not at.batch:
            raise TrainingError.cannot(
                f"begin a run that copies checkpoints to {store!r}",
                why="another run has checkpoints there",
                instead="continue it with resume='auto', or choose another address",
            )
        runs = run_ids(store, [*names, *lost])
        _check_run(store, {*runs.values()}, run_id)
        return [name for name in names if name in runs and position_of(name) > at.sample]
    except StrettoError:
        raise
    except Exception as error:
        if not at.batch:
            raise _unreadable(store, error) from error
        _warn_of_newer(store, first_line(error))
    return []


def set_copies_aside(store: Store, names: Sequence[str]) -> None:
    """Set copies of an earlier attempt aside; what cannot be done is a warning."""
    try:
        if isinstance(store, UrlStore):
            store.set_aside(names)
        elif names:
            raise TypeError(f"a {type(store).__name__} cannot set them aside")
    except Exception as error:  # noqa: BLE001  a store may raise anything
        _warn_of_newer(store, first_line(error))


def _warn_of_newer(store: Store, why: str) -> None:
    warnings.warn(
        f"copies of an earlier attempt stay in {store!r} ({why}); until this run has copied a "
        "newer checkpoint, resume='auto' may use one of those",
        RuntimeWarning,
        stacklevel=3,
    )


def copied(store: Store, path: Path) -> str:
    """Return the name of the copy of a checkpoint; if there is none, copy it.

    It is a copy once it can be read back and is in the list.

    Raises:
        Exception: what the store raises.
    """
    manifest = read_plain(path / MANIFEST).decode()
    for copy in store.list():
        if checkpoint_of(copy) == path.name and text_of(store, copy, MANIFEST) == manifest:
            return copy
    copy = f"{path.name}-{secrets.token_hex(4)}"
    store.write(copy, path)
    for pause in LIST_PAUSES:  # some lists lag behind
        # The manifest is written last: with another one, the checkpoint was replaced meanwhile.
        if (
            copy in store.list()
            and text_of(store, copy, MANIFEST) == manifest
            and all(_is_there(store, copy, file) for file in path.iterdir())
        ):
            return copy
        time.sleep(pause)
    raise OSError(f"{copy} is not there after it was written")


def _is_there(store: Store, copy: str, file: Path) -> bool:
    """Return whether a file of a copy can be seen; of a large one, its size."""
    if file.name in (MANIFEST, RECORDS):
        return text_of(store, copy, file.name).encode() == read_plain(file)
    return not isinstance(store, UrlStore) or store.size_of(copy, file.name) == file.stat().st_size


@final
class Uploader:
    """Copies each checkpoint to a store; the newest one that waits replaces an older one.

    A checkpoint that must stay, such as the best, is not replaced. A failure is a warning and never
    ends the run.

    Args:
        store: where to.
        keep: how many of the newest copies stay there.
        patience: how many seconds `close` waits.
    """

    def __init__(self, store: Store, keep: int, patience: float = PATIENCE_SECONDS) -> None:
        self._store = store
        self._keep = keep
        self._patience = patience
        self._waiting: list[tuple[Path, frozenset[int]]] = []
        self._copied: Path | None = None
        """The checkpoint that is being copied."""
        self._missing: list[str] = []
        self._runs: dict[str, str] = {}
        """Of which run each copy is, as far as that was looked up."""
        self._written: list[str] = []
        """Copies that were seen in the list, which may lag behind later."""
        self._thread: Thread | None = None
        self._lock = Lock()

    @property
    def missing(self) -> str | None:
        """The newest checkpoint, or one that must stay, whose copy is not complete."""
        return self._missing[-1] if self._missing else None

    @property
    def held(self) -> list[Path]:
        """The checkpoints that wait or are being copied, so must not be deleted."""
        with self._lock:
            waiting = [path for path, _ in self._waiting]
            return waiting if self._copied is None else [self._copied, *waiting]

    def submit(self, path: Path, stay: Iterable[Path]) -> None:
        """Copy a checkpoint when those before it are done.

        Args:
            path: the checkpoint.
            stay: older ones, such as the best, whose copies stay beside the newest.
        """
        if self._thread is None:  # what a killed process has left
            for left in path.parent.glob(f"checkpoint-*{UNFINISHED_COPY}"):
                shutil.rmtree(left, ignore_errors=True)
        best = {other.name for other in stay}
        with self._lock:
            self._waiting = [job for job in self._waiting if job[0].name in best]
            self._waiting.append((path, frozenset(map(position_of, best))))
            stays = [name for name in self._missing if name in best - {path.name}]
            self._missing = [*stays, path.name]
            if self._thread is None:
                # A daemon: `close` waits for it, and no longer than it may.
                self._thread = Thread(target=self._work, name="stretto-upload", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for the last copy, but not for ever."""
        thread = self._thread
        if thread is not None:
            thread.join(self._patience)
        if self.missing is not None:
            warnings.warn(f"{self.missing} is not in {self._store!r}", RuntimeWarning, stacklevel=2)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._copied = None
                if not self._waiting:
                    self._thread = None
                    return
                path, stay = self._waiting.pop(0)
                self._copied, name = path, path.name
            # A run that resumes submits its checkpoint again.
            if self._tried(f"copy {name} to", partial(self._copy, path)):
                with self._lock:
                    self._missing = [other for other in self._missing if other != name]
                self._tried("delete older copies in", partial(self._clean, position_of(name), stay))

    def _tried(self, what: str, work: Callable[[], object]) -> bool:
        """Return whether `work` succeeds; a failure is a warning."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  a store may raise anything
            with suppress(RuntimeWarning):  # warnings may be errors, and the thread stays
                warnings.warn(
                    f"cannot {what} {self._store!r}: {first_line(error)}; training continues",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return False
        return True

    def _copy(self, path: Path) -> None:
        copy = copied(self._store, path)
        self._written = [other for other in self._written if other != copy] + [copy]

    def _clean(self, newest: int, stay: frozenset[int]) -> None:
        """Delete old copies; later ones, which an attempt before this one has left, stay."""
        names = [*self._store.list(), *self._written]
        self._runs |= run_ids(self._store, (name for name in names if name not in self._runs))
        unread = [name for name in names if name not in self._runs]  # it may be another run's
        if len({self._runs[name] for name in names if name in self._runs}) > 1:
            raise RuntimeError("another run has copies there; give each run an address of its own")
        later = {name for name in names if position_of(name) > newest}
        own = [name for name in dict.fromkeys(names) if name not in later]
        own.sort(key=position_of)  # stable: of one position, the last written stays last
        best = [name for name in own if position_of(name) in stay]
        kept = {*own[-self._keep :], *best, *later, *unread, self._written[-1]}
        self._store.keep(kept)
        self._written = [name for name in self._written if name in kept]
