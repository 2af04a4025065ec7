"""The verbs `report`, `inspect` and `convert`, and the files of the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

import typer

from stretto.checkpoint import describe
from stretto.checkpoint.folder import candidates
from stretto.checkpoint.manifest import read_errors
from stretto.config.files import read_run_file
from stretto.config.plans import build_run, plan_of, prepare_run
from stretto.config.run import RunConfig
from stretto.config.yaml import parse_override
from stretto.errors import Argument, CheckpointError, ConfigError, ConversionError, PlanError
from stretto.report.run import read_metrics
from stretto.report.tables import run_table
from stretto.timing import convert as convert_time
from stretto.training.checkpointing.resuming import FOLDER

_OPTIONS = {
    "dataset_num_samples": "--samples",
    "dataset_num_tokens": "--tokens",
    "max_training_duration": "--max-duration",
    "batch_size": "--batch-size",
}
"""What the arguments of `stretto.convert` are called on the command line."""


def as_option(argument: Argument) -> str:
    """Return the option of an argument that a message names."""
    return _OPTIONS.get(argument.name, str(argument))


def convert(
    time: str,
    unit: str,
    *,
    max_duration: str | None,
    samples: int | None,
    tokens: int | None,
    batch_size: int | None,
    drop_last: bool,
) -> None:
    """Print `time` in `unit`."""
    try:
        found = convert_time(
            time,
            unit,
            dataset_num_samples=samples,
            dataset_num_tokens=tokens,
            max_training_duration=max_duration,
            batch_size=batch_size,
            drop_last=drop_last,
        )
    except ConversionError as error:
        raise error.recast(ConversionError, word=as_option) from error
    typer.echo(str(found))


def inspect(path: Path, *, as_json: bool) -> None:
    """Print what a checkpoint is, or those of a run; exit with 1 where one is not whole."""
    path = path if path.name else path.resolve()  # '.'
    with read_errors(path):
        paths = candidates(path / FOLDER) if (path / FOLDER).is_dir() else [path]
    if not paths:
        raise CheckpointError.cannot(
            f"inspect {path}",
            why="the run has no checkpoint",
            instead="write 'checkpoint: {every: 1ep}' in the run file to keep some",
        )
    found = [describe(one) for one in paths]
    if as_json:
        records = [one.to_json() for one in found]
        typer.echo(json.dumps(records if len(paths) > 1 else records[0], indent=1))
    else:
        typer.echo("\n\n".join(str(one) for one in found))
    if not all(one.is_whole for one in found):
        raise SystemExit(1)


RUN_FILE = "run.yaml"
"""What the run file is called that each run folder holds."""
PLAN = "plan.json"
"""What the plan is called there."""


def find_run_file(
    arguments: Sequence[str], *, folder: Path | None = None
) -> tuple[Path, list[str]]:
    """Return the run file and the overrides that stand on a command line.

    Args:
        arguments: a path, or none, then `key=value` for each override.
        folder: a run folder whose run file is meant where no path is given.
    """
    path, overrides = split_arguments(arguments)
    if path is not None:
        return path, overrides
    return (packaged_run_file() if folder is None else folder / RUN_FILE), overrides


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the run file that a command line names, if it names one, and the overrides."""
    path, overrides = None, list(arguments)
    if overrides and ("=" not in overrides[0] or _is_file(overrides[0])):
        path = Path(overrides.pop(0))
    for override in overrides:
        parse_override(override)  # what is no override is refused before any file is looked at
    return path, overrides


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # too long to be the name of one
        return False


def packaged_run_file() -> Path:
    """Return the run file that comes with stretto."""
    with as_file(files("stretto.examples") / "default.yaml") as path:
        return path


def add_working_folder() -> None:
    """Let targets name modules in the folder that the command was started in, as python -m does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def read_arguments(arguments: Sequence[str], *, folder: Path | None = None) -> RunConfig:
    """Return what the run file and the overrides on a command line say.

    Raises:
        ConfigError: the file cannot be read, or something in it or in an override is wrong.
    """
    path, overrides = find_run_file(arguments, folder=folder)
    return read_run_file(path, overrides)


def report(folder: Path, *, plot: Path | None, unit: str | None) -> None:
    """Print what a run has measured, and draw it."""
    if unit is not None and plot is None:
        raise ConfigError.cannot(
            f"use --unit {unit}",
            why="there is no picture to draw",
            instead="add --plot FILE, or leave it out",
        )
    typer.echo(run_table(read_metrics(folder), folder))
    if plot is None:
        return
    from stretto.report.run_picture import draw_run

    add_working_folder()
    config = read_arguments([], folder=folder)
    run = build_run(config)
    try:
        plan = plan_of(config, prepare_run(config, run))
    except PlanError:
        plan = None  # only the run could tell its batch sizes
    draw_run(folder, plot, horizon=run.horizon, plan=plan, unit=unit)
    typer.echo(f"\ndrew {plot}")
