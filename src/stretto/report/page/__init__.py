"""The run page: one HTML file that shows runs, plans or the memory of a step.

`read` a run folder, make a `payload` of runs, `build` the page.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from stretto._location import read_plain
from stretto.errors import ConfigError, DataError
from stretto.report.page.reading import (
    plan_data,
    read,
    read_or_problem,
    runs_in,
)
from stretto.report.page.series import RunData, base64_of, encoded
from stretto.run_folder import write_named

__all__ = [
    "RunData",
    "build",
    "memory_payload",
    "payload",
    "plan_data",
    "read",
    "read_or_problem",
    "runs_in",
    "runs_payload",
    "write",
]

VERSION = 1
_PARTS = {
    "/*STYLE*/": ("uplot/uPlot.min.css", "page.css"),
    "/*UPLOT*/": ("uplot/uPlot.iife.min.js",),
    "/*SCRIPT*/": ("numbers.js", "page.js"),
}
"""The files for each place in `page.html`."""


def payload(runs: Iterable[RunData]) -> dict[str, Any]:
    """Return runs and plans as the page reads them; equal names get a number."""
    shown, seen = [], Counter[str]()
    for run in runs:
        seen[run.name] += 1
        number = seen[run.name]
        shown.append(encoded(run if number == 1 else replace(run, name=f"{run.name} ({number})")))
    return runs_payload(shown)


def runs_payload(runs: Sequence[Mapping[str, Any]], *, live: bool = False) -> dict[str, Any]:
    """Return encoded runs as the page reads them; a live page asks for changes."""
    return {"version": VERSION, "live": live, "kind": "runs", "runs": [*runs]}


def memory_payload(path: Path) -> dict[str, Any]:
    """Return the memory of a step, from a report of `phantomgpu run --json`.

    Raises:
        DataError: the file is no such report.
    """
    try:
        timeline = json.loads(read_plain(path))["timeline"]
        memory = {
            "title": str(timeline["title"]),
            "limit_bytes": timeline["limit_bytes"],
            "peak_bytes": timeline["peak_bytes"],
            "time": str(timeline.get("time", "")),
            "steps": sorted(map(_step, [timeline, *timeline.get("others", [])]), key=_number),
            "step": timeline.get("step", 1),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError.cannot(
            f"read {path}",
            why=f"it is not the report of a step with its memory ({type(error).__name__}: {error})",
            instead="write it with 'phantomgpu run --json FILE'",
        ) from None
    return {"version": VERSION, "live": False, "kind": "memory", "runs": [], "memory": memory}


def _step(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """Return the memory of one step as the page reads it."""
    stacks = {
        name: [
            {"name": str(one["name"]), "bytes": base64_of(one["bytes"])}
            for one in timeline.get(name, ())
        ]
        for name in ("categories", "places")
    }
    times, marks = base64_of(timeline["times"]), list(timeline["marks"])
    return {"step": int(timeline.get("step", 1)), "times": times, "marks": marks, **stacks}


def _number(step: Mapping[str, Any]) -> int:
    return int(step["step"])


def build(payload: Mapping[str, Any]) -> str:
    """Return the page of a payload, as one HTML file that loads nothing.

    Raises:
        ConfigError: a part of the page is not there.
    """
    folder = files("stretto.report.page")
    texts = {}
    for place, names in _PARTS.items():
        try:
            texts[place] = "\n".join((folder / name).read_text("utf-8") for name in names)
        except OSError:
            raise ConfigError.cannot(
                "build the page",
                why=f"{' or '.join(names)} is not in {folder}",
                instead="run 'make page', or install a wheel of stretto",
            ) from None
    data = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    texts["{{DATA}}"] = data.replace("<", "\\u003c").replace("\u2028", "\\u2028")
    # In one pass: what is put in may itself contain the name of a place.
    template = (folder / "page.html").read_text("utf-8")
    return re.sub("|".join(map(re.escape, texts)), lambda place: texts[place.group()], template)


def write(path: Path, payload: Mapping[str, Any]) -> None:
    """Write the page of a payload.

    Raises:
        ConfigError: the file is not named `.html`, or cannot be written.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError.bad(
            "--html", str(path), "it is not the name of a page", "end it in .html"
        )
    write_named(path, build(payload), ".*<title>stretto</title>.*")
