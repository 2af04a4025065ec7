"""`stretto plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path

import typer

from stretto.batching import BatchSizePolicy
from stretto.config.run import RunConfig, read_run_file
from stretto.config.yaml import parse_override
from stretto.errors import Argument, PlanError
from stretto.planning import Plan

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
