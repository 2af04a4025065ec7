"""Lines of metrics, a ledger with a line for every batch, and events."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch

from stretto._location import open_plain
from stretto.data import Step
from stretto.distributed.logged import Sums
from stretto.errors import CheckpointError, PlanError, TrainingError, first_line
from stretto.planning.plan import Plan, plan_record
from stretto.run import Run
from stretto.run_folder import (
    EVENTS,
    LEDGER,
    LEDGER_COLUMNS,
    METRICS,
    PLAN,
    Appender,
    EventKind,
    cut_back,
    event_line,
    json_line,
    ledger_end,
    ledger_names,
    open_events,
    replace_file,
    set_aside,
    unwritable,
)
from stretto.runtime.agreement import as_text
from stretto.runtime.compiled import uncompiled
from stretto.runtime.out_of_memory import peak_memory
from stretto.runtime.packing import count, count_or_none, number
from stretto.schedules.scope import Mark, Scope
from stretto.timing import Timestamp
from stretto.timing.timestamp import NANOSECONDS
from stretto.training.callback import Events
from stretto.training.describe import is_unmade
from stretto.training.logs.loggers import ConsoleLogger, Guarded, Logger
from stretto.training.stepper import StepResult

RESUMED_FILES = (METRICS, LEDGER)
"""Those that a resume cuts back."""
MOST_PENDING = 256
"""Batches that are kept before they are recorded: reading a loss waits for the device."""


@final
class RunFiles:
    """The files of a run: metrics, the ledger, events and the plan; the first rank writes them.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.folder = run.folder if run.ranks.is_first else None
        self.facts: dict[str, Any] = {}
        """What the first event of an attempt says of the run, besides its settings."""
        self.resumed: tuple[Path, Sequence[str]] | None = None
        """The checkpoint that the next attempt continues from, and what has changed since."""
        self.lengths: Mapping[str, int] | None = None
        """How much the next attempt keeps of each file; 0: it is set aside; None: there must be
        none."""
        self._files: dict[str, Appender] = {}
        self._order: list[int | None] | None = None
        """Which of a batch's values each column of the ledger is, if an earlier attempt has
        written its first line; None: all, in order."""
        self._is_full = False
        self._attempt = 1
        self._resumed_at = 0

    @property
    def paths(self) -> list[Path]:
        """The files that a resume cuts back."""
        return [] if self.folder is None else [self.folder / name for name in RESUMED_FILES]

    @property
    def are_own(self) -> bool:
        """Whether an earlier attempt of this run has written what is in the folder."""
        lengths, folder = self.lengths, self.folder
        if lengths is None or folder is None:
            return False
        return any(lengths.values()) or (folder / LEDGER).exists()

    def check(self) -> None:
        """Check that the files can be opened, and change nothing.

        Raises:
            TrainingError: the folder holds another run, or cannot be written to.
        """
        if self.folder is None:
            return
        try:
            for name in (METRICS, LEDGER, EVENTS):
                if os.path.lexists(path := self.folder / name):
                    with open_plain(path, "r+b") as file:
                        has_lines = bool(file.seek(0, os.SEEK_END))
                    if name == LEDGER and self.lengths is None and has_lines:
                        raise TrainingError.cannot(
                            f"begin a run in {self.folder}",
                            why="it has one already",
                            instead="choose another folder, or call trainer.resume() first to "
                            "continue it",
                        )
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def open(self, at: Timestamp) -> None:
        """Open the files, cut back to where the checkpoint left them; see `check`.

        Raises:
            TrainingError: the folder cannot be written to.
        """
        if self.folder is None:
            return
        try:
            # It may read the data, whose errors are no fault of ours.
            plan = self._run.plan if self._run.prepared.is_quick else None
        except PlanError:
            plan = None
        try:
            self._open(self.folder, at, plan)
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _open(self, folder: Path, at: Timestamp, plan: Plan | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        done = ledger_end(folder)
        for name in () if self.are_own else (METRICS, EVENTS, PLAN):
            if os.path.lexists(folder / name):
                set_aside(folder / name)
        sizes = {one.name: one.stat().st_size for one in self.paths if one.exists()}
        lengths = self.lengths or {}
        self._resumed_at = at.batch
        self._write_plan(folder, plan)
        for path in self.paths:
            length = lengths.get(path.name)
            if length == 0 and sizes.get(path.name):
                set_aside(path)
            elif missing := cut_back(path, length, at.batch):
                warnings.warn(f"{path} {missing}", RuntimeWarning, stacklevel=2)
            self._files[path.name] = Appender(path)
        columns = (*LEDGER_COLUMNS, *self._run.hyperparameters.values(), *self._run.values)
        if self._files[LEDGER].is_empty:
            self._files[LEDGER].add(",".join(columns) + "\n")
            self._order = None
        else:
            self._order = _order(columns, ledger_names(folder))
        self.lengths = {}
        self._files[EVENTS], self._attempt = open_events(folder / EVENTS)
        self._begin_attempt(at, done)

    def _begin_attempt(self, at: Timestamp, done: tuple[int, int] | None) -> None:
        """Write the event of a start or a resume."""
        run, (path, changes) = self._run, self.resumed or (None, ())
        self.resumed = None
        batches, samples = done or (at.batch, at.sample)
        again = {"batches": max(batches - at.batch, 0), "samples": max(samples - at.sample, 0)}
        text = "start" if not at.batch else f"resume at batch {at.batch:,}"
        text += f" from {path.name}" if path else ""
        text += f"; {again['batches']:,} batches are done again" if again["batches"] else ""
        text += "".join(f"; changed: {one}" for one in changes)
        parameters = sum(p.numel() for p in run.model.parameters() if not is_unmade(p))
        facts = {
            "model": f"{type(uncompiled(run.model)).__name__}, {parameters:,} parameters",
            "max_duration": str(run.horizon.max_duration),
            "batch_size": as_text(run.prepared.policy),
            "ranks": run.ranks.world_size,
            "device": run.ranks.device.type,
            **self.facts,
        }
        self.event(
            "resume" if at.batch or path else "start",
            at,
            text,
            resumed_from=None if path is None else _nearby(path, self.folder),
            changes=list(changes),
            done_again=again,
            facts=facts,
        )

    def event(
        self, kind: EventKind, at: Timestamp, text: str, *, is_past: bool = False, **more: Any
    ) -> None:
        """Write an event at once, on rank 0.

        Args:
            kind: what has happened.
            at: the clock there.
            text: the same in one line.
            is_past: whether it happened at that time of the clock, not now.
            more: values of the event, as JSON keeps them.
        """
        if EVENTS not in self._files:
            return
        ago = (self._run.timer.timestamp.run_nanoseconds - at.run_nanoseconds) * is_past
        clock, utc = self._run.clock(at), time.time() - ago / NANOSECONDS
        line = event_line(kind, clock, text, attempt=self._attempt, utc=utc, **more)
        self._files[EVENTS].add(line)
        self.flush(EVENTS)

    def add(self, name: str, text: str) -> None:
        """Add text to a file; it may wait in memory."""
        if name in self._files:
            self._files[name].add(text)

    def add_batches(self, lines: Sequence[str]) -> None:
        """Add lines to the ledger."""
        order = self._order
        ordered = lines if order is None else [_ordered(line, order) for line in lines]
        self.add(LEDGER, "\n".join([*ordered, ""]))

    def flush(self, *names: str, is_last: bool = False) -> None:
        """Flush files, by default all, or close them; warn once if the disk is full."""
        failure = None
        for name in names or self._files:
            try:
                (Appender.close if is_last else Appender.flush)(self._files[name])
            except OSError as error:
                failure = error
        if failure is not None and not self._is_full:
            why = (failure.strerror or str(failure)).lower()
            then = "they are lost" if is_last else "they are kept and training continues"
            message = f"cannot write lines of {', '.join(self._files)}: {why}; {then}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self._is_full = failure is not None or (bool(names) and self._is_full)

    def _write_plan(self, folder: Path, plan: Plan | None) -> None:
        record = plan and plan_record(plan) | {"resumed_at": self._resumed_at}
        replace_file(folder / PLAN, json.dumps(record) + "\n")

    def close(self) -> None:
        """Flush and close all files; write a plan that would have held the run at its start."""
        self._is_full = False
        self.flush(is_last=True)
        self._files = {}
        if self.folder is not None and not self._run.prepared.is_quick:
            with suppress(OSError, PlanError):
                self._write_plan(self.folder, self._run.plan)

    def present_lengths(self) -> dict[str, int]:
        """Return how long the files are, all lines included.

        Raises:
            CheckpointError: they cannot be written, so a run could not continue them.
        """
        try:
            if any(self._files[name].waiting for name in RESUMED_FILES if name in self._files):
                raise OSError(f"{METRICS} and {LEDGER} cannot be written")
            return {path.name: path.stat().st_size for path in self.paths}
        except OSError as error:  # the disk is full, or a file was moved
            raise CheckpointError.cannot(
                f"write a checkpoint of {self.folder}",
                why=str(error),
                instead="make room, or put them back",
            ) from error


@final
class Throughput:
    """Samples, tokens and seconds of training since the last line of metrics.

    The seconds of a step are between two moments at which the device is known to be done, if all
    steps there had one size and as many micro-batches.
    """

    def __init__(self, since: Timestamp) -> None:
        self.since = since
        self.samples = self.tokens = 0
        self._pauses = self._last_pause = 0
        self._kinds: set[tuple[int, int]] = set()
        self._count = self._paused = 0
        self._moment: int | None = None

    def add(self, samples: int, tokens: int, passes: int) -> None:
        """Count a batch."""
        self._kinds.add((samples, passes))
        self._count += 1
        self.samples += samples
        self.tokens += tokens
        # A pause after the last batch is not before its end, up to which a line is measured.
        self._pauses += self._last_pause
        self._last_pause = 0

    def pause(self, nanoseconds: int) -> None:
        """Leave out a pause after a batch."""
        self._last_pause += nanoseconds
        self._paused += nanoseconds

    def take(self, now: Timestamp, moment: int) -> dict[str, float]:
        """Return samples and tokens per second until `now`, and begin anew there.

        Args:
            now: the clock after the last batch.
            moment: nanoseconds when the device was done with it.
        """
        passed = now.run_nanoseconds - self.since.run_nanoseconds - self._pauses
        seconds = max(passed, 1) / NANOSECONDS
        rates = {"samples_per_second": self.samples / seconds}
        if now.token:
            rates["tokens_per_second"] = self.tokens / seconds
        spent = 0 if self._moment is None else moment - self._moment - self._paused
        if spent > 0 and len(self._kinds) == 1:
            rates["step_seconds"] = spent / self._count / NANOSECONDS
        self._kinds, self._count, self._paused, self._moment = set(), 0, 0, moment
        self.since, self.samples, self.tokens, self._pauses = now, 0, 0, 0
        return rates


@final
class Recorder:
    """Collects losses and throughput between logs, and writes on rank 0.

    Args:
        run: the run.
        loggers: where metrics go besides the run folder.
        events: the callbacks.
        largest_piece: returns the samples of the largest micro-batch of a step; 0: not known.
        sample_seconds: returns the seconds of a further sample of micro-batches; None: not known.
        console: shows the metrics and the progress of the run; None: nothing is shown.
        config: the settings of the run, for loggers.
    """

    def __init__(
        self,
        run: Run,
        loggers: Sequence[Logger],
        *,
        events: Events,
        largest_piece: Callable[[Step | None], int],
        sample_seconds: Callable[[], float | None],
        console: ConsoleLogger | None,
        config: Mapping[str, Any],
    ) -> None:
        self.pending: list[StepResult] = []
        """Batches that are not recorded yet; the loop appends to it."""
        self.loss = Sums()
        is_first = run.ranks.is_first
        self.console = console if is_first else None
        self._run, self._events, self._largest_piece = run, events, largest_piece
        self._sample_seconds = sample_seconds
        self._config = config
        self.files = RunFiles(run)
        shown = () if self.console is None else (self.console,)
        self._given = [Guarded(one) for one in (*loggers, *shown)] if is_first else []
        self._loggers: list[Guarded] = []
        self._throughput = Throughput(Timestamp())
        self._size: int | None = None
        self._decided: int | None = None
        """The last decided size."""
        self._follows_run = run.prepared.decided_between is not None
        """Whether batch sizes are decided during the run."""
        self._named: list[tuple[str, Mark]] = []
        """Where a named period begins, and of which value."""
        self._periods: dict[str, str] = {}
        """The present one of each value."""

    @property
    def is_waiting(self) -> bool:
        """Whether there was a batch since the last line of training."""
        return self._size is not None or bool(self.pending)

    def open(self, timestamp: Timestamp) -> None:
        """Open the files; what is logged first is measured from `timestamp` on.

        Files of a resumed run are cut back to where its checkpoint left them.

        Raises:
            TrainingError: the folder holds another run, or cannot be written to.
        """
        self._throughput = Throughput(timestamp)
        self.files.open(timestamp)
        run, self._periods = self._run.prepared, {}
        scheduled, scope = {**run.schedules, **run.values}, Scope.of(run.horizon)
        marks = [(name, mark) for name in scheduled for mark in scheduled[name].borders(scope)]
        self._named = [one for one in marks if one[1].period]
        arguments = ("start", dict(self._config), timestamp.sample)
        self._loggers = [one for one in self._given if one.call(*arguments)]
        if self.console is not None:
            self.console.show(self._run.clock(timestamp))

    def record(self) -> None:
        """Record the batches that are pending, and read their losses."""
        self._collect()
        self.loss.read()

    def _collect(self) -> None:
        """Record the batches that are pending, but read nothing from the device."""
        pending, self.pending = self.pending, []
        if not pending:
            return
        lines, horizon = [], self._run.horizon
        for one in pending:
            at, after, size, decided = one.at, one.after, one.size, one.batch_size
            assert after is not None, "it is finished"
            # The clock also passes over what `last_batch="drop"` leaves out after the batch.
            end = at.sample + size
            tokens = after.token - at.token - horizon.tokens(end, after.sample)
            self._throughput.add(size, tokens, one.num_micro_batches)
            line = (
                f"{at.batch},{at.epoch},{at.sample},{at.token},{size},{tokens},"
                f"{one.num_micro_batches},{at.run_nanoseconds / NANOSECONDS:.6f},{decided:d},"
                + ",".join(map(repr, map(float, one.values)))
            )
            lines.append(line)
            if self._follows_run and decided != self._decided:
                self._note_size(decided, at)
            named = self._named  # usually none
            begun = named and [one for one in named if one[1].axis.read(at) >= one[1].first_tick]
            if begun and (periods := {name: one.period for name, one in begun}) != self._periods:
                said = ", ".join(f"{name} {period!r}" for name, period in periods.items())
                self.files.event("period", at, f"period: {said}", is_past=True, periods=periods)
                self._periods = periods
        self._size = pending[-1].batch_size
        self.files.add_batches(lines)
        for one in pending:
            self.loss.add_losses(one.losses)

    def _note_size(self, decided: int, at: Timestamp) -> None:
        """Write the event of a size that was decided."""
        before, self._decided = self._decided, decided
        said = f"batch size {decided:,}" + (f", was {before:,}" if before else "")
        self.files.event("decided_size", at, said, is_past=True, size=decided, before=before)

    def show_progress(self, timestamp: Timestamp) -> None:
        """Move the bar of the console, if it is time to."""
        if self.console is not None and self.console.is_due:
            self.console.show(self._run.clock(timestamp))

    def log(self) -> None:
        """Write a line of what was measured since the last one. Every rank must call it.

        There must have been a batch. The line has the largest micro-batch of all ranks, unless it
        is not known, and the largest peak of their memory.

        Raises:
            TrainingError: a callback has logged a value by a name that the line has already.
        """
        self.record()
        assert self._size is not None, "there is something to log"
        sums, self.loss = self.loss, Sums()
        run, ranks, now = self._run, self._run.ranks, self._run.timer.timestamp
        own = ranks.counted((sums.total, sums.weight, bool(run.logged)))
        total, run.logged_units, any_logged = ranks.agree(own)
        largest = torch.tensor(
            [peak_memory(ranks.device), self._largest_piece(run.step)], dtype=torch.float64
        )
        ranks.reduce(largest, "max")
        memory, micro_batch_size = map(int, largest.tolist())
        record = {
            **run.clock(now),
            "loss": total / run.logged_units if run.logged_units else math.nan,
            "batch_size": self._size,
            **({"micro_batch_size": micro_batch_size} if micro_batch_size else {}),
            **run.hyperparameters.values(),
            **run.values,
            **self._throughput.take(now, run.timer.clock()),
            "memory_peak_bytes": memory,
        }
        if (further := self._sample_seconds()) is not None:
            record["sample_seconds"] = further
        if run.skipped_steps:
            record["skipped_steps"] = run.skipped_steps
        record |= run.loader.log_values()
        if any_logged:
            record |= run.logged.take(ranks, taken=record.keys())
        self._size = None
        self.write(record)
        self._events.tell("on_log", record)

    def write(self, record: Mapping[str, float]) -> None:
        """Write one line of metrics, and hand it to every logger."""
        self.files.add(METRICS, json_line(record))
        for logger in self._loggers:
            logger.call("log", record)

    def paused(self, work: Callable[[], Any]) -> Any:
        """Return `work()`, whose time does not count as training time."""
        self.record()
        clock = self._run.timer.clock
        start = clock()
        try:
            return work()
        finally:
            self._throughput.pause(clock() - start)

    def flush(self) -> None:
        """Write everything that was recorded to the files; what does not fit is kept."""
        self.record()
        self.files.flush()
        for logger in self._loggers:
            logger.call("flush")

    def close(self, _: object, error: BaseException | None, __: object) -> None:
        """Write why the run stops; flush and close everything."""
        self._collect()  # after a failure of the device, its losses cannot be read
        if error is not None:
            text = f"stop: {first_line(error)}"
        else:
            text = f"stop: {self._run.stop_reason}" if self._run.stop_reason else "the end"
        self.files.event("stop", self._run.timer.timestamp, text)
        self.files.close()
        for logger in self._loggers:
            logger.call("close")
        self._loggers = []

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last log, and the lengths of the files.

        Every rank must call it.

        Raises:
            CheckpointError: the files cannot be written, so a run could not continue them.
        """
        self.flush()
        ranks = self._run.ranks
        total, weight = ranks.agree(ranks.counted((self.loss.total, self.loss.weight)))
        logged = self._run.logged.state_dict(self._run.ranks)
        loss = {"sum": total, "weight": weight}
        return {
            "loss": loss,
            "logged": logged,
            "size": self._size,
            "files": self.files.present_lengths(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved sums, and from where the files were."""
        ranks, loss = self._run.ranks, state["loss"]
        sums = Sums("mean", number(loss, "sum"), number(loss, "weight"))
        self.loss = sums if ranks.is_first else Sums()
        self._run.logged.load_state_dict(state["logged"], ranks)
        self._size = count_or_none(state, "size", least=1)
        self.files.lengths = {name: count(state["files"], name) for name in state["files"]}
        self._decided = None


def _order(columns: Sequence[str], present: Sequence[str]) -> list[int | None] | None:
    """Return which of `columns` each of those in the file is; None: they are the same.

    An earlier attempt may have begun the file.
    """
    if tuple(present) == tuple(columns):
        return None
    left_out = [name for name in columns if name not in present and name not in LEDGER_COLUMNS]
    if left_out:
        message = f"{LEDGER} has no column for {', '.join(left_out)}, which an earlier attempt did "
        warnings.warn(f"{message}not schedule; it leaves them out", RuntimeWarning, stacklevel=2)
    return [columns.index(name) if name in columns else None for name in present]


def _nearby(path: Path, folder: Path | None) -> str:
    """Return a path from beside the run folder on: those above say more than a reader needs."""
    here, place = path.resolve(), (folder or path).resolve().parent
    return str(here.relative_to(place)) if here.is_relative_to(place) else path.name


def _ordered(line: str, order: Sequence[int | None]) -> str:
    cells = line.split(",")
    return ",".join("nan" if index is None else cells[index] for index in order)
