"""Copies of checkpoints in a store, made by one background thread."""

from __future__ import annotations

import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any, final

from stretto.checkpoint import open_checkpoint
from stretto.checkpoint.folder import Store, UrlStore, position_of
from stretto.checkpoint.manifest import MANIFEST, RECORDS, DamagedError, parse_object, read_manifest
from stretto.checkpoint.reading import open_or_damage
from stretto.distributed.ranks import Ranks
from stretto.errors import CheckpointError, StrettoError, TrainingError, first_line
from stretto.training.checkpointing.records import set_aside

PATIENCE_SECONDS = 20.0
"""How long the end of a run waits for its last upload; torchrun kills after 30 s."""
_LINKS = ".upload"
"""Ends the name of the folder of hard links that is uploaded: `keep` may delete the checkpoint."""


@final
class Uploader:
    """Copies each checkpoint to a store; the newest one that waits replaces an older one.

    A failure is a warning and never ends the run.

    Args:
        store: where to.
        keep: how many of the newest copies stay there.
        patience: how many seconds `close` waits.
    """

    def __init__(self, store: Store, keep: int, patience: float = PATIENCE_SECONDS) -> None:
        self._store = store
        self._keep = keep
        self._patience = patience
        self._waiting: tuple[Path, str, frozenset[int]] | None = None
        self._thread: Thread | None = None
        self._lock = Lock()
        self.missing: str | None = None
        """The newest checkpoint, if its copy is not complete."""

    def submit(self, path: Path, stay: Iterable[Path]) -> None:
        """Copy a checkpoint when those before it are done.

        Args:
            path: the checkpoint.
            stay: older ones, such as the best, whose copies stay beside the newest.
        """
        if self._thread is None:  # what a killed process has left
            for left in path.parent.glob(f"*{_LINKS}"):
                shutil.rmtree(left, ignore_errors=True)
        positions = frozenset(position_of(one.name) for one in stay)
        links = _linked(path)
        with self._lock:
            if self._waiting is not None:
                _unlink(self._waiting[0])
            self._waiting, self.missing = (links, path.name, positions), path.name
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
                job, self._waiting = self._waiting, None
                if job is None:
                    self._thread = None
                    return
            links, name, stay = job
            if self._tried(f"copy {name} to", partial(self._store.write, _unique(name), links)):
                with self._lock:
                    if self.missing == name:
                        self.missing = None
                self._tried("delete older copies in", partial(self._clean, position_of(name), stay))
            _unlink(links)

    def _tried(self, what: str, work: Callable[[], None]) -> bool:
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

    def _clean(self, newest: int, stay: frozenset[int]) -> None:
        """Delete old copies, and later ones, which an attempt before this one has left."""
        own = [name for name in self._store.list() if position_of(name) <= newest]
        best = [name for name in own if position_of(name) in stay]
        self._store.keep({*own[-self._keep :], *best})


def fetch_newer(store: Store, folder: Path, than: Path | None, bad: list[str]) -> Path | None:
    """Copy the newest whole checkpoint of a store into a folder, if it is newer than `than`.

    Of one position, the one that was written last is the newer one.

    Args:
        store: where copies are.
        folder: a folder of checkpoints.
        than: the newest whole checkpoint on this disk.
        bad: gets what is wrong with copies that are damaged.

    Returns:
        Its path; None if the store has none that is newer.

    Raises:
        CheckpointError: the store cannot be read.
    """
    with reading(store):
        for name in reversed(store.list()):
            try:
                if than is not None and not _is_newer(store, name, than, folder):
                    return None
                return fetch(store, name, folder)
            except DamagedError as damage:
                bad.append(f"{name} in {store!r} is damaged: {damage}")
    return None


def fetch_same(store: Store, folder: Path, name: str, manifest: str) -> Path:
    """Copy the checkpoint that has this manifest into a folder of this node; return its path.

    Raises:
        CheckpointError: the store cannot be read, or has no whole copy of it.
    """
    with reading(store):
        for copy in store.list():
            if _checkpoint_of(copy) == name and _text(store, copy, MANIFEST, folder) == manifest:
                with suppress(DamagedError):
                    return fetch(store, copy, folder)
        raise CheckpointError.cannot(
            f"resume from {name}",
            why=f"it is on another node, and {store!r} has no copy of it",
            instead="keep checkpoints in a folder that all nodes see",
        )


