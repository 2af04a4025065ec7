"""What a run leaves behind: lines of metrics, and a ledger with a line for every batch."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from stretto.distributed.logged import MicroLoss, Sums
from stretto.errors import CheckpointError, TrainingError
from stretto.run import Run
from stretto.runtime.packing import count, number
from stretto.timing import Timestamp
from stretto.timing.timestamp import NANOSECONDS
from stretto.training.checkpointing.records import set_aside, unwritable
from stretto.training.logs.console import ConsoleLogger
from stretto.training.logs.loggers import (
    Appender,
    Guarded,
    Logger,
    check_appendable,
    cut_with_note,
    json_line,
)

METRICS = "metrics.jsonl"
LEDGER = "ledger.csv"
FILES = (METRICS, LEDGER)
MOST_PENDING = 256
"""Batches that are kept before they are recorded: reading a loss waits for the device."""
_COLUMNS = ("batch", "epoch", "sample", "token", "size", "tokens", "micro_batches")


class Finished(NamedTuple):
    """One batch that has been trained on."""

    at: Timestamp
    """The clock before it."""
    size: int
    batch_size: int
    """The size in force; the end of an epoch may have cut the batch."""
    losses: Sequence[MicroLoss]
    """Those of this rank; none if the step was left out."""
    after: Timestamp
    num_micro_batches: int
    """Into how many the step was cut on this rank."""
    values: Sequence[float]
    """The hyper-parameters in force."""


@final
class Recorder:
    """Collects losses and throughput between logs, and writes on rank 0.

    Args:
        run: the run.
        loggers: where metrics go besides the run folder.
        console: shows the metrics and the progress of the run; None: nothing does.
        config: the settings of the run, for loggers.
    """

    def __init__(
        self,
        run: Run,
        loggers: Sequence[Logger],
        *,
        console: ConsoleLogger | None,
        config: Mapping[str, Any],
    ) -> None:
        self.pending: list[Finished] = []
        """Batches that are not recorded yet; the loop appends to it."""
        self.loss = Sums()
        self.units = 0.0
        """What the loss in the last line is a mean over: samples, or target tokens."""
        self._run = run
        self._ranks = run.ranks
        self._folder = run.folder
        self._writes = run.ranks.is_first
        self.console = console if self._writes else None
        shown = () if self.console is None else (self.console,)
        self._given = [Guarded(one) for one in (*loggers, *shown)] if self._writes else []
        self._config = config
        self._loggers: list[Guarded] = []
        self._goes_on = False
        self._lengths: Mapping[str, int] = {}
        self._metrics: Appender | None = None
        self._ledger: Appender | None = None
        self._is_full = False
        self._since = Timestamp()
        self._samples = self._tokens = 0
        self._paused_nanoseconds = self._paused_after_batch = 0
        self._size: int | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether there was a batch since the last line of training."""
        return self._size is not None or bool(self.pending)

    def open(self, timestamp: Timestamp) -> None:
        """Open the files; what is logged first is measured from `timestamp` on.

        Files of a run that goes on are cut back to where its checkpoint left them.

        Raises:
            TrainingError: the folder holds another run, or cannot be written to.
        """
        self._since = timestamp
        self._samples = self._tokens = 0
        self._paused_nanoseconds = self._paused_after_batch = 0
        if self._folder is not None and self._writes:
            self._open_files(self._folder)
        self._loggers = [
            one for one in self._given if one.start(dict(self._config), timestamp.sample)
        ]
        if self.console is not None:
            self.console.show(self._run.clock(timestamp))

    def _open_files(self, folder: Path) -> None:
        ledger = folder / LEDGER
        try:
            for name in FILES:
                check_appendable(folder / name)
            if not self._goes_on and ledger.exists() and ledger.stat().st_size:
                raise _another_run(folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._cut(folder)
            self._metrics = Appender(folder / METRICS)
            self._ledger = Appender(ledger)
        except OSError as error:
            raise unwritable(folder, error) from error
        if self._ledger.is_empty:
            self._ledger.add(",".join((*_COLUMNS, *self._run.hyperparameters.values())) + "\n")
        self._goes_on = True

    def record(self) -> None:
        """Record the batches that are pending, and read their losses."""
        self._collect()
        self.loss.read()

    def _collect(self) -> None:
        """Record the batches that are pending, but read nothing from the device."""
        pending, self.pending = self.pending, []
        if not pending:
            return
        # What came behind the batch before lies between the two; what comes behind the last one
        # does not lie before its `after`, which the next line of metrics may be measured up to.
        self._paused_nanoseconds += self._paused_after_batch
        self._paused_after_batch = 0
        self._size = pending[-1].batch_size
        lines, each = [], self._run.horizon.tokens_per_sample or 0
        for at, size, _, _, after, num_micro_batches, values in pending:
            # The clock also passes over what `last_batch="drop"` leaves out after the batch.
            tokens = after.token - at.token - (after.sample - at.sample - size) * each
            self._samples += size
            self._tokens += tokens
            shown = ",".join(map(repr, map(float, values)))
            lines.append(
                f"{at.batch},{at.epoch},{at.sample},{at.token},{size},"
                f"{tokens},{num_micro_batches},{shown}\n"
            )
        if self._ledger is not None:
            self._ledger.add("".join(lines))
        for one in pending:
            self.loss.add_losses(one.losses)

    def show_progress(self, timestamp: Timestamp) -> None:
        """Move the bar of the console, if it is time to."""
        if self.console is not None and self.console.is_due:
            self.console.show(self._run.clock(timestamp))

    def log(self, timestamp: Timestamp, values: Mapping[str, float]) -> dict[str, float]:
        """Log what was measured since the last call, and `values`. Every rank must call it.

        There must have been a batch.

        Raises:
            TrainingError: a callback has logged a value by a name that the line has already.
        """
        self.record()
        assert self._size is not None, "there is something to log"
        before, self._since = self._since, timestamp
        passed = timestamp.run_nanoseconds - before.run_nanoseconds - self._paused_nanoseconds
        self._paused_nanoseconds = 0
        samples, self._samples = self._samples, 0
        tokens, self._tokens = self._tokens, 0
        seconds = max(passed, 1) / NANOSECONDS
        sums, self.loss = self.loss, Sums()
        total, self.units, any_logged = self._ranks.total(
            (sums.total, sums.weight, bool(self._run.logged))
        )
        record = {
            **self._run.clock(timestamp),
            "loss": total / self.units if self.units else math.nan,
            "batch_size": self._size,
            **self._run.hyperparameters.values(),
            "samples_per_second": samples / seconds,
        }
        if self._run.skipped_steps:
            record["skipped_steps"] = self._run.skipped_steps
        if timestamp.token:
            record["tokens_per_second"] = tokens / seconds
        record |= values
        if any_logged:
            record |= self._run.logged.take(self._ranks, taken=record.keys())
        self._size = None
        self.write(record)
        return record

    def write(self, record: Mapping[str, float]) -> None:
        """Write one line of metrics, and hand it to every logger."""
        if self._metrics is not None:
            self._metrics.add(json_line(record))
        for logger in self._loggers:
            logger.call("log", record)

    def paused(self, work: Callable[[], Any]) -> Any:
        """Return `work()`, whose time does not count as training time."""
        self.record()
        start = time.monotonic_ns()
        try:
            return work()
        finally:
            self._paused_after_batch += time.monotonic_ns() - start

    def flush(self) -> None:
        """Put everything that was recorded on the disk; what it has no room for is kept."""
        self.record()
        self._try([one.flush for one in self._outputs], "they are kept and training goes on")
        for logger in self._loggers:
            logger.flush()

    def close(self) -> None:
        """Flush and close everything."""
        self._collect()  # after a failure of the device, its losses cannot be read
        self._is_full = False
        self._try([one.close for one in self._outputs], "they are lost")
        self._ledger = self._metrics = None
        for logger in self._loggers:
            logger.call("close")
        self._loggers = []

    @property
    def _outputs(self) -> list[Appender]:
        return [one for one in (self._ledger, self._metrics) if one is not None]

    def _try(self, works: Sequence[Callable[[], None]], then: str) -> None:
        """Do it; where the disk is full, say so once."""
        failure = None
        for work in works:
            try:
                work()
            except OSError as error:
                failure = error
        if failure is not None and not self._is_full:
            why = (failure.strerror or str(failure)).lower()
            warnings.warn(
                f"cannot write lines of {METRICS} or {LEDGER}: {why}; {then}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._is_full = failure is not None

    @property
    def files(self) -> list[Path]:
        """The files that this rank writes."""
        return [self._folder / name for name in FILES] if self._folder and self._writes else []

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last log, and how long the files are by now.

        Every rank must call it.

        Raises:
            CheckpointError: the files cannot be written, so nothing can go on from them.
        """
        self.flush()
        total, weight = self._ranks.total((self.loss.total, self.loss.weight))
        logged = self._run.logged.state_dict(self._ranks)
        if any(one.is_waiting for one in self._outputs):
            raise _no_checkpoint(self._folder, f"{METRICS} and {LEDGER} cannot be written")
        try:
            lengths = {file.name: file.stat().st_size for file in self.files}
        except OSError as error:  # somebody has moved one
            raise _no_checkpoint(self._folder, str(error)) from error
        loss = {"sum": total, "weight": weight}
        return {"loss": loss, "logged": logged, "size": self._size, "files": lengths}

    def load_state_dict(self, state: Mapping[str, Any], *, is_own: bool) -> None:
        """Continue from saved sums, and where files are its own, from where those were."""
        sums = number(state["loss"], "sum"), number(state["loss"], "weight")
        self.loss = Sums("mean", *sums) if self._writes else Sums()
        self._run.logged.load_state_dict(state.get("logged", {}), self._ranks)
        self._size = None if state.get("size") is None else count(state, "size", least=1)
        # Files of this folder that belong to another past are none to go on with.
        self._goes_on = is_own
        self._lengths = {name: count(state["files"], name) for name in FILES} if is_own else {}

    def start_over(self) -> None:
        """Set the files aside: what a run left that had no checkpoint yet is done once more."""
        self._goes_on = True
        self._lengths = dict.fromkeys(FILES, 0)

    def _cut(self, folder: Path) -> None:
        """Cut the files back to where the checkpoint left them; say what they lack."""
        for name in FILES:
            path, length = folder / name, self._lengths.get(name)
            if length == 0 and path.is_file() and path.stat().st_size:
                set_aside(path)
            elif missing := cut_with_note(path, length, self._since.batch):
                warnings.warn(f"{path} {missing}", RuntimeWarning, stacklevel=2)
        self._lengths = {}


def _no_checkpoint(folder: Path | None, why: str) -> CheckpointError:
    return CheckpointError.cannot(
        f"write a checkpoint of {folder}", why=why, instead="make room, or put them back"
    )


def _another_run(folder: Path) -> TrainingError:
    return TrainingError.cannot(
        f"begin a run in {folder}",
        why="it holds one already",
        instead="choose another folder, or call trainer.resume() first to go on with that one",
    )
