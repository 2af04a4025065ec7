"""`stretto find-batch-size`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import typer

from stretto.cli.files import add_working_folder, read_arguments
from stretto.config.building.finding import Finding, build_finding
from stretto.config.run import RunConfig
from stretto.errors import ConfigError
from stretto.memory import Answer, find_batch_size
from stretto.memory.finding.estimators import NoEstimateError
from stretto.memory.finding.finder import FindMethod
from stretto.memory.search import MAXIMUM
from stretto.report.memory_table import memory_table

ABSTRACT = ("auto", "predict")
"""Ways that need no model with values."""


def find(
    arguments: Sequence[str],
    *,
    method: str,
    device_memory: str | None,
    device: str | None,
    plot: Path | None,
    as_json: bool,
    **wishes: Any,
) -> None:
    """Print the largest micro-batch that a run has memory for, and draw what it needs."""
    if plot is not None:
        from stretto.report.drawing import check_format

        check_format(plot)
    add_working_folder()
    config = read_arguments(arguments)
    if device is None and device_memory is not None:
        # Memory that is stated is nearly always that of a GPU.
        device = "cpu" if config.stepping.device == "cpu" else "cuda"
    answer = _answer(config, method=method, device_memory=device_memory, device=device, **wishes)
    if as_json:
        typer.echo(json.dumps(_plain(answer), indent=2))
    else:
        table = memory_table(answer)
        if table:
            typer.echo(f"{table}\n")
        typer.echo(str(answer))
    if plot is not None:
        from stretto.report.memory_picture import draw_memory

        draw_memory(answer, plot)
        typer.echo(f"drew {plot}", err=True)


def _answer(config: RunConfig, *, method: str, device_memory: str | None, **wishes: Any) -> Answer:
    def ask(found: Finding, method: str) -> Answer:
        if wishes["maximum"] is None:
            wishes["maximum"] = found.num_samples or MAXIMUM
        return find_batch_size(
            found.step,
            found.batch,
            accumulation=found.accumulation,
            measures_noise=found.measures_noise,
            method=cast(FindMethod, method),  # looked at there
            device_memory=device_memory,
            **wishes,
        )

    if device_memory is not None and method in ABSTRACT:
        # The model may be larger than this machine, so it is built without memory first.
        try:
            found = build_finding(config, on_meta=True)
        except (ConfigError, RuntimeError, NotImplementedError):
            pass  # it reads values while it is built, or is wrong: the next attempt will say
        else:
            try:
                return ask(found, "predict")
            except NoEstimateError:
                if method == "predict":
                    raise
    return ask(build_finding(config), method)


def _plain(answer: Answer) -> dict[str, Any]:
    return {
        "size": answer.size,
        "certainty": answer.certainty,
        "too_large": answer.too_large,
        "limit_bytes": answer.limit.bytes,
        "limit": answer.limit.source,
        "reserve_bytes": answer.reserve,
        "peak_bytes": answer.peak,
        "peaks": [{"size": row.size, "peak_bytes": row.peak} for row in answer.rows()],
        "notes": list(answer.notes),
        "cost": answer.cost._asdict(),
    }
