"""The report of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, final

from phantomgpu.bound import bound_of, line_of
from phantomgpu.gpus import GIB, GPU, OLDEST

UNTRAINED = {"evaluation", "generation", "save", "no_grad"}
"""Phases that belong to no step of an optimizer."""
Status = Literal["fits", "does not fit", "failed"]
RAN_OUT = "out of memory once"
NOTHING = "the script used no memory of the GPU; choose it, as by its option --device cuda"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run took of the memory of one device. All sizes are bytes.

    Attributes:
        status: Whether the run fits; "failed" if the script failed for another reason.
        gpu: The kind of GPU.
        memory: What a program sees of the device.
        context: What the process takes of that beside torch's memory.
        peak_allocated: Most bytes that tensors had at a time.
        peak_reserved: Most bytes that torch had of the device.
        phase: When the peak of `peak_allocated` was: forward, backward, recomputation, clipping,
            the part after backward, optimizer, evaluation, generation, save, or no_grad (other code
            without gradients).
        step: The optimizer step of that, from 1.
        steps: How many optimizer steps ended.
        peaks_by_step: Most bytes allocated, without what the allocator rounds up, and reserved, in
            each of these steps. The peak of a stage of a batch size ramp is the most of its steps.
        peaks_by_phase: Most bytes allocated in each phase.
        categories: Bytes at that peak: parameters, gradients, optimizer, activations, logits, ...
        places: The largest of the bytes without an owner, by module or by line of code.
        host_pinned: Most bytes of pinned memory of the host.
        nccl: What NCCL takes for its buffers, beside torch's memory: see docs/phantomgpu/ranks.md.
        ranks: The number of ranks.
        rank: The one of them that ran.
        peers: The ranks that it sent to or received from: its neighbours in a pipeline.
        stages: Of each rank that ran: its number, and the peaks of allocated and reserved bytes.
        timeline: Bytes of each category over the step of the peak: see docs/phantomgpu/report.md.
        bound: The least seconds of the last step on that kind of GPU, with what they are made of:
            see docs/phantomgpu/time.md.
        unknown: The lines of the script that read what hangs on floating-point numbers that were
            not computed.
        decides: Those of them where a branch or the size of a tensor hangs on these numbers, as far
            as can be seen: sizes, masks, whole numbers.
        limit: The seconds after which a whole run was ended.
        again: The command that was run, its folder and how; empty for a function.
        problem: The error that ended the script, if one did.
        doubts: What the first line says in brackets: why a whole run may need more.
        has_code: Whether the torch in use has code for that kind of GPU.
        notes: What the figures do not contain.
    """

    status: Status
    gpu: str
    memory: int
    context: int
    peak_allocated: int = 0
    peak_reserved: int = 0
    phase: str = "start"
    step: int = 0
    steps: int = 0
    peaks_by_step: list[tuple[int, ...]] = field(default_factory=list)
    peaks_by_phase: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    host_pinned: int = 0
    host_managed: int = 0
    nccl: int = 0
    ranks: int = 1
    rank: int = 0
    peers: list[int] = field(default_factory=list)
    stages: list[tuple[int, int, int]] = field(default_factory=list)
    unknown: tuple[str, ...] = ()
    decides: tuple[str, ...] = ()
    limit: float | None = None
    again: dict[str, Any] = field(default_factory=dict, repr=False)
    problem: str | None = None
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    has_code: bool = True
    torch: str = ""
    seconds: float = 0.0
    bound: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0
    timeline: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.status == "fits"

    @property
    def depends_on_values(self) -> bool:
        """Whether a branch or the size of a tensor hung on numbers that were not computed."""
        return bool(self.decides)

    @property
    def in_doubt(self) -> str:
        """What the first line says behind the status and the kind, in brackets."""
        doubts = ["depends on values"] * self.depends_on_values + [*self.doubts]
        return f" ({', '.join(doubts)})" if doubts else ""

    def row(self, **known: Any) -> dict[str, Any]:
        """Return a row of a table: what is known of it, what was reserved, and the notes."""
        return {**known, "reserved_bytes": self.peak_reserved, "notes": [*self.notes]}

    @property
    def available(self) -> int:
        """Bytes that torch can reserve."""
        return self.memory - self.context - self.nccl

    def to_json(self) -> str:
        """Return the report as JSON."""
        head: dict[str, Any] = {"title": self.lines()[0], "limit_bytes": self.available}
        head |= {"peak_bytes": self.peak_allocated}
        head |= {"time": line_of(self.bound) if self.bound else ""}
        said = {"fits": self.fits, "depends_on_values": self.depends_on_values}
        return json.dumps({**asdict(self), **said, "timeline": {**head, **self.timeline}})

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the report as text."""
        peak = (
            f"peak {_gib(self.peak_allocated)} of {_gib(self.available)} GiB "
            f"(reserved {_gib(self.peak_reserved)})"
        )
        if self.step:
            after = f"after step {self.step - 1}" if self.step > 1 else "before step 1"
            during = after if self.phase in UNTRAINED else f"of step {self.step}"
            peak += f", in {self.phase} {during}"
        if self.limit is not None:
            peak += f", in the first {self.limit:g} seconds"
        rank = f", rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        lines = [f"{self.status} {self.gpu}{self.in_doubt}{rank}: {peak}"]
        if self.status == "failed":
            lines = ["the script failed, but not for lack of memory"]
            lines += [f"  until then: {peak}"] * bool(self.peak_allocated)
        tables = {
            "": self.categories,
            "most in: ": {} if UNTRAINED.isdisjoint(self.peaks_by_phase) else self.peaks_by_phase,
            "largest: ": dict(list(self.places.items())[:4]),
            "outside torch: ": {"context": self.context, "NCCL": self.nccl} if self.nccl else {},
            "on the host: ": {"pinned": self.host_pinned, "managed": self.host_managed},
        }
        lines += [
            f"  rank {rank}: peak {_gib(allocated)} GiB (reserved {_gib(reserved)})"
            for rank, allocated, reserved in self.stages
        ]
        if self.bound and self.status in ("fits", "does not fit"):
            lines.append(f"  {line_of(self.bound)}")
        lines += [f"  {name}{table}" for name, sizes in tables.items() if (table := _table(sizes))]
        if self.problem:
            lines.append(f"  {self.problem.splitlines()[0][:400]}")
        return [*lines, *(f"  note: {note}" for note in self.notes)]


def build_report(result: dict[str, Any], kind: GPU, **known: Any) -> Report:
    """Return the report of what a process wrote."""
    names = set(Report.__dataclass_fields__) - set(known)
    values = {name: value for name, value in result.items() if name in names}
    if (work := result.get("work")) and (bound := bound_of(work, kind))["seconds"]:
        values["bound"] = bound
    values["has_code"] = not ("+cu13" in result.get("torch", "") and kind.capability < OLDEST)
    doubts = _doubts(result) if result["status"] == "fits" else {}
    values["doubts"] = tuple(doubts)
    notes = [*_notes(result, known, has_code=values["has_code"]), *doubts.values()]
    return Report(**values, **known, notes=tuple(notes))


def _doubts(result: dict[str, Any]) -> dict[str, str]:
    """Return why a run that fits may not be what a whole one would be, each with its note."""
    found: dict[str, str] = {}
    if result.get("out_of_memory") or result.get("assumed", 0) & 16:  # torch counts only its own
        found[RAN_OUT] = "the script ran out of memory, caught the error and continued"
    if (idle := result.get("idle", 0)) > result.get("steps", 0):
        found["steps without the GPU"] = f"{idle} optimizer steps without the GPU are not counted"
    if result.get("assumed", 0) & 8:
        what = (
            "the script called a function of CUDA that is not here, caught the error and continued"
        )
        found["an error was caught"] = what
    if grew := result.get("grew"):
        what = f"the memory grew by {grew / 2**20:.3g} MiB in step {result['steps']}"
        found["still growing"] = f"{what}, the last that was seen; --whole shows how far"
    if waiting := result.get("waiting"):
        few = f"few steps of {', '.join(waiting)}"
        found[few] = f"{few} were seen, which has weights of its own; --whole runs to the end"
    found |= result.get("others", {})
    return found


def _notes(result: dict[str, Any], known: dict[str, Any], *, has_code: bool) -> list[str]:
    notes: list[str] = []
    if not has_code:
        notes.append(
            f"torch for CUDA 13 has no code for {known['gpu']}: on a real one, this script needs "
            "the build for CUDA 12.6; code for a T4 was counted"
        )
    decides = result.get("decides", [])
    others = [one for one in result.get("unknown", []) if one not in decides]
    for places, what in (
        (decides, "branches and sizes there may differ on a GPU"),
        (others, "if a branch hangs on them, it may differ on a GPU"),
    ):
        more = f" and {len(places) - 12} more (--json)" if len(places) > 12 else ""
        read = f"read at {', '.join(places[:12])}{more}"
        if places:
            notes.append(f"numbers that hang on large tensors, {read}: {what}")
    if result["status"] == "failed":
        return notes
    if not result.get("cudnn"):
        notes.append("cuDNN is off: convolutions and RNNs run through torch's own kernels")
    if known["ranks"] > 1 or result.get("distributed"):
        notes.append(
            "other ranks are not there: what this rank gathers are its own values; NCCL's buffers "
            "are counted as on A100 with NVLink, and other machines differ"
        )
    names = ("cuSOLVER's Xgeev (four matrices)", "cuFFT (as the data; 1D: 0)", "cuSPARSE (0)")
    if seen := [name for bit, name in enumerate(names) if result.get("assumed", 0) >> bit & 1]:
        notes.append(f"workspaces are not known, and assumed, of {', '.join(seen)}")
    if result.get("computes") is False:
        notes.append("no values are computed: torch before 2.10 does not allow it; all are zero")
    if result.get("compiled"):
        notes.append("whole numbers that compiled code computes are zero, like other results")
    notes += [f"longest samples in each batch: {one}" for one in result.get("longest", [])]
    notes += _unseen(result)
    if not result.get("steps"):
        notes.append("no optimizer step ended")
    return notes


def _unseen(result: dict[str, Any]) -> list[str]:
    """Return what a report says of the parts of a script that it did not see."""
    stopped, limit = result.get("stopped"), result.get("limit")
    if stopped and limit is not None:
        end = f"after {limit:g} seconds, in step {result['steps'] + 1}, at {stopped}"
        return [f"it was ended {end}; write --timeout {2 * limit:g} to see more"]
    if stopped:
        end = f"after step {result['steps']}, at {stopped}"
        later = "evaluation, longer batches and all else that comes later were not seen"
        return [f"it was ended {end}: {later}; --whole runs the script to its end"]
    unseen = sorted(UNTRAINED - {"no_grad"} - {*result.get("peaks_by_phase", {})})
    return [f"nothing was allocated in {', '.join(unseen)}"] if unseen else []


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _table(sizes: dict[str, int]) -> str:
    return "  ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size >= GIB // 200)
