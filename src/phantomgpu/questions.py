"""The next questions: which GPU, how large, what to do about it, and whether it grew."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from phantomgpu import files
from phantomgpu.errors import PhantomError
from phantomgpu.gpus import GIB, GPUS, context_bytes, find_gpu
from phantomgpu.report import NOTHING, Report
from phantomgpu.running import run
from phantomgpu.searching import search

GREW = 5
"""The exit code of `check` if the peak grew by more than the tolerance."""
MOST_KINDS = 3
ALLOCATOR = {
    "expandable_segments:True": "segments that grow leave fewer fragments",
    "roundup_power2_divisions:8": "sizes are rounded, so that blocks are used again",
}
"""Settings of torch's allocator that need no change of a script, and why they help."""
AGAIN = "script folder gpu memory ranks rank steps devices cudnn longest timeout_seconds"
"""What a report has of the command that was run."""

COMPUTED = (
    ("activation checkpointing: activations", "activations", 1),
    ("half the micro-batch, accumulated twice: activations and logits", "activations logits", 0.5),
    ("a loss in 8 chunks: logits", "logits", 7 / 8),
    ("FSDP2 over 8 ranks: model and states", "parameters gradients optimizer", 7 / 8),
    ("8-bit Adam: optimizer state, if it is fp32 now", "optimizer", 3 / 4),
    ("bf16 optimizer state, if it is fp32 now", "optimizer", 1 / 2),
    ("the optimizer's step inside backward: gradients", "gradients", 1),
)
"""What to do, the categories that it makes smaller, and by which share at most."""


class Advice(NamedTuple):
    """What would save memory.

    Attributes:
        saves: Bytes of the peak; of what was tried, of reserved bytes.
        how: "tried" or "computed"; what is computed is the most that it can save.
        text: What to do.
        notes: Those of the report that says so.
    """

    saves: int
    how: str
    text: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.how:<8}  {self.saves / GIB:>6.2f} GiB  {self.text}"


def table(
    command: Sequence[str], *, gpus: Sequence[str], ranks: Sequence[int] = (1,), **how: Any
) -> list[dict[str, Any]]:
    """Find the largest number that fits on each kind of GPU, with each number of ranks.

    Args:
        command: The command, which takes the number.
        gpus: Kinds of GPU.
        ranks: Numbers of ranks.
        how: What else `phantomgpu.search` takes, such as `argument`.
    """
    kinds = [find_gpu(name).key for name in gpus]  # before any of them takes time
    rows: list[dict[str, Any]] = []
    for gpu, shared in product(kinds, ranks):
        found = search(command, gpu=gpu, ranks=shared, details=False, **how)
        known = {"gpu": gpu, "ranks": shared, "largest": found.largest, "then": found.bound}
        rows.append(found.report.row(**known))
    return rows


def cheapest(
    command: Sequence[str], *, gpus: Sequence[str] = tuple(GPUS), **how: Any
) -> list[dict[str, Any]]:
    """Return the smallest kinds of GPU that a command fits; each of them was run.

    The kind with the most memory says what is needed; kinds that have less are not run. Kinds that
    the torch in use has no code for are left out, and the notes name them.

    Args:
        command: The command.
        gpus: The kinds to choose from.
        how: What else `phantomgpu.run` takes.
    """
    kinds = sorted({find_gpu(name) for name in gpus}, key=lambda kind: kind.memory)
    last = run(command, gpu=kinds[-1].key, **how)
    if last.status == "failed":
        raise PhantomError(f"the script failed on {last.gpu}: {last.problem}")
    rows: list[dict[str, Any]] = []
    left: list[str] = []
    for kind in kinds:
        room = kind.memory * GIB - context_bytes(kind) - last.nccl
        if not last.fits or room < last.peak_allocated or len(rows) == MOST_KINDS:
            continue
        report = last if kind is kinds[-1] else run(command, gpu=kind.key, **how)
        if report.fits and report.has_code:
            sizes = {"memory_bytes": report.memory, "peak_bytes": report.peak_allocated}
            rows.append(report.row(gpu=kind.key, **sizes))
        elif report.fits:
            left.append(kind.key)
    said = f"torch {last.torch} has no code for {', '.join(left)}"
    if left and not rows:
        raise PhantomError(f"{said}; use the build for CUDA 12.6, or name others by --gpu")
    for row in rows if left else ():
        row["notes"].append(f"{said}, which would fit: left out")
    return rows


