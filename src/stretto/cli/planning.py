"""`stretto plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from stretto.batching import BatchSizePolicy
from stretto.cli.files import PLAN, add_working_folder, read_arguments
from stretto.config.plans import build_run, ends_of, plan_of, prepare_run
from stretto.config.run import RunConfig
from stretto.errors import Argument, ConfigError, ConversionError, PlanError
from stretto.planning import Plan
from stretto.timing import convert as convert_time


def plan(
    arguments: Sequence[str],
    *,
    as_json: bool,
    batches: bool,
    plot: Path | None,
    unit: str | None,
    against: Path | None,
) -> None:
    """Print the plan of a run, draw it, or compare it with what a run did."""
    if unit is not None and plot is None:
        raise ConfigError.cannot(
            f"use --unit {unit}",
            why="there is no picture to draw",
            instead="add --plot FILE, or leave it out",
        )
    add_working_folder()
    config = read_arguments(arguments, folder=against)
    if against is not None:
        config = _as_it_ran(config, against)
    ranks = config.world_size or 1
    run = build_run(config, world_size=ranks)
    prepared = prepare_run(config, run)
    bounds = prepared.decided_between
    if bounds is not None:
        _refuse(
            {"--plot": plot, "--against": against, "--batches": batches},
            why="it decides its batch sizes as it goes, so no plan knows each batch",
            instead="leave it out to see what the least and the largest sizes would do, or "
            "see what a run has done with 'stretto report RUN_FOLDER'",
        )
        ends = ends_of(config, run, bounds, world_size=ranks)
        _print_ends(run.policy, ends, as_json=as_json)
        return
    planned = plan_of(config, prepared, world_size=ranks)
    if not planned.is_exact:
        _refuse(
            {"--against": against, "--batches": batches},
            why="the number of samples in its data is not known, so any batch may be cut short",
            instead="set data.num_samples, or write last_batch: carry",
        )
    if plot is not None:
        from stretto.report.plan_picture import draw_plan

        draw_plan(planned, plot, unit=unit)
        typer.echo(f"drew {plot}", err=True)
    if against is not None:
        _compare(planned, against)
    elif batches:
        _print_batches(planned, as_json=as_json)
    else:
        typer.echo(json.dumps(planned.to_json(), indent=2) if as_json else planned.table())


def _print_ends(policy: BatchSizePolicy, ends: tuple[Plan, Plan], *, as_json: bool) -> None:
    """Print the plans with the smallest and with the largest size of a run that decides itself."""
    smallest, largest = ends
    if as_json:
        plain = {"least": smallest.to_json(), "largest": largest.to_json()}
        typer.echo(json.dumps({"batch_size": repr(policy), **plain}, indent=2))
        return
    typer.echo(f"batch sizes are decided during the run: {policy!r}")
    typer.echo(f"\nif it stayed at the smallest size:\n\n{smallest.table()}")
    typer.echo(f"\nif it stayed at the largest size:\n\n{largest.table()}")


def _refuse(options: Mapping[str, object], *, why: str, instead: str) -> None:
    """Refuse options that need every batch of the run."""
    for option, value in options.items():
        if value:
            raise PlanError.cannot(f"use {option} for this run", why=why, instead=instead)


def _as_it_ran(config: RunConfig, folder: Path) -> RunConfig:
    """Fill in what the run file leaves open: the ranks and the micro-batches of the run."""
    found: dict[str, int | None] = {}
    if not config.world_size:
        found["world_size"] = _kept(folder, "world_size")
    if config.micro_batch_size == "auto":
        found["micro_batch_size"] = _kept(folder, "micro_batch_size")
    return config.model_copy(update=found)


def _kept(folder: Path, name: str) -> int | None:
    """A number in the plan that the run in `folder` has kept, if there is one."""
    try:
        number = json.loads((folder / PLAN).read_text("utf-8"))[name]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return number if type(number) is int and number > 0 else None


def _compare(planned: Plan, folder: Path) -> None:
    from stretto.report.ledger import compare

    comparison = compare(planned, folder)
    typer.echo(str(comparison))
    if not comparison.agrees:
        raise SystemExit(1)


def _print_batches(planned: Plan, *, as_json: bool) -> None:
    """Print a line for every batch, with the columns of a run's ledger."""
    names = list(planned.stages[0].values) if planned.stages else []
    if not as_json:
        columns = ("batch", "epoch", "sample", "token", "size", "micro_batches", *names)
        typer.echo(",".join(columns))
    for batch in planned.batches():
        at = batch.timestamp
        row = {
            "batch": at.batch,
            "epoch": at.epoch,
            "sample": at.sample,
            "token": at.token,
            "size": batch.size,
            "micro_batches": batch.accumulation,
            **batch.values,
        }
        typer.echo(json.dumps(row) if as_json else ",".join(map(repr, row.values())))


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
