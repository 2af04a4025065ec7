"""Measure the rows of a family, and keep what was measured, row by row."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from published.rows import Family, Row

RESULTS = Path(__file__).parents[1] / "results" / "published"

Result = Mapping[str, Any]
"""`ours` in bytes, `seconds`, `torch`, `problem`, and the `settings` that it was measured with."""


def read(key: str, folder: Path = RESULTS) -> dict[str, Result]:
    """Return the results of a family by the names of its rows."""
    file = folder / f"{key}.json"
    found: dict[str, Result] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found


def current(family: Family, folder: Path = RESULTS) -> dict[str, Result]:
    """Return the results that were measured with the settings that the rows have now."""
    found = read(family.key, folder)
    return {
        row.name: found[row.name]
        for row in family.rows
        if row.name in found and found[row.name]["settings"] == json.loads(json.dumps(row.settings))
    }


def measure(
    family: Family,
    rows: Iterable[Row],
    *,
    again: bool = False,
    folder: Path = RESULTS,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Measure rows that have no result yet, and write each result as soon as it is there.

    A row that fails is a result, too: its `problem` is kept, and the next row is measured.
    """
    for row in rows:
        if row.name in current(family, folder) and not again:
            continue
        print(f"{family.key}: {row.name} ...", file=sys.stderr, flush=True)
        began, ours, problem = clock(), {}, ""
        try:
            ours = family.measure(row)
            if missing := set(row.published) - set(ours):
                problem = f"did not measure {', '.join(sorted(missing))}"
        except Exception as error:  # noqa: BLE001 - one row must not end a run of hours
            problem = f"{type(error).__name__}: {error}"[-600:]
        result = {
            "ours": {what: ours[what] for what in row.published if what in ours},
            "seconds": round(clock() - began, 1),
            "torch": row.settings.get("torch") or metadata.version("torch").partition("+")[0],
            "problem": problem,
            "settings": row.settings,
        }
        keep(family, row.name, result, folder)


def keep(family: Family, name: str, result: Result, folder: Path = RESULTS) -> None:
    """Add a result to the file of its family, in the order of the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {**read(family.key, folder), name: result}
    ordered = {row.name: found[row.name] for row in family.rows if row.name in found}
    file = folder / f"{family.key}.json"
    part = file.with_suffix(".part")  # a run that is killed leaves the old file or the new one
    part.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")
    part.replace(file)
