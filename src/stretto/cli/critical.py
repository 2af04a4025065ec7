"""`stretto critical-batch-size`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from stretto.batching import LearningRateRule, LinearRule, NoRule, SquareRootRule
from stretto.cli.files import RUN_FILE, add_working_folder, find_run_file
from stretto.config.branching import Trunk, default_sizes
from stretto.config.files import read_run_file
from stretto.errors import ConfigError, cannot
from stretto.report.critical import critical_table, draw_critical
from stretto.timing import Time
from stretto.training.critical import (
    LEAST_STEPS,
    Branch,
    CriticalBatchSize,
    check_branches,
    check_yardstick,
)
from stretto.training.interrupt import Interrupts, end_if
from stretto.training.resuming import FOLDER

LITTLE = 0.2
"""Below this part of the optimizer's learning rate it counts as decayed."""
RULES: dict[str, LearningRateRule] = {
    "sqrt": SquareRootRule(1),
    "linear": LinearRule(1),
    "none": NoRule(),
}


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
    """Branch short runs off a checkpoint at several batch sizes, and compare their losses."""
    if plot is not None:
        from stretto.report.drawing import check_drawable

        check_drawable(plot)
    chosen, wanted = _rule(rule), None if sizes is None else _sizes(sizes)
    add_working_folder()
    path, overrides = find_run_file(arguments, folder=_run_folder(checkpoint))
    config, source = read_run_file(path, overrides)
    trunk = Trunk.at(config, checkpoint, source=source, rule=chosen)
    samples = trunk.samples(Time(over))
    _check_seeds(seeds)
    trunk.check_orders(seeds)
    tried = default_sizes(trunk.size, samples) if wanted is None else wanted
    check_branches(tried, samples, tolerance=tolerance)
    samples = _whole(samples, tried)
    typer.echo(f"branches off {trunk.path}, as {path} says", err=True)
    branches: list[Branch] = []
    try:
        with Interrupts() as interrupts:  # a branch has its own: what comes between two of them
            for seed in range(seeds):
                branches += _branches(trunk, tried, interrupts, seed=seed, samples=samples)
    except (SystemExit, KeyboardInterrupt):
        whole = len(branches) // len(tried)
        typer.echo(f"stopped: {whole} of {seeds} orders are whole", err=True)
        if branches:
            told = CriticalBatchSize.of(branches, samples=samples, tolerance=tolerance)
            _tell(told, trunk, seeds=seeds, as_json=as_json, plot=plot)
        raise
    found = CriticalBatchSize.of(branches, samples=samples, tolerance=tolerance)
    _tell(found, trunk, seeds=seeds, as_json=as_json, plot=plot)


def _run_folder(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint is of, if that says how it was made."""
    folder = checkpoint if (checkpoint / FOLDER).is_dir() else checkpoint.absolute().parent.parent
    return folder if (folder / RUN_FILE).is_file() else None


def _tell(
    found: CriticalBatchSize, trunk: Trunk, *, seeds: int, as_json: bool, plot: Path | None
) -> None:
    """Print and draw what branches have come to, of the orders that were asked for."""
    whole = len({branch.seed for branch in found.branches})
    if as_json:
        plain = _plain(found, trunk) | {"seeds": {"asked": seeds, "whole": whole}}
        typer.echo(json.dumps(plain, indent=2))
    else:
        so_far = "" if whole == seeds else "so far, "
        typer.echo(f"{critical_table(found)}\n\n{so_far}{found}")
    if (part := trunk.decay(found.branches[0])) < LITTLE:
        typer.echo(
            f"note: the learning rate in force there is {part:.1%} of the optimizer's, and where "
            "it is small all sizes look alike; a checkpoint where it is larger tells more",
            err=True,
        )
    if plot is not None:
        draw_critical(found, plot)
        typer.echo(f"drew {plot}", err=True)


def _whole(samples: int, sizes: Sequence[int]) -> int:
    """Return a number of samples, at most a quarter fewer, that suits the sizes best.

    The last batch is whole: of every size, or at least of the largest, which has enough steps.
    """
    whole = samples - samples % math.lcm(*sizes)
    least = max(0.75 * samples, LEAST_STEPS * sizes[-1])
    return whole if whole >= least else samples - samples % sizes[-1]


def _branches(
    trunk: Trunk, sizes: Sequence[int], interrupts: Interrupts, *, seed: int, samples: int
) -> list[Branch]:
    """Train the branches of one order of samples, and say what each came to."""
    branches = []
    for size in sizes:
        end_if(interrupts.received)
        branch = trunk.branch(size, seed=seed, samples=samples)
        typer.echo(
            f"seed {seed}, batch size {size:,}: loss {branch.loss:.4f} after "
            f"{branch.steps:,} steps at a learning rate of {branch.learning_rate:.3g}",
            err=True,
        )
        check_yardstick(branch, sizes[0])
        branches.append(branch)
    return branches


def _check_seeds(seeds: int) -> None:
    if seeds < 1:
        raise ConfigError(
            cannot(
                f"compare {seeds} branches of each size",
                why="it takes one or more",
                instead="write for example --seeds 3",
                where="--seeds",
            )
        )


def _rule(name: str | None) -> LearningRateRule | None:
    if name is None:
        return None
    if name not in RULES:
        raise ConfigError(
            cannot(
                f"let the learning rate go with the size by the rule {name!r}",
                why="there is no such rule",
                instead=f"write {', '.join(RULES)}",
                where="--rule",
            )
        )
    return RULES[name]


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise ConfigError(
            cannot(
                f"read {text!r} as batch sizes",
                why="it is not a list of whole numbers",
                instead="write for example 16,32,64,128",
                where="--sizes",
            )
        )
    return [int(part) for part in parts]


def _finite(value: float) -> float | None:
    """The number, or None where JSON has none for it."""
    return value if math.isfinite(value) else None


def _plain(found: CriticalBatchSize, trunk: Trunk) -> dict[str, Any]:
    return {
        "size": found.size,
        "low": found.low,
        "high": found.high,
        "tolerance": found.tolerance,
        "samples": found.samples,
        "at": {"sample": trunk.timestamp.sample, "batch_size": trunk.size},
        "rows": [
            {
                "size": row.size,
                "loss": _finite(row.loss),
                "excess": _finite(row.excess),
                "reach": _finite(row.reach),
                "verdict": row.verdict,
            }
            for row in found.rows
        ],
        "branches": [
            branch._asdict() | {"loss": _finite(branch.loss)} for branch in found.branches
        ],
    }
