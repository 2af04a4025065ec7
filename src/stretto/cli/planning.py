"""`stretto plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import typer

from stretto.batching import BatchSizePolicy
from stretto.cli.files import PLAN
from stretto.config.run import RunConfig
from stretto.errors import Argument, PlanError
from stretto.planning import Plan


def as_text(planned: Plan) -> str:
    """Return a plan as JSON."""
    return json.dumps(planned.to_json(), indent=2)


def print_ends(policy: BatchSizePolicy, ends: tuple[Plan, Plan], *, as_json: bool) -> None:
    """Print the plans with the smallest and with the largest size of a run that decides itself."""
    smallest, largest = ends
    if as_json:
        plain = {"least": smallest.to_json(), "largest": largest.to_json()}
        typer.echo(json.dumps({"batch_size": repr(policy), **plain}, indent=2))
        return
    typer.echo(f"batch sizes are decided during the run: {policy!r}")
    typer.echo(f"\nif it stayed at the smallest size:\n\n{smallest.table()}")
    typer.echo(f"\nif it stayed at the largest size:\n\n{largest.table()}")


def refuse(options: Mapping[str, object], *, why: str, instead: str) -> None:
    """Refuse options that need every batch of the run."""
    for option, value in options.items():
        if value:
            raise PlanError.cannot(f"use {option} for this run", why=why, instead=instead)


def as_it_ran(config: RunConfig, folder: Path) -> RunConfig:
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


def print_batches(planned: Plan, *, as_json: bool) -> None:
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
