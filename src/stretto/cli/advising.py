"""`stretto step-cost` and `stretto advise`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.cli.finding import numbers
from stretto.cli.planning import read_arguments
from stretto.config.training import build_trainer
from stretto.errors import ConfigError
from stretto.report import read_advice
from stretto.report.tables import cost_table
from stretto.run_folder import reading_run, write_named


def step_cost(arguments: Sequence[str], sizes: str | None) -> tuple[str, dict[str, Any]]:
    """Return the price of a step of a run file, as text and as plain values.

    Raises:
        ConfigError: the sizes cannot be read.
    """
    given = None if sizes is None else numbers("--sizes", sizes)
    config = replace(read_arguments(arguments), checkpoint=None, folder=None)
    cost = build_trainer(config).measure_cost(given)
    line = cost.line
    plain = {} if line is None else {"a": line.a, "b": line.b, "interval": line.interval}
    rows = [
        {"size": size, "seconds": seconds, "fastest": cost.fastest[size]}
        for size, seconds in cost.sizes.items()
    ]
    return cost_table(cost), {"sizes": rows, **plain, "c": cost.c, "unknown": cost.unknown}


def advise(folder: Path, write: Path | None) -> tuple[str, dict[str, Any]]:
    """Return which batch size ends soonest, as text and as plain values; write it to a file.

    Raises:
        ConfigError: nothing is known that could be written.
    """
    with reading_run(folder):
        advice = read_advice(folder)
        text, policy = str(advice), advice.policy
    if write is not None:
        if not policy:
            why, instead = "the log does not tell them", "do what 'stretto advise' without it says"
            raise ConfigError.cannot(f"write sizes to {write}", why=why, instead=instead)
        write_named(write, f'batch_size: "{policy}"\n', r'batch_size: "[^"\n]*"\n')
        text += f'\nwrote batch_size: "{policy}" to {write}'
    plain = {"now": advice.now, "noise": advice.noise, "batch_size": policy or None}
    return text, {**plain, "seconds": advice.prices, "lines": str(advice).splitlines()}
