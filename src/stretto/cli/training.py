"""`stretto train`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

from stretto._location import local_path
from stretto.cli.planning import (
    PLAN,
    RUN_FILE,
    packaged_run_file,
)
from stretto.config.run import RunConfig, dump_run_file
from stretto.config.training import resolved
from stretto.config.yaml import parse_override
from stretto.errors import ConfigError
from stretto.planning import UnknownSizes, bound_of
from stretto.timing import TimeUnit
from stretto.training import Callback
from stretto.training.checkpointing.resuming import FOLDER as CHECKPOINTS
from stretto.training.logs.console import show_metrics, show_position, show_seconds

if TYPE_CHECKING:
    from stretto.training import Run, Trainer

RUNS = Path("runs")
"""Where runs go that were given no folder."""
LEDGER = "ledger.csv"
"""Holds a line for every batch; where there is one, a run has begun."""


def with_console(config: RunConfig) -> RunConfig:
    """Return the run file with the console on, unless it says otherwise."""
    if config.log.console is not None:
        return config
    return config.model_copy(update={"log": config.log.model_copy(update={"console": True})})


@final
class Description(Callback):
    """Writes what the run is into its folder, once that is known to be no other run's."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.trainer: Trainer | None = None

    def on_fit_start(self, run: Run) -> None:
        """Write the whole run file and the plan.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        if run.is_first_rank and run.folder is not None and self.trainer is not None:
            _keep(run.folder, self._config, self.trainer)


@final
class Results(Callback):
    """Keeps what the last evaluations measured, and the last checkpoint."""

    def __init__(self) -> None:
        self.metrics: dict[str, Mapping[str, float]] = {}
        self.checkpoint: Path | None = None

    def on_evaluation_end(self, run: Run, name: str, metrics: Mapping[str, float]) -> None:
        """Keep the metrics."""
        del run
        self.metrics[name] = {key.removeprefix(f"{name}/"): value for key, value in metrics.items()}

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Keep the path."""
        del run
        self.checkpoint = path


def choose_folder(config: RunConfig, stem: str, folder: Path | None, *, resumes: bool) -> Path:
    """Return the run folder: the one that was named, or a new one in `runs`.

    Raises:
        ConfigError: the folder holds a run already; or there are several ranks and none is named.
    """
    named = folder or (Path(config.folder) if config.folder else None)
    if named is not None:
        if not resumes and (named / LEDGER).exists() and os.environ.get("RANK", "0") == "0":
            raise ConfigError.cannot(
                f"begin a run in {named}",
                why="it holds one already",
                instead="add --resume auto to go on with it, or name another --folder",
            )
        return named
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError.cannot(
            "choose a run folder for several ranks",
            why="they could choose different ones",
            instead="name one with --folder",
        )
    if resumes:
        raise ConfigError.cannot(
            "go on with a run",
            why="it is not said which",
            instead=f"name its folder with --folder, or its own {RUN_FILE}",
        )
    return next(place for place in _numbered(RUNS / stem) if not place.exists())


def unnamed_run_file(folder: Path | None, resume: str | None) -> Path:
    """Return the run file that is meant where none is named: the folder's own, else the packaged.

    Args:
        folder: the run folder, if that is named.
        resume: what the run goes on from; None: it begins.

    Raises:
        ConfigError: the packaged one is not what the folder was trained with.
    """
    if folder is None:
        return packaged_run_file()
    own = folder / RUN_FILE
    has_begun = (folder / LEDGER).exists() or (folder / CHECKPOINTS).exists()
    if own.exists():
        if resume is None and not has_begun:
            raise ConfigError.cannot(
                f"begin a run in {folder} with the packaged run file",
                why="it would be written over the run.yaml that is there",
                instead=f"write 'stretto train {shlex.quote(str(own))}', or name another --folder",
            )
        return own
    if resume is not None and (resume != "auto" or has_begun):
        raise ConfigError.cannot(
            f"go on in {folder} with the packaged run file",
            why=f"there is no {RUN_FILE} that says how it was trained",
            instead="name the file: 'stretto train RUN.YAML "
            f"--folder {shlex.quote(str(folder))} --resume {shlex.quote(resume)}'",
        )
    return packaged_run_file()


def overridden_folder(overrides: Sequence[str]) -> Path | None:
    """Return the folder that `folder=...` on the command line names."""
    values = dict(map(parse_override, overrides))
    folder = values.get(("folder",))
    return local_path(folder, "keep a run in", ConfigError) if isinstance(folder, str) else None


