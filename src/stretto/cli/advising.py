"""`stretto step-cost` and `stretto advise`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stretto.cli.finding import numbers
from stretto.cli.planning import read_arguments
from stretto.config.training import build_trainer
from stretto.report.tables import cost_table


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