def why(report: dict[str, Any], *, rerun: bool = False) -> list[Advice]:
    """Return what would save memory, the most first.

    It is computed from the report: the most of the peak that it can save.

    Args:
        report: What `phantomgpu run --json` wrote.
        rerun: Try what the allocator can do, too: this runs the command that the report names.

    Raises:
        PhantomError: It is no report with the bytes of a peak.
    """
    has = files.require(report, "no report", categories=dict)["categories"]
    if not has or not all(type(size) is int for size in has.values()):
        raise PhantomError("the report has no bytes at a peak; write it by phantomgpu run --json")
    notes = report.get("notes")
    notes = tuple(map(files.printable, notes)) if isinstance(notes, list | tuple) else ()
    advice = list(_tried(report)) if rerun else []
    for text, parts, share in COMPUTED:
        if not text.startswith("FSDP2") or report.get("ranks") == 1:
            size = sum(has.get(part, 0) for part in parts.split())
            advice.append(Advice(int(size * share), "computed", text, notes))
    return sorted(one for one in advice if one.saves >= GIB // 200 or "it fits" in one.text)[::-1]


def command_line(report: dict[str, Any]) -> str:
    """Return the command that a report names, as a shell takes it and safe to print, or "".

    Raises:
        PhantomError: It is not as `run` writes it.
    """
    if not (again := report.get("again")):
        return ""
    why = "the report cannot be run again"
    files.require(report, why, again=dict, peak_reserved=int, fits=bool)
    files.require(again, why, script=list, folder=str, gpu=str)
    script = again["script"]
    is_command = script and all(isinstance(one, str) for one in script)
    if not is_command or not {*again} <= {*AGAIN.split()}:
        raise PhantomError(f"{why}: it has settings that `run` does not write")
    return files.printable(f"cd {shlex.quote(again['folder'])} && {shlex.join(script)}")


def _tried(report: dict[str, Any]) -> Iterator[Advice]:
    """Run the command of a report with other settings of the allocator."""
    line, how = command_line(report), dict(report.get("again") or {})
    if how.pop("folder", None) != str(Path.cwd()):
        why = f"the report is of a command in another folder: {line}" if line else "it names none"
        raise PhantomError(f"cannot run the command of the report: {why}")
    for setting, text in ALLOCATOR.items():
        try:
            now = run(**how, variables={"PYTORCH_CUDA_ALLOC_CONF": setting})
        except TypeError as error:
            raise PhantomError(f"the report cannot be run again: {error}") from None
        fits = "; it fits" if now.fits and not report["fits"] else ""
        if now.status in ("fits", "does not fit"):
            saves = report["peak_reserved"] - now.peak_reserved
            what = f"PYTORCH_CUDA_ALLOC_CONF={setting}: {text}{fits}"
            yield Advice(saves, "tried", what, now.notes)


class Checked(NamedTuple):
    """What `check` found."""

    report: Report
    grew: int | None
    """Allocated bytes of the peak, more than in the baseline; None: it was not compared."""
    notes: tuple[str, ...]

    def line(self) -> str:
        """Return it in one line."""
        size = f"{abs(self.grew or 0) / GIB:.2f} GiB since the baseline"
        change = f"peak {'grew' if (self.grew or 0) > 0 else 'shrank'} by {size}"
        changes = [] if self.grew is None else [change if self.grew else "peak as in the baseline"]
        return "; ".join([self.report.lines()[0], *changes, *self.notes])


def check(
    command: Sequence[str], *, baseline: Path | None = None, update: bool = False, **how: Any
) -> Checked:
    """Run a command and hold its peak against that of a baseline, which is written if absent.

    Args:
        command: The command.
        baseline: A file with the peak of an earlier check.
        update: Write it again.
        how: What else `phantomgpu.run` takes.

    Raises:
        PhantomError: The baseline is of another GPU or number of ranks, or no baseline; or the
            command allocated nothing.
    """
    before = None
    if baseline is not None and baseline.exists() and not update:
        what = "baseline (write --update)"
        before = files.read_json(baseline, what, peak_allocated=int, torch=str)
        if before["peak_allocated"] <= 0:
            raise PhantomError(f"{baseline} is no {what}: nothing was allocated")
    report = run(command, **how)
    kept = ("gpu", "memory", "ranks", "rank", "torch", "peak_allocated", "peak_reserved")
    now = {name: getattr(report, name) for name in kept}
    if not report.fits:  # the peak is that of a part of the run
        return Checked(report, None, tuple((report.problem or "").splitlines()[:1]))
    if baseline is not None and not report.peak_allocated:
        raise PhantomError(f"cannot be held against {baseline}: {NOTHING}")
    if before is None:
        if baseline is not None:
            files.write(baseline, json.dumps(now, indent=2))
        return Checked(report, None, ("the baseline was written",) * (baseline is not None))
    notes: tuple[str, ...] = ()
    for name in kept[:4]:
        if before.get(name) != now[name]:
            differs = f"{name} is {now[name]}, and {before.get(name)!r} in {baseline}"
            raise PhantomError(f"cannot compare: {differs}; write --update for a new baseline")
    if before.get("torch") != now["torch"]:
        notes += (f"torch is {now['torch']} and was {files.printable(before['torch'])}",)
    return Checked(report, report.peak_allocated - before["peak_allocated"], notes)