def introduce(trainer: Trainer, path: Path, found: Path | None) -> Iterator[str]:
    """Yield what is about to happen, a line each."""
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    name = type(trainer.model).__name__
    yield f"{path.name}: {name} with {parameters:,} parameters, in {trainer.folder}"
    plan, run = trainer.plan, trainer.horizon.max_duration
    bounds = trainer.loader.prepared.decided_between
    if bounds is not None:
        many = f"batches of {bounds[0]:,} to {bounds[1]:,} samples"
        yield f"run of {run}: {many}, which it decides as it goes"
    elif plan is None or plan.num_batches is None:
        known = trainer.horizon.batch_sizes
        why = f" (the batch sizes: {known.why})" if isinstance(known, UnknownSizes) else ""
        yield f"run of {run}; how many batches that is, only the run can tell{why}"
    else:
        sizes = [stage.size for stage in plan.stages]
        many = f"{sizes[0]:,}" if len(set(sizes)) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        count = f"{plan.num_batches:,} batches"
        if not plan.is_exact and run.unit is not TimeUnit.BATCH:
            count = bound_of(plan.sizes) or count
        yield f"run of {run}: {count} of {many} samples"
    if trainer.fitting is not None:
        yield f"micro_batch_size auto: {trainer.fitting.summary()}"
    if trainer.found_maximum is not None:
        size, answer = trainer.found_maximum
        yield f"max_batch_size auto: {answer.summary(size)}"
    yield from (f"note: {line}" for line in (plan.warnings if plan is not None else ()))
    if found is not None:
        yield f"going on from {found}, at {position(trainer)}"
        yield from (f"changed since: {line}" for line in trainer.changes)


def summarise(trainer: Trainer, results: Results) -> Iterator[str]:
    """Yield what came of a run, and what to do next, a line each."""
    at = trainer.timer.timestamp
    tokens = f", {at.token:,} tokens" if at.token else ""
    counts = f"{at.batch:,} batches, {at.sample:,} samples{tokens}"
    took = show_seconds(at.run_nanoseconds / 1e9)
    if trainer.stop_reason is None:
        yield f"trained {trainer.horizon.max_duration}: {counts} in {took}"
    else:
        yield f"stopped at {position(trainer)} ({trainer.stop_reason}): {counts} in {took}"
    for name, metrics in results.metrics.items():
        yield f"{name}: {show_metrics(metrics)}"
    if trainer.skipped_steps:
        yield f"skipped steps: {trainer.skipped_steps:,} (a loss or gradient was not finite)"
    folder = shlex.quote(str(trainer.folder))
    if trainer.unsaved is not None:
        yield f"NOT SAVED: the last checkpoint could not be written: {trainer.unsaved}"
    yield f"everything is in {folder}"
    if trainer.stop_reason is not None:
        if results.checkpoint is None:
            yield "no checkpoint was written; 'checkpoint: {every: 1ep}' in the run file keeps some"
        else:
            ranks = trainer.loader.world_size
            start = f"torchrun --nproc-per-node {ranks} --no-python " if ranks > 1 else ""
            yield f"to go on:  {start}stretto train {folder}/{RUN_FILE} --resume latest"
    if trainer.plan is not None and trainer.plan.is_exact:
        yield f"as planned?  stretto plan --against {folder}"
    yield f"to see it:  stretto report {folder} --plot {folder}/run.png"


def position(trainer: Trainer) -> str:
    """Return where a run is, in the unit of its length."""
    unit, at = trainer.horizon.max_duration.unit, trainer.timer.timestamp
    if unit is TimeUnit.SECOND:
        return show_position(at.run_nanoseconds / 1e9, unit)
    return show_position(float(trainer.horizon.position(at, unit).amount), unit)


def _keep(folder: Path, config: RunConfig, trainer: Trainer) -> None:
    """Write what the run is into its folder: the whole run file and the plan.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    plan = trainer.plan
    try:
        _replace(folder / RUN_FILE, dump_run_file(resolved(config, trainer)))
        _replace(folder / PLAN, json.dumps(plan and plan.to_json(), indent=1) + "\n")
    except OSError as error:
        raise ConfigError.cannot(
            f"keep the run in {folder}",
            why=(error.strerror or str(error)).lower(),
            instead="name a folder that can be written to with --folder",
        ) from None


def _replace(file: Path, text: str) -> None:
    """Write a file so that a full disk, or a kill, leaves the one before."""
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(text, "utf-8")
    unfinished.replace(file)


def _numbered(path: Path) -> Iterator[Path]:
    """The path itself, then with -2, -3, ... after its name."""
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1
