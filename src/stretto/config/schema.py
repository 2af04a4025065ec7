"""The JSON schema of run files."""

from __future__ import annotations

from typing import Any

from stretto.config.kinds import section
from stretto.config.run import RunConfig
from stretto.config.targets import TARGET_PATTERN

TIME_PATTERN = (
    r"^\s*[0-9][0-9_]*(\.[0-9]+|/[0-9][0-9_]*)?([eE][+-]?[0-9]+)?"
    r"(%|[KMBT]?(ep|ba|sp|tok|dur|sec)|[dhms]([0-9dhm./]*[hms])?)\s*$"
)
"""What an editor can check of a time; the whole grammar is that of `Time`."""


def run_file_schema() -> dict[str, Any]:
    """Return the JSON Schema of run files.

    What needs the whole file or Python (that a warm-up fits, that a target exists) is beyond a
    schema. Nulls, which count as absent, are not among the suggestions.

    >>> run_file_schema()["required"]
    ['max_duration', 'data', 'batch_size']
    """
    parts: dict[str, Any] = {
        "Time": {
            "description": "An amount and a unit: 90ep, 500ba, 1_000sp, 2Btok, 0.1dur, 10%, 1h30m.",
            "type": "string",
            "pattern": TIME_PATTERN,
        }
    }
    section(RunConfig).schema(parts)
    for part in parts.values():
        if "target" in part.get("properties", ()):
            part["properties"]["target"]["pattern"] = TARGET_PATTERN
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **parts.pop("RunConfig"),
        "title": "stretto run file",
        "description": "What a training run is. Times have a unit, as in docs/guides/time.md.",
        "$defs": parts,
    }
