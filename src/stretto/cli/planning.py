"""Run files on the command line, and `stretto plan`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import typer

from stretto.batching import Fixed
from stretto.cli.terminal import print_json, progress
from stretto.config.checking import check_targets
from stretto.config.plans import TimesAndSizes, plan_of, prepare_checked, prepare_run
from stretto.config.run import RunConfig, read_run_file
from stretto.config.yaml import parse_override
from stretto.errors import PlanError
from stretto.planning import Plan, PlannedSizes, Prepared, passes, resumed
from stretto.planning.plan import moment_record, plan_record
from stretto.planning.sizes import Had
from stretto.report.engines import Engine, engine_settings
from stretto.report.tables import moments_table, plan_table
from stretto.run_folder import PLAN, RUN_FILE, read_json, read_ledger
from stretto.timing import Timestamp

_KEPT = (int, str, type(None))
"""What a plan keeps of a size."""


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the run file that a command line names, if any, and its `key=value` overrides."""
    path, overrides = None, list(arguments)
    if overrides and ("=" not in overrides[0] or _is_file(overrides[0])):
        path = Path(overrides.pop(0))
    for override in overrides:
        parse_override(override)  # refuses anything else before a file is read
    return path, overrides


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # too long for the name of a file
        return False


def packaged_run_file() -> Path:
    """Return the run file that comes with stretto."""
    with as_file(files("stretto.examples") / "default.yaml") as path:
        return path


