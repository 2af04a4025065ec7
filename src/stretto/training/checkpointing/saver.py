"""Write checkpoints asynchronously.

Training waits only while tensors are copied to host memory. A thread writes the copies. The ranks
share their progress in the sum that they form at every step anyway. So no rank waits for the disk,
and no thread communicates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import final

from torch import nn

from stretto.checkpoint import checkpoint_path, checkpoints, keep, open_checkpoint
from stretto.checkpoint.folder import Store, position_of
from stretto.checkpoint.sharding import HostCopies, Staged
from stretto.checkpoint.writing import (
    abandon_checkpoint,
    begin_checkpoint,
    encode_records,
    finish_checkpoint,
    write_part,
)
from stretto.distributed.strategy import Strategy
from stretto.errors import CheckpointError, TrainingError
from stretto.run import Run
from stretto.run_folder import check_lock
from stretto.settings import Checkpointing
from stretto.timing import Timestamp
from stretto.training.callback import Events
from stretto.training.checkpointing.copies import Uploader, open_store
from stretto.training.checkpointing.resuming import FOLDER
from stretto.training.checkpointing.state import (
    Part,
    capture,
    check_replicas,
    check_states,
    only_shards,
    restore,
)
from stretto.training.evaluate import Best
from stretto.training.logs.recorder import Recorder


@final
class Saver:
    """Writes checkpoints into the run folder, one at a time, and restores them.

    Args:
        settings: when and where; None: no checkpoints are written.
        run: the run.
        parts: what is saved, by name.
        model: what ranks must have in common.
        strategy: which part of the state this rank writes.
        recorder: its files are flushed to disk before a checkpoint.
        best: the best evaluation, whose checkpoint is kept.
        events: the callbacks.
        agree_to_stop: has all ranks learn whether one of them stops.

    Raises:
        TrainingError: checkpoints are requested, but the run has no folder.
    """

    def __init__(
        self,
        settings: Checkpointing | None,
        run: Run,
        *,
        parts: dict[str, Part],
        model: nn.Module,
        strategy: Strategy,
        recorder: Recorder,
        best: Best,
        events: Events,
        agree_to_stop: Callable[[], None],
    ) -> None:
        folder = run.folder
        if settings is not None and folder is None:
            why, instead = "the run has no folder", "pass folder='runs/name', or no checkpoint"
            raise TrainingError.cannot("write checkpoints", why=why, instead=instead)
        self.folder = folder / FOLDER if folder is not None else None
        self.parts, self._own = parts, dict(parts)
        self._settings, self._run = settings, run
        self._events, self._agree_to_stop = events, agree_to_stop
        self._model = model
        self._strategy, self._ranks = strategy, strategy.ranks
        self._recorder = recorder
        self._best = best
        self._copies = HostCopies()
        self.job: _Job | None = None
        """The checkpoint that is being written; on all ranks or on none."""
        self.saved_at: int | None = None
        """The position of the last checkpoint of this run."""
        self.failure: str | None = None
        """Why the last checkpoint could not be written; None if it was written."""
        self.store: Store | None = None
        """Where copies of checkpoints go."""
        self._uploader: Uploader | None = None
        if settings is not None and settings.upload is not None:
            self.store = open_store(settings.upload, self._ranks, call="Trainer()")
            if self._ranks.is_first:
                self._uploader = Uploader(self.store, settings.keep)

    def check_added(self) -> None:
        """Check the parts that were added since.

        Raises:
            TrainingError: one replaces a part of the run, or its state cannot be saved.
        """
        for name, own in self._own.items():
            if self.parts.get(name, own) is not own:
                why, instead = "the run has a part of that name", "choose another name"
                raise TrainingError.bad("part", name, why, instead)
        check_states({name: one for name, one in self.parts.items() if name not in self._own})

    def save_due(self) -> None:
        """Write a checkpoint that is due; the last one comes after the last line of metrics."""
        if not self._run.is_done:
            self.save()

    def save(self) -> None:
        """Begin a checkpoint of this position, unless there is one; every rank must call it."""
        now = self._run.timer.timestamp
        present = self.saved_at if self.job is None else self.job.sample
        if self._settings is None or present == now.sample:
            if self.saved_at == now.sample:
                self._best.confirm(now.sample)
            return
        self._recorder.paused(self.wait)
        self._events.tell("on_checkpoint_start")
        self._agree_to_stop()  # a checkpoint says whether the run has ended
        self._recorder.paused(lambda: self._begin(now))

    def _begin(self, timestamp: Timestamp) -> None:
        assert self._settings is not None, "checked"
        assert self.folder is not None, "checked when it was built"
        path = checkpoint_path(self.folder, timestamp.sample)
        writers = self._ranks.world_size if self._strategy.is_sharded else 1
        is_first = self._ranks.is_first
        records, staged, error, is_begun = "", None, None, False
        if self._strategy.has_equal_weights:
            check_replicas(self._model, self._ranks)
        try:
            tensors, state = capture(self.parts, self._strategy.part_of_state)
            if is_first:
                check_lock(self.folder.parent)
                begin_checkpoint(path)
                is_begun = True
                # Encode now, because the state changes while training continues.
                records = encode_records(state)
            if is_first or writers > 1:
                staged = self._copies.take(tensors if is_first else only_shards(tensors))
        except CheckpointError as caught:
            error = caught
        # All ranks learn that the folder exists, or that something failed.
        if self._ranks.agree((error is not None,))[0]:
            if is_begun:
                abandon_checkpoint(path)
            self._report(error, timestamp)
            return
        self.job = _Job(
            path=path,
            at=timestamp,
            staged=staged,
            records=records,
            rank=self._ranks.rank,
            writers=writers,
            files=self._recorder.files.paths,
            newest=self._settings.keep,
            others=self._best.paths(self.folder) + (self._uploader.held if self._uploader else []),
        ).start()

    @property
    def unsaved(self) -> str | None:
        """Why the last checkpoint, the best one or a copy is not there; None if all are."""
        missing = None if self._uploader is None else self._uploader.missing
        lost = None if self.job is not None else self._best.unsaved
        return (
            self.failure
            or (lost and f"{lost}, the best one, could not be written")
            or (missing and f"{missing} is not in {self.store!r}")
        )

    def restore(self, path: Path) -> list[str]:
        """Restore a checkpoint that is verified already; every rank must call it.

        Returns:
            One line for each part that is only in the run or only in the checkpoint.

        Raises:
            CheckpointError: it is that of another model, optimizer or data.
        """
        self.check_added()
        dropped = restore(self.parts, open_checkpoint(path, verify=False), path)
        own = () if self.folder is None else checkpoints(self.folder)
        if path.resolve() in map(Path.resolve, own):  # renamed ones are not among them
            self.saved_at = position_of(path.name)
            self._best.confirm(self.saved_at)
        else:
            self.saved_at = None
            self._recorder.files.lengths = None  # they are in another folder
            self._best.start_over()
        return dropped

    def submit(self) -> None:
        """Copy the checkpoint that the run resumes from, and the best, if that is not done yet."""
        if self.folder is not None and self.saved_at is not None:
            newest = checkpoint_path(self.folder, self.saved_at)
            best = [one for one in self._best.paths(self.folder) if one.is_dir() and one != newest]
            for path in (*best, newest):
                self._submit(path)

    def progress(self) -> Sequence[float]:
        """Return the progress of this rank, for the sum over all ranks.

        Two numbers: whether it has written everything, and 1 more if the first has finished; and
        whether it has failed.
        """
        return (0, 0) if self.job is None else self.job.progress()

    def advance(self, total: Sequence[float]) -> None:
        """Continue the save as far as all ranks are ready; callbacks learn when it is complete.

        A checkpoint that cannot be written is reported and does not stop the run. Earlier
        checkpoints are kept.
        """
        job, (written, failed) = self.job, total
        if job is None:
            return
        if failed:
            self.job = None
            self._report(job.end(), job.at)
        elif written > self._ranks.world_size:
            self.job = None
            job.end()
            self._note_whole(job)
            self._events.tell("on_checkpoint", job.path)
        elif written == self._ranks.world_size:
            job.all_written.set()

    def wait(self) -> None:
        """Wait for a checkpoint that is being written; every rank must call it."""
        while self.job is not None:
            self.job.written.wait()
            if self.job.all_written.is_set():
                self.job.join()
            self.advance(self._ranks.agree(self.progress()))

    def close(self) -> None:
        """Stop the thread, without communication between ranks."""
        job, self.job = self.job, None
        if job is not None:
            error = job.end()
            if error is None and job.is_finished:
                self._note_whole(job)
            else:
                self._report(error, job.at)
        self._copies.release()
        if self._uploader is not None:
            self._uploader.close()

    def _note_whole(self, job: _Job) -> None:
        self.saved_at, self.failure = job.sample, None
        self._best.confirm(job.sample)
        text = f"checkpoint {job.path.name} is written"
        self._recorder.files.event("checkpoint", job.at, text, path=job.path.name)
        self._submit(job.path)

    def _submit(self, path: Path) -> None:
        if self._uploader is not None:
            self._uploader.submit(path, self._best.paths(path.parent))

    def _report(self, error: Exception | None, at: Timestamp) -> None:
        self.failure = str(error) if error is not None else "another rank could not write"
        self._recorder.files.event("checkpoint_failed", at, f"no checkpoint: {self.failure}")
        if error is not None:
            warnings.warn(f"{error}; training continues", RuntimeWarning, stacklevel=4)


@final
@dataclass(kw_only=True)
class _Job:
    """One checkpoint that is being written."""

    path: Path
    """Its final path."""
    at: Timestamp
    """The clock that it is of."""
    staged: Staged | None
    """The tensors that this rank writes; None: nothing."""
    records: str
    """All other state, as JSON."""
    rank: int
    writers: int
    """How many ranks write."""
    files: Sequence[Path]
    """Files of the run that must be flushed to disk before the checkpoint."""
    newest: int
    """How many of the newest checkpoints to keep."""
    others: Sequence[Path]
    """Which others to keep."""
    written: Event = field(default_factory=Event)
    all_written: Event = field(default_factory=Event)
    _is_abandoned: bool = False
    is_finished: bool = False
    """Whether the checkpoint is in its place."""
    _error: Exception | None = None
    _thread: Thread | None = None

    def start(self) -> _Job:
        """Start the thread that writes."""
        if self.staged is None:
            self.written.set()
        else:
            # Not a daemon: the interpreter waits for it at exit.
            self._thread = Thread(target=self._work, name="stretto-checkpoint")
            self._thread.start()
        return self

    @property
    def sample(self) -> int:
        """The position of the checkpoint."""
        return position_of(self.path.name)

    def progress(self) -> Sequence[float]:
        """Return the progress of this rank."""
        has_failed = self._error is not None
        has_written = self.written.is_set() and not has_failed
        return has_written + self.is_finished, has_failed

    def join(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def end(self) -> Exception | None:
        """End the thread; abandon a checkpoint that cannot be completed; return its error."""
        if self.writers > 1 and not self.all_written.is_set():
            self._is_abandoned = True
            self.all_written.set()
        self.join()
        return self._error

    def _work(self) -> None:
        try:
            assert self.staged is not None
            write_part(self.path, self.staged, rank=self.rank, world_size=self.writers)
            self.staged = None
            self.written.set()
            if self.rank == 0:
                self._finish()
        except Exception as error:  # noqa: BLE001  the main thread reports it
            self._error = error
            if self.rank == 0:
                abandon_checkpoint(self.path)
        finally:
            self.written.set()

    def _finish(self) -> None:
        if self.writers > 1:
            self.all_written.wait()
        if self._is_abandoned:
            abandon_checkpoint(self.path)
            return
        finish_checkpoint(self.path, self.records, world_size=self.writers, others=self.files)
        keep(self.path.parent, newest=self.newest, also=self.others)
        self.is_finished = True
