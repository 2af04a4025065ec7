"""`stretto train`."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, final

from rich.console import Console

from stretto._location import local_path
from stretto.batching.policy import size_text
from stretto.cli.planning import (
    add_working_folder,
    packaged_run_file,
    split_arguments,
)
from stretto.cli.terminal import Lasting, print_json, progress
from stretto.config.run import RunConfig, dump_run_file, read_run_file
from stretto.config.training import build_trainer, resolved
from stretto.config.yaml import parse_override
from stretto.errors import ConfigError, PlanWarning
from stretto.planning import UnknownSizes, bound_of
from stretto.run_folder import LEDGER, RUN_FILE, replace_file, set_aside, unwritable
from stretto.timing import TimeUnit
from stretto.training import Callback
from stretto.training.checkpointing.resuming import FOLDER as CHECKPOINTS
from stretto.training.logs.loggers import show_metrics, show_position, show_seconds
from stretto.training.loop import exit_code

if TYPE_CHECKING:
    from stretto.training import Run, Trainer

RUNS = Path("runs")
"""The folder of runs without a named folder."""


def train(
    arguments: Sequence[str],
    folder: Path | None,
    resume: str | None,
    *,
    unpickle: bool = False,
    even_if_stopped: bool = False,
    as_json: bool = False,
) -> None:
    """Train; print an introduction and a summary, or the results as JSON."""
    given = {"unpickle": unpickle, "even_if_stopped": even_if_stopped}
    lasting = Lasting(sys.stderr if as_json else sys.stdout)
    with redirect_stdout(lasting):
        trainer, notes = _train(arguments, folder, resume, **given)
    if as_json and notes.is_first:
        print_json(results(trainer, notes))
    if trainer.unsaved is not None:
        raise SystemExit(1)
    if trainer.stop_reason is not None:
        raise SystemExit(exit_code(trainer.stop_reason))


def _train(
    arguments: Sequence[str], folder: Path | None, resume: str | None, **given: bool
) -> tuple[Trainer, Notes]:
    add_working_folder()
    named, overrides = split_arguments(arguments)
    path = named or unnamed_run_file(folder or overridden_folder(overrides), resume)
    config = read_run_file(path, overrides)
    console = Console(highlight=False)
    notes = Notes(config)
    if config.log.console is None:
        config = replace(config, log=replace(config.log, console=True))
    folder = choose_folder(config, path.stem, folder, resumes=resume is not None)
    notes.continues = (folder / LEDGER).exists()
    with progress("building the run"), warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # notes of the introduction
        trainer = notes.trainer = build_trainer(
            config, folder=folder, callbacks=[notes], resumes=resume is not None
        )
    with progress("resuming"):
        found = None if resume is None else trainer.resume(resume, unpickle=given["unpickle"])
    if notes.is_first:
        for line in introduce(trainer, path, found):
            console.print(line, markup=False, soft_wrap=True)
    trainer.fit(on_signal="return", even_if_stopped=given["even_if_stopped"])
    if notes.is_first:
        for line in summarise(trainer, notes):
            console.print(line, markup=False, soft_wrap=True)
    return trainer, notes


@final
class Notes(Callback):
    """Writes the run file to the run folder; keeps results for the summary."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.continues = False
        """Whether the folder has the run file of an earlier attempt."""
        self.is_first = os.environ.get("RANK", "0") == "0"
        self.trainer: Trainer | None = None
        self.metrics: dict[str, Mapping[str, float]] = {}
        self.checkpoint: Path | None = None

    def on_fit_start(self, run: Run) -> None:
        """Write the whole run file, once the folder is known to be this run's.

        Raises:
            TrainingError: the folder cannot be written to.
        """
        if not run.is_first_rank or run.folder is None or self.trainer is None:
            return
        text = dump_run_file(resolved(self._config, self.trainer))
        path = run.folder / RUN_FILE
        try:
            if not self.continues and path.exists():  # it is the user's
                set_aside(path)
            replace_file(path, text)
        except OSError as error:
            raise unwritable(run.folder, error) from None

    def on_evaluation_end(self, run: Run, name: str, metrics: Mapping[str, float]) -> None:
        """Keep the metrics."""
        del run
        self.metrics[name] = {key.removeprefix(f"{name}/"): value for key, value in metrics.items()}

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Keep the path."""
        del run
        self.checkpoint = path


def choose_folder(config: RunConfig, stem: str, folder: Path | None, *, resumes: bool) -> Path:
    """Return the run folder: the one that is named, or a new one in `runs`.

    Raises:
        ConfigError: the folder already has a run; or none is named, with several ranks or a
            checkpoint to resume from.
    """
    named = folder or (Path(config.folder) if config.folder else None)
    if named is not None:
        if not resumes and (named / LEDGER).exists() and os.environ.get("RANK", "0") == "0":
            raise ConfigError.cannot(
                f"begin a run in {named}",
                why="there is one already",
                instead="add --resume auto to continue it, or name another --folder",
            )
        return named
    if resumes or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError.cannot(
            "choose a run folder",
            why="a run that is resumed, or has several ranks, needs a named one",
            instead=f"name one with --folder, or name its own {RUN_FILE}",
        )
    numbered = (RUNS / (f"{stem}-{number}" if number > 1 else stem) for number in count(1))
    return next(place for place in numbered if not place.exists())


def unnamed_run_file(folder: Path | None, resume: str | None) -> Path:
    """Return the default run file: that of the run folder, else the packaged one.

    Args:
        folder: the run folder, if it is named.
        resume: the checkpoint to resume from; None: the run begins.

    Raises:
        ConfigError: the folder has a run without a run file.
    """
    if folder is None:
        return packaged_run_file()
    if (folder / RUN_FILE).exists():
        return folder / RUN_FILE
    has_begun = (folder / LEDGER).exists() or (folder / CHECKPOINTS).exists()
    if resume is not None and (resume != "auto" or has_begun):
        raise ConfigError.cannot(
            f"resume in {folder} with the packaged run file",
            why=f"the run there has no {RUN_FILE}",
            instead="name the file: 'stretto train RUN.YAML "
            f"--folder {shlex.quote(str(folder))} --resume {shlex.quote(resume)}'",
        )
    return packaged_run_file()


def overridden_folder(overrides: Sequence[str]) -> Path | None:
    """Return the folder that `folder=...` on the command line names."""
    folder = dict(map(parse_override, overrides)).get(("folder",))
    return local_path(folder, "keep a run in", ConfigError) if isinstance(folder, str) else None


def introduce(trainer: Trainer, path: Path, found: Path | None) -> Iterator[str]:
    """Yield the lines of the introduction."""
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    name = type(trainer.model).__name__
    yield f"{path.name}: {name} with {parameters:,} parameters, in {trainer.folder}"
    plan, run = trainer.plan, trainer.run.horizon.max_duration
    bounds = trainer.run.loader.prepared.decided_between
    if bounds is not None:
        many = f"batches of {bounds[0]:,} to {size_text(bounds[1])}"
        yield f"run of {run}: {many}, decided during the run"
    elif plan is None or plan.num_batches is None:
        known = trainer.run.horizon.batch_sizes
        why = f" (the batch sizes: {known.why})" if isinstance(known, UnknownSizes) else ""
        yield f"run of {run}; the number of batches is not known in advance{why}"
    else:
        sizes = [stage.size for stage in plan.stages]
        many = "" if len(set(sizes)) == 1 else f"{sizes[0]:,} to "
        many += size_text(sizes[-1])
        count = f"{plan.num_batches:,} batches"
        if not plan.is_exact and run.unit is not TimeUnit.BATCH:
            count = bound_of(plan.sizes) or count
        yield f"run of {run}: {count} of {many}"
    if trainer.fitting is not None:
        yield f"micro_batch_size auto: {trainer.fitting.summary()}"
    if trainer.found_maximum is not None:
        size, answer = trainer.found_maximum
        yield f"memory, one pass on each rank: {answer.summary(size)}"
    notes = (*(plan.warnings if plan is not None else ()), *trainer.run.mistakes)
    yield from (f"note: {line}" for line in dict.fromkeys(notes))
    if found is not None:
        yield f"resumed from {found}, at {position(trainer)}"
        yield from (f"changed since: {line}" for line in trainer.changes)
        if trainer.run.is_done:
            yield "nothing is left to train: max_duration is reached"


def summarise(trainer: Trainer, notes: Notes) -> Iterator[str]:
    """Yield the lines of the summary, and the next commands."""
    at = trainer.timer.timestamp
    tokens = f", {at.token:,} tokens" if at.token else ""
    counts = f"{at.batch:,} batches, {at.sample:,} samples{tokens}"
    took = show_seconds(at.run_nanoseconds / 1e9)
    if trainer.stop_reason is None:
        yield f"trained {trainer.run.horizon.max_duration}: {counts} in {took}"
    else:
        yield f"stopped at {position(trainer)} ({trainer.stop_reason}): {counts} in {took}"
    for name, metrics in notes.metrics.items():
        yield f"{name}: {show_metrics(metrics)}"
    if trainer.run.skipped_steps:
        yield f"skipped steps: {trainer.run.skipped_steps:,} (a loss or gradient was not finite)"
    folder = shlex.quote(str(trainer.folder))
    if trainer.unsaved is not None:
        yield f"NOT SAVED: the last checkpoint could not be written: {trainer.unsaved}"
    yield f"everything is in {folder}"
    if trainer.stop_reason is not None:
        if notes.checkpoint is None:
            yield "no checkpoint was written; 'checkpoint: {every: 1ep}' in the run file keeps some"
        else:
            ranks = trainer.run.loader.world_size
            start = f"torchrun --nproc-per-node {ranks} --no-python " if ranks > 1 else ""
            again = f"{start}stretto train {folder}/{RUN_FILE} --resume latest"
            yield f"to resume:  {again}{'' if trainer.run.ended is None else ' --even-if-stopped'}"
    if trainer.plan is not None and trainer.plan.is_exact:
        yield f"as planned?  stretto plan --against {folder}"
    yield f"to see it:  stretto report {folder} --html {folder}/run.html"


def results(trainer: Trainer, notes: Notes) -> dict[str, object]:
    """Return what a script wants to know after a run."""
    at = trainer.timer.timestamp
    return {
        "folder": str(trainer.folder),
        "finished": trainer.stop_reason is None,
        "stop_reason": trainer.stop_reason,
        "batch": at.batch,
        "sample": at.sample,
        "token": at.token,
        "seconds": at.run_nanoseconds / 1e9,
        "metrics": {name: dict(metrics) for name, metrics in notes.metrics.items()},
        "checkpoint": None if notes.checkpoint is None else str(notes.checkpoint),
        "skipped_steps": trainer.run.skipped_steps,
    }


def position(trainer: Trainer) -> str:
    """Return where a run is, in the unit of its length."""
    unit, at = trainer.run.horizon.max_duration.unit, trainer.timer.timestamp
    if unit is TimeUnit.SECOND:
        return show_position(at.run_nanoseconds / 1e9, unit)
    return show_position(float(trainer.run.horizon.position(at, unit).amount), unit)
