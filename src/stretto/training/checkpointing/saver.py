"""When a checkpoint is due, where it goes, and how it gets there while training goes on.

A save holds the step only while tensors are copied to host memory. A thread writes the copies. How
far each rank is travels in the sum that the ranks form at every step anyway, so that nobody waits
for the disk, and no thread talks to another rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple, final

from stretto.checkpoint import (
    HostCopies,
    Staged,
    abandon_checkpoint,
    begin_checkpoint,
    checkpoint_path,
    checkpoints,
    encode_records,
    finish_checkpoint,
    keep,
    write_part,
)
from stretto.errors import CheckpointError, TrainingError, cannot
from stretto.settings import Checkpointing
from stretto.timing import BoundTrigger, Timestamp
from stretto.training.checkpointing.resuming import FOLDER
from stretto.training.checkpointing.state import RunState
from stretto.training.distributed.ranks import Ranks
from stretto.training.evaluation.best import Best
from stretto.training.logs.appending import synchronize_file


class Progress(NamedTuple):
    """How far a save is, as the ranks sum it up."""

    written: float = 0
    """Ranks that have nothing left to write."""
    failed: float = 0
    """Ranks that could not write."""
    finished: float = 0
    """1 where the first rank has put the checkpoint in its place."""


@final
class Saver:
    """Writes checkpoints into the run folder, one at a time.

    Raises:
        TrainingError: checkpoints are wanted and there is no folder for them.
    """

    def __init__(
        self,
        settings: Checkpointing | None,
        folder: Path | None,
        *,
        trigger: BoundTrigger | None,
        ranks: Ranks,
        state: RunState,
        best: Best,
    ) -> None:
        if settings is not None and folder is None:
            raise TrainingError(
                cannot(
                    "write checkpoints",
                    why="the run has no folder",
                    instead="pass folder='runs/name', or leave checkpoint out",
                )
            )
        self.folder = folder / FOLDER if folder is not None else None
        self._settings = settings
        self.trigger = trigger
        """When a checkpoint is due."""
        self._ranks = ranks
        self._state = state
        self._best = best
        self._copies = HostCopies()
        self._job: _Job | None = None
        self.saved_at: int | None = None
        """The position of the last checkpoint of this run, which needs no second one."""
        self.failure: str | None = None
        """Why the last checkpoint could not be written; None where it could."""

    def is_due(self, before: Timestamp, after: Timestamp) -> bool:
        """Return whether one is due between two timestamps."""
        return self.trigger is not None and self.trigger(before, after)

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written; on all ranks or on none."""
        return self._job is not None

    def begin(self, timestamp: Timestamp) -> Path | None:
        """Begin to write a checkpoint unless this position has one; every rank must call it.

        One that is being written is waited for.

        Returns:
            The path of that one, if it is whole now.
        """
        if self._settings is None or self.folder is None:
            return None
        if self._job is not None and self._job.sample == timestamp.sample:
            return None
        earlier = self.wait()
        if self.saved_at == timestamp.sample:
            return earlier
        path = checkpoint_path(self.folder, timestamp.sample)
        writers = self._ranks.world_size if self._state.is_sharded else 1
        is_first = self._ranks.is_first
        records, staged, error = "", None, None
        try:
            tensors, state = self._state.capture()
            if is_first:
                begin_checkpoint(path)
                # As text, because what it is made of goes on changing.
                records = encode_records(state)
            if is_first or writers > 1:
                staged = self._copies.take(tensors)
        except CheckpointError as caught:
            error = caught
        # The others write into the folder when it is there, and hear of what went wrong.
        if self._ranks.agree((error is not None,))[0]:
            if is_first:
                abandon_checkpoint(path)
            self._report(error)
            return earlier
        self._job = _Job(
            path,
            staged,
            records,
            rank=self._ranks.rank,
            writers=writers,
            files=self._state.files,
            stay=(self._settings.keep, self._best.paths(self.folder)),
        )
        return earlier

    def owns(self, path: Path) -> bool:
        """Return whether a checkpoint is one of the run's; one that was set aside is not."""
        return self.folder is not None and path.resolve() in [
            one.resolve() for one in checkpoints(self.folder)
        ]

    def progress(self) -> Progress:
        """Return how far this rank is, for the sum over all of them."""
        return Progress() if self._job is None else self._job.progress()

    def advance(self, total: Progress) -> Path | None:
        """Go on as far as all ranks are, and return the path of a checkpoint that became whole.

        A checkpoint that cannot be written is reported and does not stop the run; the ones before
        it stay.
        """
        job = self._job
        if job is None:
            return None
        if total.failed:
            self._job = None
            self._report(job.end())
        elif total.finished:
            self._job = None
            job.end()
            self._note_whole(job)
            return job.path
        elif total.written == self._ranks.world_size:
            job.all_written.set()
        return None

    def wait(self) -> Path | None:
        """Wait for the checkpoint that is being written, if any; every rank must call it."""
        path = None
        while self._job is not None:
            self._job.written.wait()
            if self._job.all_written.is_set():
                self._job.join()
            path = self.advance(Progress(*self._ranks.agree(self.progress())))
        return path

    def close(self) -> None:
        """Leave nothing running, also where the ranks cannot agree any more."""
        job, self._job = self._job, None
        if job is not None:
            error = job.end()
            if error is None and job.progress().finished:
                self._note_whole(job)
            else:
                self._report(error)
        self._copies = HostCopies()

    def _note_whole(self, job: _Job) -> None:
        self.saved_at, self.failure = job.sample, None
        self._best.confirm(job.sample)

    def _report(self, error: Exception | None) -> None:
        self.failure = str(error) if error is not None else "another rank could not write"
        if error is not None:
            warnings.warn(f"{error}; training goes on", RuntimeWarning, stacklevel=4)


