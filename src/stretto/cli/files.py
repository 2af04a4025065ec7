"""Which run file a command line means."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from stretto.config.files import read_run_file
from stretto.config.run import RunConfig
from stretto.config.yaml import parse_override

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
