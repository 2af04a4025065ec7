"""Run files: YAML read strictly and safely, and the objects that it describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.config.plans import build_plan
from stretto.config.run import (
    RunConfig,
    dump_run_file,
    parse_run_file,
    read_run_file,
    run_file_schema,
)
from stretto.config.yaml import Source

if TYPE_CHECKING:
    from stretto.config.training import build_trainer

__all__ = [
    "RunConfig",
    "Source",
    "build_plan",
    "build_trainer",
    "dump_run_file",
    "parse_run_file",
    "read_run_file",
    "run_file_schema",
]


def __getattr__(name: str) -> object:
    if name != "build_trainer":
        raise AttributeError(f"module 'stretto.config' has no attribute {name!r}", name=name)
    from stretto.config.training import build_trainer  # which imports torch

    return build_trainer