def fetch(store: Store, name: str, folder: Path) -> Path:
    """Copy a checkpoint of a store into a folder and verify it.

    Raises:
        DamagedError: it is damaged.
    """
    path = folder / _checkpoint_of(name)
    partial_copy = folder / f"{name}{_LINKS}"
    try:
        for is_last in (False, True):  # a transfer may have been cut
            shutil.rmtree(partial_copy, ignore_errors=True)
            partial_copy.mkdir(parents=True)
            try:
                _get(store, name, partial_copy)
                break
            except DamagedError:
                if is_last:
                    raise
        if os.path.lexists(path):
            set_aside(path)
        return partial_copy.rename(path)
    finally:
        shutil.rmtree(partial_copy, ignore_errors=True)


def _get(store: Store, name: str, folder: Path) -> None:
    try:
        store.open(name, MANIFEST, folder / MANIFEST)
        for file in read_manifest(folder):
            store.open(name, file, folder / file)
    except FileNotFoundError as error:
        raise DamagedError("a file is missing") from error
    open_or_damage(folder)


def _is_newer(store: Store, name: str, than: Path, folder: Path) -> bool:
    """Return whether a copy is newer than a checkpoint of this disk; equal ones are not."""
    if position_of(name) != position_of(than.name):
        return position_of(name) > position_of(than.name)
    if _text(store, name, MANIFEST, folder) == (than / MANIFEST).read_text("utf-8"):
        return False
    records = parse_object(_text(store, name, RECORDS, folder), RECORDS)
    return str(records.get("created")) > str(open_checkpoint(than, verify=False).created)


def _text(store: Store, name: str, file: str, folder: Path) -> str:
    """Return a small file of a copy; empty text if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{file}{_LINKS}"
    try:
        store.open(name, file, target)
        return target.read_text("utf-8")
    except FileNotFoundError:
        return ""
    finally:
        target.unlink(missing_ok=True)


@contextmanager
def reading(store: Store) -> Iterator[None]:
    """Turn what a store raises into a `CheckpointError`."""
    try:
        yield
    except StrettoError:
        raise
    except Exception as error:
        raise CheckpointError.cannot(
            f"resume from {store!r}",
            why=first_line(error),
            instead="check the address and the rights, or copy a checkpoint into the run folder",
        ) from error


def as_store(upload: Any, ranks: Ranks) -> Store | None:
    """Return the store of `Checkpointing(upload=...)`; every rank must call it.

    Raises:
        TrainingError: it is not a store, or the first rank cannot reach it.
    """
    if upload is None:
        return None
    stores: list[Store] = []

    def reach() -> str:
        try:
            stores.append(UrlStore(upload) if isinstance(upload, str) else upload)
            if ranks.is_first:
                stores[0].list()
        except Exception as error:
            raise TrainingError.cannot(
                f"copy checkpoints to {upload!r}",
                why=first_line(error),
                instead="write an address such as 's3://bucket/run', with s3fs installed, or pass "
                "a stretto.checkpoint.Store",
            ) from error
        return ""

    ranks.from_first(reach, call="Trainer()")
    if not ranks.is_first:
        reach()
    return stores[0]


def _checkpoint_of(copy: str) -> str:
    """Return the name of the checkpoint of a copy."""
    return copy.rpartition("-")[0]


def _unique(name: str) -> str:
    return f"{name}-{secrets.token_hex(4)}"


def _linked(path: Path) -> Path:
    """Return a folder of hard links to a checkpoint; itself if the file system has none."""
    links = path.with_name(path.name + _LINKS)
    try:
        shutil.copytree(path, links, copy_function=os.link)
    except OSError:
        shutil.rmtree(links, ignore_errors=True)
        return path
    return links


def _unlink(links: Path) -> None:
    if links.name.endswith(_LINKS):
        shutil.rmtree(links, ignore_errors=True)
