"""`stretto inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from stretto.checkpoint import describe
from stretto.checkpoint.folder import candidates
from stretto.checkpoint.manifest import read_errors
from stretto.errors import CheckpointError
from stretto.training.checkpointing.resuming import FOLDER


def inspect(path: Path, *, as_json: bool) -> None:
    """Print what a checkpoint is, or those of a run; exit with 1 where one is not whole."""
    path = path if path.name else path.resolve()  # '.'
    with read_errors(path):
        paths = candidates(path / FOLDER) if (path / FOLDER).is_dir() else [path]
    if not paths:
        raise CheckpointError.cannot(
            f"inspect {path}",
            why="the run has no checkpoint",
            instead="write 'checkpoint: {every: 1ep}' in the run file to keep some",
        )
    found = [describe(one) for one in paths]
    if as_json:
        records = [one.to_json() for one in found]
        typer.echo(json.dumps(records if len(paths) > 1 else records[0], indent=1))
    else:
        typer.echo("\n\n".join(str(one) for one in found))
    if not all(one.is_whole for one in found):
        raise SystemExit(1)