def add_working_folder() -> None:
    """Let targets name modules in the working folder.

    It comes last: the folder may be somebody else's, and hold a `numpy.py`. It is absolute, so that
    the phantom's processes find it, too.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)


def read_arguments(arguments: Sequence[str], *, folder: Path | None = None) -> RunConfig:
    """Return the run that a command line describes.

    Args:
        arguments: a path, or none, then `key=value` for each override.
        folder: a run folder, whose run file is the default; by default, the packaged one.

    Raises:
        ConfigError: the file cannot be read, or something in it or in an override is wrong.
    """
    add_working_folder()
    path, overrides = split_arguments(arguments)
    default = packaged_run_file() if folder is None else folder / RUN_FILE
    return read_run_file(path or default, overrides)


def print_plan(
    arguments: Sequence[str], times: Sequence[str], to: Engine | None, *, as_json: bool
) -> None:
    """Print the plan of a run, or of some times of it, or the settings of an engine for it.

    Of a run that decides its sizes, print the plans with the smallest and the largest.
    """
    config = read_arguments(arguments)
    with progress("reading the data"):
        run, prepared = prepare_checked(config)
        print_notes(check_targets(config))
    if times:
        planned = every_batch(config, prepared, "--at")
        if as_json:
            print_json([moment_record(planned, time) for time in times])
        else:
            typer.echo(moments_table(planned, times))
        return
    if to is not None:
        planned, optimizer = every_batch(config, prepared, "--to"), config.optimizer
        stated = {} if optimizer is None else {"clip_norm": config.clip_norm, **optimizer.arguments}
        stated |= {"groups": optimizer.groups} if optimizer is not None and optimizer.groups else {}
        settings, warnings = engine_settings(planned, to, stated)
        print_notes(warnings)
        if as_json:
            print_json(settings)
        else:
            typer.echo("\n".join(f"{name}={value}" for name, value in settings.items()))
        return
    if prepared.decided_between is not None:
        print_ends(config, run, prepared.decided_between, as_json=as_json)
        return
    planned = plan_of(config, prepared)
    if as_json:
        print_json(planned.to_json())
    else:
        typer.echo(plan_table(planned))


def compare_with(folder: Path, arguments: Sequence[str]) -> None:
    """Compare a plan with the run in a folder; a difference ends the process with code 1."""
    from stretto.report.run import compare

    config = as_it_ran(read_arguments(arguments, folder=folder), folder)
    with progress("reading the data"):
        _, prepared = prepare_checked(config, resumes=True)
        prepared, since = as_resumed(prepared, folder)
        if prepared.is_read:
            prepared.planned_sizes()  # refuses
    planned = every_batch(config, prepared, "--against")
    if not planned.is_exact:
        why = "the number of samples in its data is not known, so any batch may be cut short"
        instead = "set data.num_samples, or write last_batch: carry, as Horizon.endless does"
        refuse({"--against": folder}, why=why, instead=instead)
    comparison = compare(planned, folder, since=since)
    typer.echo(str(comparison))
    if not comparison.agrees:
        raise SystemExit(1)


def write_page(page: Path, arguments: Sequence[str]) -> None:
    """Write the page of one or several plans, laid over each other.

    Args:
        page: the file.
        arguments: run files, then `key=value` for what changes in all of them.

    Raises:
        ConfigError: the page cannot be written, or a run file is wrong.
        PlanError: a run has no plan.
    """
    from stretto.report.page import payload, plan_data, write

    named = [text for text in arguments if "=" not in text or _is_file(text)]
    overrides = [text for text in arguments if text not in named]
    plans = []
    for name in named or [str(packaged_run_file())]:
        config = read_arguments([name, *overrides])
        _, prepared = prepare_checked(config)
        print_notes(check_targets(config))
        planned = every_batch(config, prepared, "--html")
        if planned.end is None:
            why = f"only the run can tell when {planned.horizon.max_duration} have passed"
            refuse({"--html": page}, why=why, instead="say max_duration in 'ep', 'ba' or 'sp'")
        plans.append(plan_data(Path(name).stem, plan_record(planned)))
    write(page, payload(plans))
    typer.echo(f"wrote {page}", err=True)


def every_batch(config: RunConfig, prepared: Prepared, option: str) -> Plan:
    """Return the plan of a run that does not decide its batch sizes while it runs.

    Raises:
        PlanError: it does, so it has none.
    """
    if prepared.decided_between is not None:
        why = "its batch sizes are decided during the run"
        refuse({option: True}, why=why, instead="leave it out, or see 'stretto report RUN_FOLDER'")
    return plan_of(config, prepared)


def print_notes(lines: Iterable[str]) -> None:
    """Print what a plan does not check."""
    for line in lines:
        typer.echo(f"note: {line}", err=True)


def print_ends(
    config: RunConfig, run: TimesAndSizes, bounds: tuple[int, int], *, as_json: bool
) -> None:
    """Print the plans with the smallest and the largest size that a run may decide."""
    smallest, largest = (
        plan_of(config, prepare_run(config, replace(run, policy=Fixed(size)))) for size in bounds
    )
    if as_json:
        plans = {"least": smallest.to_json(), "largest": largest.to_json()}
        print_json({"batch_size": repr(run.policy), **plans})
        return
    typer.echo(f"batch sizes are decided during the run: {run.policy!r}")
    typer.echo(f"\nif it stayed at the smallest size:\n\n{plan_table(smallest)}")
    typer.echo(f"\nif it stayed at the largest size:\n\n{plan_table(largest)}")


def refuse(options: Mapping[str, object], *, why: str, instead: str) -> None:
    """Refuse options that were given."""
    for option, value in options.items():
        if value:
            raise PlanError.cannot(f"use {option} for this run", why=why, instead=instead)


def as_it_ran(config: RunConfig, folder: Path) -> RunConfig:
    """Fill in the ranks and the micro-batch size of a run, from the plan in its folder."""
    kept = read_json(folder / PLAN)
    if not isinstance(kept, dict):
        return config
    given = {"world_size": None, "micro_batch_size": "auto"}
    found: dict[str, Any] = {
        name: kept.get(name)
        for name, value in given.items()
        if getattr(config, name) == value and isinstance(kept.get(name), _KEPT)
    }
    return replace(config, **found)


def as_resumed(prepared: Prepared, folder: Path | None) -> tuple[Prepared, int]:
    """Bind a run as it was resumed last, after the batches in its ledger; return where, too."""
    if folder is None:
        return prepared, 0
    kept, past = read_json(folder / PLAN), list[Had]()
    at, after = kept.get("resumed_at", 0) if isinstance(kept, dict) else 0, -1
    for row in read_ledger(folder) if at else ():
        counts = row.counts
        now = Timestamp(*(counts[name] for name in ("epoch", "batch", "sample", "token")))
        if now.batch == at and not passes(prepared.sizes, now, past):
            had, bound = [*past, Had(at, 1, now.sample)], prepared.bound_policy
            before = PlannedSizes(prepared.facts, prepared.policy, bound=bound, had=had)
            return resumed(prepared, before.end or now, past, bound.start), at
        if now.sample != after or past[-1].size != counts["decided_size"]:
            past.append(Had(now.batch, counts["decided_size"], now.sample))
        after = now.sample + counts["size"]
    return prepared, 0
