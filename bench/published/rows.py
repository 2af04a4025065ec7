"""What a published run is, and a family of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

GIB = 1 << 30
SOURCE = "PUBLISHED_SOURCE"


class Row(NamedTuple):
    """One published run."""

    name: str
    """As published."""
    published: dict[str, float]
    """Bytes: "allocated" and "reserved" are peaks; "mean allocated", "mean reserved"."""
    settings: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    """What the family's `measure` needs to know; JSON keeps it exactly."""
    known: str = ""
    """The cause of a difference above 1 percent, if an experiment showed it."""
    fitted: bool = False
    """Whether an unknown was fitted on this row."""


class Family(NamedTuple):
    """Published runs of one source, which are measured in one way."""

    key: str
    title: str
    source: str
    """The address of the published figures."""
    text: str
    """What was run again, what was fitted, and the versions: Markdown."""
    rows: tuple[Row, ...]
    measure: Callable[[Row], dict[str, float]]
    """Return ours, in bytes, under the names of `Row.published`."""


def source() -> Path:
    """Return the clone that was given with `--source`.

    Raises:
        FileNotFoundError: None was given, or it is not there.
    """
    given = os.environ.get(SOURCE)
    if not given:
        raise FileNotFoundError("this family runs published code; write --source PATH to a clone")
    path = Path(given).expanduser().resolve()
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {given!r}; write --source PATH to a clone")
    return path
