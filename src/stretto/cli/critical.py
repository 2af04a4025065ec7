"""`stretto critical-batch-size`."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from stretto.batching import LearningRateRule, LinearRule, NoRule, SquareRootRule
from stretto.cli.files import RUN_FILE, add_working_folder, find_run_file
from stretto.config.files import read_run_file
from stretto.errors import ConfigError
from stretto.experiments.branches import BranchPoint
from stretto.experiments.critical_batch_size import (
    Branch,
    CriticalBatchSize,
    check_baseline,
    check_sizes,
    check_tolerance,
    default_sizes,
    whole_steps,
)
from stretto.experiments.picture import draw_critical
from stretto.report.drawing import check_drawable
from stretto.timing import Time
from stretto.training.checkpointing.resuming import FOLDER

LITTLE = 0.2
"""Below this part of the optimizer's learning rate it counts as decayed."""
RULES: dict[str, LearningRateRule] = {
    "sqrt": SquareRootRule(1),
    "linear": LinearRule(1),
    "none": NoRule(),
}
_say = partial(typer.echo, err=True)


def critical_batch_size(
    arguments: Sequence[str],
    *,
    checkpoint: Path,
    sizes: str | None,
    over: str,
    rule: str | None,
    seeds: int,
    tolerance: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Train branches of a checkpoint at several batch sizes, and compare their losses."""
    if plot is not None:
        check_drawable(plot)
    wanted = None if sizes is None else _sizes(sizes)
    chosen = None if rule is None else _rule(rule)
    add_working_folder()
    path, overrides = find_run_file(arguments, folder=_run_folder(checkpoint))
    config = read_run_file(path, overrides)
    point = BranchPoint(config, checkpoint, rule=chosen)
    samples = point.samples(Time(over))
    point.check_seeds(seeds)
    check_tolerance(tolerance)
    tried = default_sizes(point.size, samples) if wanted is None else wanted
    check_sizes(tried, samples)
    samples = whole_steps(samples, tried)
    _say(f"branches off {point.path}, as {path} says")
    branches, stopped = _train(point, tried, seeds, samples)
    if branches:
        found = CriticalBatchSize.of(branches, samples=samples, tolerance=tolerance)
        _show(found, point, seeds=seeds, plot=plot, as_json=as_json)
    if stopped is not None:
        raise stopped


def _train(
    point: BranchPoint, sizes: Sequence[int], seeds: int, samples: int
) -> tuple[list[Branch], SystemExit | None]:
    """Train branches, and return those of the seeds that are complete; and what stopped it."""
    branches: list[Branch] = []
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        for seed in range(seeds):
            branches += [
                _reported(point.branch(size, seed=seed, samples=samples), sizes[0])
                for size in sizes
            ]
    except (SystemExit, KeyboardInterrupt) as error:
        _say(f"stopped: {len(branches) // len(sizes)} of {seeds} orders are whole")
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        return branches, SystemExit(128 + number)
    finally:
        signal.signal(signal.SIGTERM, before)
    return branches, None


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _run_folder(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint is of, if there is a run file in it."""
    folder = checkpoint if (checkpoint / FOLDER).is_dir() else checkpoint.absolute().parent.parent
    return folder if (folder / RUN_FILE).is_file() else None


def _reported(branch: Branch, smallest: int) -> Branch:
    """Print the result of a branch, and return it."""
    _say(
        f"seed {branch.seed}, batch size {branch.size:,}: loss {branch.loss:.4f} after "
        f"{branch.steps:,} steps at a learning rate of {branch.learning_rate:.3g}"
    )
    check_baseline(branch, smallest)
    return branch


def _show(
    found: CriticalBatchSize, point: BranchPoint, *, seeds: int, plot: Path | None, as_json: bool
) -> None:
    """Print and draw what the branches show, of the seeds that were asked for."""
    whole = len({branch.seed for branch in found.branches})
    if as_json:
        plain = {
            **_plain(found, "size", "low", "high", "tolerance", "samples"),
            "at": {"sample": point.timestamp.sample, "batch_size": point.size},
            "rows": [
                _plain(row, "size", "loss", "excess", "reach", "verdict") for row in found.rows
            ],
            "branches": [_plain(branch, *Branch._fields) for branch in found.branches],
            "seeds": {"asked": seeds, "whole": whole},
        }
        typer.echo(json.dumps(plain, indent=2))
    else:
        so_far = "" if whole == seeds else "so far, "
        typer.echo(f"{found.table()}\n\n{so_far}{found}")
    if (part := point.decay(found.branches[0])) < LITTLE:
        _say(
            f"note: the learning rate in force there is {part:.1%} of the optimizer's, and where "
            "it is small all sizes look alike; a checkpoint where it is larger tells more"
        )
    if plot is not None:
        draw_critical(found, plot)
        _say(f"drew {plot}")


def _plain(record: object, *names: str) -> dict[str, Any]:
    """Return attributes for JSON, which has no infinite numbers: they become null."""
    values = {name: getattr(record, name) for name in names}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _rule(name: str) -> LearningRateRule:
    if name not in RULES:
        raise ConfigError.cannot(
            f"use the learning rate rule {name!r}",
            why="there is no such rule",
            instead=f"write {', '.join(RULES)}",
            where="--rule",
        )
    return RULES[name]


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError.cannot(
            f"read {text!r} as batch sizes",
            why="it is not a list of whole numbers",
            instead="write for example 16,32,64,128",
            where="--sizes",
        ) from None
