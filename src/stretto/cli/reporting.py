"""`stretto report`."""

from __future__ import annotations

from pathlib import Path

import typer

from stretto.cli.files import add_working_folder, read_arguments
from stretto.config.building.plans import plan_of, prepare_run
from stretto.config.building.times_and_sizes import build_run
from stretto.errors import ConfigError, PlanError
from stretto.report.run import read_metrics
from stretto.report.run_table import run_table


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