@final
class _Job:
    """One checkpoint on its way to the disk.

    Args:
        path: where it goes.
        staged: what this rank writes; None: nothing.
        records: what is not a tensor, as JSON.
        rank: this rank.
        writers: how many ranks write.
        files: files of the run that must be on the disk before the checkpoint is.
        stay: how many of the newest checkpoints stay, and which besides.
    """

    def __init__(
        self,
        path: Path,
        staged: Staged | None,
        records: str,
        *,
        rank: int,
        writers: int,
        files: Sequence[Path],
        stay: tuple[int, Sequence[Path]],
    ) -> None:
        self.path = path
        self.sample = int(path.name.rpartition("-")[2])
        self.written = Event()
        self.all_written = Event()
        self._staged = staged
        self._records = records
        self._rank = rank
        self._writers = writers
        self._files = files
        self._stay = stay
        self._is_abandoned = False
        self._is_finished = False
        self._error: Exception | None = None
        self._thread: Thread | None = None
        if staged is None:
            self.written.set()
        else:
            # No daemon: an interpreter that exits lets it finish.
            self._thread = Thread(target=self._work, name="stretto-checkpoint")
            self._thread.start()

    def progress(self) -> Progress:
        """Return how far this rank is."""
        has_failed = self._error is not None
        return Progress(self.written.is_set() and not has_failed, has_failed, self._is_finished)

    def join(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def end(self) -> Exception | None:
        """End the thread, leaving a checkpoint that cannot become whole; return what went wrong."""
        if self._writers > 1 and not self.all_written.is_set():
            self._is_abandoned = True
            self.all_written.set()
        self.join()
        return self._error

    def _work(self) -> None:
        try:
            assert self._staged is not None
            write_part(self.path, self._staged, rank=self._rank, world_size=self._writers)
            self._staged = None
            self.written.set()
            if self._rank == 0:
                self._finish()
        except Exception as error:  # noqa: BLE001  the main thread reports it
            self._error = error
            if self._rank == 0:
                abandon_checkpoint(self.path)
        finally:
            self.written.set()

    def _finish(self) -> None:
        if self._writers > 1:
            self.all_written.wait()
        if self._is_abandoned:
            abandon_checkpoint(self.path)
            return
        for file in self._files:
            try:
                synchronize_file(file)
            except OSError as error:
                why = f"{file.name}: {error.strerror or error}"
                instead = "make room, or put the file back"
                raise CheckpointError(
                    cannot(f"write {self.path}", why=why, instead=instead)
                ) from error
        finish_checkpoint(self.path, self._records, world_size=self._writers)
        newest, others = self._stay
        keep(self.path.parent, newest=newest, also=others)
        self._is_finished = True
