"""Copies of checkpoints in a store, made by one background thread."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any, final

from stretto.checkpoint import describe
from stretto.checkpoint.folder import Store, UrlStore, position_of
from stretto.distributed.ranks import Ranks
from stretto.errors import CheckpointError, TrainingError, first_line

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
    """

    def __init__(self, store: Store, keep: int) -> None:
        self._store = store
        self._keep = keep
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
        links = path.with_name(path.name + _LINKS)
        if self._thread is None:  # what a killed process has left
            for left in path.parent.glob(f"*{_LINKS}"):
                shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(path, links, copy_function=_link)
        positions = frozenset(position_of(one.name) for one in stay)
        with self._lock:
            if self._waiting is not None:
                shutil.rmtree(self._waiting[0], ignore_errors=True)
            self._waiting, self.missing = (links, path.name, positions), path.name
            if self._thread is None:
                # A daemon: `close` waits for it, and no longer than it may.
                self._thread = Thread(target=self._work, name="stretto-upload", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for the last copy, but not for ever."""
        thread, end = self._thread, time.monotonic() + PATIENCE_SECONDS
        if thread is not None:
            thread.join(max(0.0, end - time.monotonic()))
        if self.missing is not None:
            warnings.warn(f"{self.missing} is not in {self._store!r}", RuntimeWarning, stacklevel=2)

    def _work(self) -> None:
        while True:
            with self._lock:
                job = self._waiting
                self._waiting = None
                if job is None:
                    self._thread = None
                    return
            links, name, stay = job
            try:
                self._store.write(f"{name}-{time.time_ns():016x}", links)
                with self._lock:
                    if self.missing == name:
                        self.missing = None
                self._clean(position_of(name), stay)
            except Exception as error:  # noqa: BLE001  a store may raise anything
                warnings.warn(
                    f"cannot copy {name} to {self._store!r}: {first_line(error)}; training goes on",
                    RuntimeWarning,
                    stacklevel=2,
                )
            finally:
                shutil.rmtree(links, ignore_errors=True)

    def _clean(self, newest: int, stay: frozenset[int]) -> None:
        """Delete old copies, and later ones, which an attempt before this one has left."""
        found = self._store.list()
        own = [name for name in found if position_of(name) <= newest]
        kept = {*own[-self._keep :], *(name for name in own if position_of(name) in stay)}
        for name in found:
            if name not in kept:
                self._store.delete(name)


def fetch_newest(store: Store, folder: Path) -> Path | None:
    """Copy the newest whole checkpoint of a store into a folder of checkpoints.

    Returns:
        Its path; None if the store has none.

    Raises:
        CheckpointError: the store cannot be read.
    """
    try:
        for name in reversed(store.list()):
            path = folder / name.rpartition("-")[0]
            partial = path.with_name(path.name + _LINKS)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            store.open(name, partial)
            found = describe(partial)
            if found.is_whole:
                partial.rename(path)
                return path
            warnings.warn(
                f"{name} in {store!r} is damaged; an older one is used",
                RuntimeWarning,
                stacklevel=2,
            )
            shutil.rmtree(partial, ignore_errors=True)
    except Exception as error:
        raise CheckpointError.cannot(
            f"resume from {store!r}",
            why=first_line(error),
            instead="check the address and the rights, or copy a checkpoint into the run folder",
        ) from error
    return None


def as_store(upload: Any, ranks: Ranks) -> Store | None:
    """Return the store of `Checkpointing(upload=...)` on the first rank; all ranks call it.

    Raises:
        TrainingError: it is not a store, or cannot be reached.
    """
    if upload is None:
        return None

    store: list[Store] = []

    def reach() -> str:
        try:
            store.append(UrlStore(upload) if isinstance(upload, str) else upload)
            store[0].list()
        except Exception as error:
            raise TrainingError.cannot(
                f"copy checkpoints to {upload!r}",
                why=first_line(error),
                instead="write an address such as 's3://bucket/run', with s3fs installed, or pass "
                "a stretto.checkpoint.Store",
            ) from error
        return ""

    ranks.from_first(reach, call="Trainer()")
    return store[0] if store else None


def _link(source: str, target: str) -> None:
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)  # the file system has no hard links
