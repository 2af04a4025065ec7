"""Read the folder of a run, or a plan, into series, events and a table."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stretto._location import local_path
from stretto.batching import Tokens
from stretto.errors import DataError
from stretto.report.advice import advice_lines
from stretto.report.page.series import UNITS, Numbers, RunData, Series
from stretto.run_folder import (
    CLOCK,
    EVENTS,
    LEDGER,
    LEDGER_COLUMNS,
    METRICS,
    PLAN,
    RUN_FILE,
    UNFIT,
    complete_text,
    parsed_event,
    parsed_metrics,
    read_json,
    reading_run,
    unreadable,
    whole_ledger,
)

KNOWN = {
    "loss": ("loss", "training loss", ""),
    "grad_norm": ("grad_norm", "gradient norm", ""),
    "noise_scale": ("noise_scale", "noise scale", ""),
    "memory_peak_bytes": ("memory", "measured, largest over ranks", "bytes"),
    "samples_per_second": ("throughput", "samples per second", "sp/s"),
}
"""The panel, label and unit of a metric."""
ENDS = ("noise_scale_low", "noise_scale_high")
PANELS = {
    "batch_size": "batch size",
    "accumulation": "micro-batches of a rank",
    "lr": "learning rate",
}
FILES = (METRICS, LEDGER, EVENTS)
"""A folder with one of these is a run."""
MOST_STAGES = 200
MOST_SETTINGS = 1_000
MOST_EVENTS = 2_000
"""Of one kind; of more, evenly spaced ones are shown."""


def read(folder: str | Path) -> RunData:
    """Return what the files of a run say, also while it runs.

    Raises:
        DataError: the folder has no file of a run.
    """
    path = local_path(folder, "read the run in", DataError)
    with reading_run(path), np.errstate(all="ignore"):
        return _read(path)


def read_or_problem(folder: Path) -> RunData:
    """Return what the files of a run say, or why that cannot be read: it does not hide others."""
    try:
        return read(folder)
    except DataError as error:
        return RunData(name_of(folder), "run", problem=str(error.message.why))


def name_of(folder: Path) -> str:
    """Return the name of a run, in characters that every page can say."""
    name = folder.name or folder.resolve().name
    return os.fsencode(name).decode("utf-8", "replace")


def _is_run(folder: Path) -> bool:
    # `Path.is_file` raises for a folder of somebody else.
    return any(os.path.isfile(folder / name) for name in FILES)  # noqa: PTH113


def _read(folder: Path) -> RunData:
    if not _is_run(folder):
        raise unreadable(folder, f"it has none of {', '.join(FILES)}")
    plan = read_json(folder / PLAN)
    metrics, noted = (complete_text(folder / name) for name in (METRICS, EVENTS))
    events = [one for one in map(parsed_event, noted.splitlines()) if one]
    lines = [one for one in map(parsed_metrics, metrics.splitlines()) if one]
    begun = [one for one in events if one["event"] in ("start", "resume")]
    starts = np.array([(one["sp"], one["sec"], one["utc"]) for one in begun], np.float64)
    ledger = whole_ledger(folder)
    if (metrics or noted) and not (lines or events or ledger):
        raise unreadable(folder, "no line of its files is of a run of stretto")
    clock = _timed(_rows(lines), starts, is_after=True)
    run = RunData(name_of(folder), "run", _of_ledger(ledger, clock, starts, plan))
    run.series += _of_lines(lines, clock, without={*ledger, *(["batch_size"] if ledger else [])})
    given = [one["facts"] for one in events if isinstance(one.get("facts"), dict)]
    run.events = [
        {**one, "clock": np.array([float(one[unit]) for unit in UNITS])} for one in _fewer(events)
    ]
    facts = given[-1] if given else {}
    run.series = [*planned_series(plan, is_main=False), *run.series]
    known = {name: value for name, value in facts.items() if value is not None}
    run.facts = [[str(name).replace("_", " "), str(value)] for name, value in known.items()]
    run.facts += [["advice", line] for line in advice_lines(folder)]
    run.columns, run.stages = stages_of(plan, run)
    run.settings = settings_of(complete_text(folder / RUN_FILE))
    return run


def settings_of(text: str) -> list[list[str]]:
    r"""Return the names and values in a run file, as a run writes it: a line for each.

    It is not read as YAML, which a foreign file can keep busy.

    >>> settings_of("optimizer:\n  lr: 0.1\nevaluate:\n- every: 1ep\n- every: 5ep\n")
    [['optimizer.lr', '0.1'], ['evaluate.every', '1ep, 5ep']]
    """
    found, above, name = dict[str, list[str]](), list[tuple[int, str]](), ""
    for line in text.splitlines()[:MOST_SETTINGS]:
        if match := _SETTING.fullmatch(line):
            above = [one for one in above if one[0] < len(match[1])] + [(len(match[1]), match[2])]
            name = ".".join(key for _, key in above)
        value = (match[3] or "") if match else line.strip(" -")
        found.setdefault(name, []).append(value)
    texts = {name: ", ".join(filter(None, values)) for name, values in found.items()}
    return [[name, text] for name, text in texts.items() if name not in ("", "folder") and text]


_SETTING = re.compile(r"( *(?:- +)*)([^\s:#-][^:]*):(?: +(.*))?")


def stamp(folder: Path) -> tuple[object, ...]:
    """Return what changes when a file of a run does."""
    found: list[object] = []
    for name in (*FILES, PLAN, RUN_FILE):
        with suppress(OSError):
            at = (folder / name).stat()
            found.append((name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns))
    return tuple(found)


def _of_ledger(
    ledger: Mapping[str, Numbers], known: Numbers, starts: Numbers, plan: Any
) -> list[Series]:
    """Return the series of a ledger; a last point ends each with the last batch."""
    if not ledger or not len(ledger["batch"]):
        return []
    clock = np.full((len(ledger["batch"]) + 1, len(UNITS)), np.nan)
    for unit, name in (("ba", "batch"), ("sp", "sample"), ("tok", "token"), ("sec", "sec")):
        clock[:-1, UNITS.index(unit)] = ledger[name]
    clock[-1, :3] = [
        ledger["batch"][-1] + 1,
        ledger["sample"][-1] + ledger["size"][-1],
        ledger["token"][-1] + ledger["tokens"][-1],
    ]
    known = np.concatenate([np.zeros((1, len(UNITS))), known])
    samples, first = np.unique(known[:, 1], return_index=True)
    for unit in ("ep", "dur", "sec"):
        column = clock[:, UNITS.index(unit)]
        lacks = np.isnan(column) & (clock[:, 1] <= samples[-1])
        column[lacks] = np.interp(clock[lacks, 1], samples, known[first, UNITS.index(unit)])
    size = _number(plan, "dataset_num_samples")
    if size:
        clock[:, UNITS.index("ep")] = clock[:, 1] / size
    clock = _timed(clock, starts, is_after=False)

    def series(name: str, column: str, panel: str, label: str) -> Series:
        values = np.append(ledger[column], ledger[column][-1])
        return Series(name, panel, label, clock, values, step=True)

    found = [
        series("batch_size", "decided_size", "batch_size", PANELS["batch_size"]),
        series("accumulation", "micro_batches", "accumulation", PANELS["accumulation"]),
    ]
    for name in ledger:
        if name not in LEDGER_COLUMNS:
            panel = "lr" if name.partition("@")[0] == "lr" else name
            found.append(series(name, name, panel, show_name(name)))
    return found


def _timed(clock: Numbers, starts: Numbers, *, is_after: bool) -> Numbers:
    """Fill in the time of day: that of the start of the attempt, and the seconds since."""
    if not len(starts) or not len(clock):
        return clock
    # A resume cuts away what came after its position: the last attempt before a row wrote it.
    lowest = np.minimum.accumulate(starts[::-1, 0])[::-1]
    which = np.searchsorted(lowest, clock[:, 1], side="left" if is_after else "right")
    which = np.maximum(which - 1, 0)
    clock[:, 6] = starts[which, 2] + clock[:, 5] - starts[which, 1]
    return clock


def _rows(lines: Sequence[Mapping[str, float]]) -> Numbers:
    rows = [[*(line[unit] for unit in UNITS[:-1]), np.nan] for line in lines]
    return np.array(rows, np.float64).reshape(-1, len(UNITS))


def _of_lines(
    lines: Sequence[Mapping[str, float]], clock: Numbers, *, without: Collection[str]
) -> list[Series]:
    """Return the series of lines of metrics, without what the ledger has for each batch."""
    places: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        for name in line:
            places.setdefault(name, []).append(index)
    found = []
    for name, rows in places.items():
        if name in CLOCK or name in without or name in ENDS:
            continue
        panel = "lr" if name.partition("@")[0] == "lr" else name
        panel, label, unit = KNOWN.get(name, (panel, show_name(name), ""))
        if name.endswith("/loss"):
            panel, label = "loss", f"{name.removesuffix('/loss')} loss"
        values = np.array([lines[row][name] for row in rows], np.float64)
        low, high = (
            np.array([lines[row].get(end, np.nan) for row in rows], np.float64)
            if name == "noise_scale"
            else None
            for end in ENDS
        )
        step = name in ("batch_size", "micro_batch_size")
        found.append(
            Series(name, panel, label, clock[rows], values, step, unit=unit, low=low, high=high)
        )
    return found


def planned_series(plan: Any, *, is_main: bool = True) -> list[Series]:
    """Return the series of a plan, as `plan_record` writes it; none if it is not one.

    Args:
        plan: the plan.
        is_main: whether it is shown alone, and not beside its run.
    """
    try:
        stages, curve = plan["stages"], plan.get("curve") or {}
        ends = [*(stage["first"] for stage in stages), plan["end"] or stages[-1]["end"]]
        if not stages or ends[-1] is None:
            return []
        clock = np.array([_planned_row(one) for one in ends])
        found = [
            Series(key, key, PANELS[key], clock, np.array([*values, values[-1]], float), step=True)
            for key, values in (
                ("batch_size", [stage["size"] for stage in stages]),
                ("accumulation", [stage["accumulation"] for stage in stages]),
            )
        ]
        if curve:
            rows = np.full((len(curve["batch"]), len(UNITS)), np.nan)
            for column, name in enumerate(("batch", "sample", "token")):
                rows[:, column] = curve[name]
            _, first = np.unique(clock[:, 1], return_index=True)
            for column in (3, 4):
                rows[:, column] = np.interp(rows[:, 1], clock[first, 1], clock[first, column])
            for name, values in curve["values"].items():
                panel = "lr" if name.partition("@")[0] == "lr" else name
                here = np.array(values, np.float64).reshape(len(rows))
                found.append(Series(name, panel, show_name(name), rows, here, step=True))
    except UNFIT:
        return []
    if is_main:
        return found
    return [
        replace(one, name=f"planned/{one.name}", label=f"{one.label}, planned", planned=True)
        for one in found
    ]


def _size_text(plan: Mapping[str, Any], stage: Mapping[str, Any]) -> str:
    """Return the batch size of a stage, in samples and in tokens if both are known."""
    size, each = stage["size"], plan.get("tokens_per_sample")
    if stage.get("unit") == "tok":
        return str(Tokens(size))
    return f"{size:,} ({Tokens(size * each)})" if each else f"{size:,}"


def _planned_row(at: Mapping[str, Any]) -> list[float]:
    ep, dur = (_amount(at[unit]) for unit in ("ep", "dur"))
    return [at["batch"], at["sample"], at["token"], ep, dur, np.nan, np.nan]


def _amount(time: str) -> float:
    """Return the number of a time such as `0.5ep`, `1/3dur` or `12%`."""
    number = time.rstrip("epdur%")
    above, _, below = number.partition("/")
    value = float(above) / float(below or 1)
    return value / 100 if time.endswith("%") else value


def plan_data(name: str, plan: Mapping[str, Any]) -> RunData:
    """Return a plan, as `plan_record` writes it, for the page."""
    run = RunData(name, "plan", planned_series(plan))
    run.columns, run.stages = stages_of(plan, run)
    names = ("max_duration", "batch_size", "world_size", "micro_batch_size", "num_batches")
    run.facts = [[name.replace("_", " "), str(plan[name])] for name in names if plan.get(name)]
    return run


def stages_of(plan: Any, run: RunData) -> tuple[Sequence[str], list[list[str]]]:
    """Return the table of stages: of the plan, else of the sizes that the run has had."""
    columns = ["from", "to", "batch size", "micro-batches", "learning rate"]
    try:
        rows = [
            [
                _count(stage["first"]["sample"], "samples"),
                "" if stage["end"] is None else _count(stage["end"]["sample"], "samples"),
                _size_text(plan, stage),
                "?" if stage["accumulation"] is None else f"{stage['accumulation']:,}",
                " to ".join(f"{end:.4g}" for end in _ends(stage["values"].get("lr"))),
            ]
            for stage in plan["stages"]
        ]
    except UNFIT:
        columns, rows = columns[:3], []
        sizes = next((one for one in run.series if one.name == "batch_size"), None)
        if sizes is not None:
            sizes = sizes.thinned(MOST_STAGES)
            samples = sizes.clock[:, 1]
            rows = [
                [_count(start, "samples"), _count(end, "samples"), f"{size:,.0f}"]
                for start, end, size in zip(samples, samples[1:], sizes.values, strict=False)
            ]
    more = len(rows) - MOST_STAGES
    if more > 0:
        rows[MOST_STAGES:] = [[f"and {more:,} more", *[""] * (len(columns) - 1)]]
    return columns, rows


def _ends(values: Mapping[str, float] | None) -> list[float]:
    return [] if not values else list(dict.fromkeys(values.values()))


def _count(number: float, what: str) -> str:
    return f"{number:,.0f} {what}"


def _fewer(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds: dict[str, list[int]] = {}
    for index, one in enumerate(events):
        kinds.setdefault(one["event"], []).append(index)
    kept = [
        index for places in kinds.values() for index in places[:: -(-len(places) // MOST_EVENTS)]
    ]
    return [events[index] for index in sorted(kept)]


def _number(record: Any, name: str) -> float | None:
    found = record.get(name) if isinstance(record, dict) else None
    return found if isinstance(found, int) and found > 0 else None


def show_name(name: str) -> str:
    """Return the readable name of a hyper-parameter or metric.

    >>> show_name("lr"), show_name("lr@head"), show_name("weight_decay")
    ('learning rate', 'learning rate of head', 'weight decay')
    """
    key, _, group = name.partition("@")
    said = {"lr": "learning rate"}.get(key, key.replace("_", " "))
    return f"{said} of {group}" if group else said


def runs_in(folder: Path, known: Collection[Path] = ()) -> list[Path]:
    """Return the run folders in a folder, or itself if it is one.

    Args:
        folder: the folder.
        known: those of an earlier call, whose files are not looked for again.
    """
    if _is_run(folder):
        return [folder]
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    is_there = os.path.isdir
    return [path for path in paths if (is_there(path) if path in known else _is_run(path))]


def newest(paths: Sequence[Path]) -> list[Path]:
    """Return the paths, those whose folders changed last at first."""

    def changed(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:  # it was deleted meanwhile
            return 0.0

    return sorted(paths, key=changed, reverse=True)
