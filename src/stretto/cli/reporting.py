"""The verbs `report` and `inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from stretto.checkpoint import describe
from stretto.checkpoint.folder import candidates
from stretto.checkpoint.manifest import read_errors
from stretto.cli.files import add_working_folder, read_arguments
from stretto.config.plans import build_run, plan_of, prepare_run
from stretto.errors import CheckpointError, ConfigError, PlanError
from stretto.report.run import read_metrics, run_table
from stretto.training.checkpointing.resuming import FOLDER


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
