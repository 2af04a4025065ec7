"""Copies of checkpoints in a store, made by one background thread."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock, Thread
from typing import Any, final

from stretto.checkpoint.folder import Store, UrlStore, position_of
from stretto.errors import TrainingError, first_line
from stretto.runtime.ranks import Ranks
from stretto.training.checkpointing.fetching import UNFINISHED, copied, run_ids

PATIENCE_SECONDS = 20.0
"""How long the end of a run waits for its last upload; torchrun kills after 30 s."""


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
        self._waiting: list[tuple[Path, str, frozenset[int]]] = []
        self._missing: list[str] = []
        self._runs: dict[str, str | None] = {}
        """Of which run each copy is, as far as that was looked up."""
        self._written: list[str] = []
        """Copies that were seen in the list, which may lag behind later."""
        self._is_shared = False
        self._thread: Thread | None = None
        self._lock = Lock()

    @property
    def missing(self) -> str | None:
        """The newest checkpoint, or one that must stay, whose copy is not complete."""
        return self._missing[-1] if self._missing else None

    def submit(self, path: Path, stay: Iterable[Path]) -> None:
        """Copy a checkpoint when those before it are done.

        Args:
            path: the checkpoint.
            stay: older ones, such as the best, whose copies stay beside the newest.
        """
        if self._thread is None:  # what a killed process has left
            for left in path.parent.glob(f"*{UNFINISHED}"):
                shutil.rmtree(left, ignore_errors=True)
        best = {one.name for one in stay}
        links = _linked(path)
        with self._lock:
            for job in self._waiting:
                if job[1] not in best:
                    _unlink(job[0])
            self._waiting = [job for job in self._waiting if job[1] in best]
            self._waiting.append((links, path.name, frozenset(map(position_of, best))))
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
                if not self._waiting:
                    self._thread = None
                    return
                links, name, stay = self._waiting.pop(0)
            # A run that resumes submits its checkpoint again.
            if self._tried(f"copy {name} to", partial(self._copy, name, links)):
                with self._lock:
                    self._missing = [one for one in self._missing if one != name]
                self._tried("delete older copies in", partial(self._clean, position_of(name), stay))
            _unlink(links)

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

    def _copy(self, name: str, links: Path) -> None:
        copy = copied(self._store, name, links)
        self._written = [one for one in self._written if one != copy] + [copy]

    def _clean(self, newest: int, stay: frozenset[int]) -> None:
        """Delete old copies, and later ones, which an attempt before this one has left."""
        names = [*self._store.list(), *self._written]
        self._runs |= run_ids(self._store, (name for name in names if name not in self._runs))
        unread = [name for name in names if name not in self._runs]  # it may be another run's
        if len({self._runs.get(name) for name in names} - {None}) > 1:
            self._warn_once()
            return
        own = [name for name in dict.fromkeys(names) if position_of(name) <= newest]
        own.sort(key=position_of)  # stable: of one position, the last written stays last
        best = [name for name in own if position_of(name) in stay]
        kept = {*own[-self._keep :], *best, *unread, self._written[-1]}
        self._store.keep(kept)
        self._written = [name for name in self._written if name in kept]

    def _warn_once(self) -> None:
        """Say that copies of another run are there, so none is deleted."""
        if not self._is_shared:
            self._is_shared = True
            with suppress(RuntimeWarning):
                message = f"another run copies checkpoints to {self._store!r}, so this one deletes "
                message += "no older copies there; give each run an address of its own"
                warnings.warn(message, RuntimeWarning, stacklevel=3)


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


def _linked(path: Path) -> Path:
    """Return a folder of hard links to a checkpoint, which `keep` may delete meanwhile.

    It is the checkpoint itself if the file system has no hard links.
    """
    # A copy that is under way, from before a second `fit`, has links of its own.
    numbered = (f"{path.name}{f'.{n}' if n else ''}{UNFINISHED}" for n in count())
    links = next(one for one in map(path.with_name, numbered) if not one.exists())
    try:
        shutil.copytree(path, links, copy_function=os.link)
    except OSError:
        shutil.rmtree(links, ignore_errors=True)
        return path
    return links


def _unlink(links: Path) -> None:
    if links.name.endswith(UNFINISHED):
        shutil.rmtree(links, ignore_errors=True)
