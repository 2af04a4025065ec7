"""The report of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, final

from phantomgpu.gpus import GIB, GPU, OLDEST

Status = Literal["fits", "does not fit", "failed", "cannot run"]


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
            the part after backward, or optimizer.
        step: The optimizer step of that, from 1.
        steps: How many optimizer steps ended.
        peaks_by_step: Most bytes allocated, without what the allocator rounds up, and reserved, in
            each of these steps. The peak of a stage of a batch size ramp is the most of its steps.
        categories: Bytes at that peak: parameters, gradients, optimizer, activations, logits, ...
        places: The largest of the bytes without an owner, by module or by line of code.
        host_pinned: Most bytes of pinned memory of the host.
        nccl: What NCCL takes for its buffers, beside torch's memory: see docs/phantomgpu/ranks.md.
        ranks: The number of ranks.
        rank: The one of them that ran.
        timeline: Bytes of each category over the step of the peak: see docs/phantomgpu/report.md.
        unknown: The lines of the script that read what hangs on floating-point numbers that were
            not computed: a branch or a size there may be another on a real GPU.
        problem: The error that ended the script, if one did.
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
    categories: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    host_pinned: int = 0
    host_managed: int = 0
    nccl: int = 0
    ranks: int = 1
    rank: int = 0
    unknown: tuple[str, ...] = ()
    problem: str | None = None
    notes: tuple[str, ...] = ()
    torch: str = ""
    seconds: float = 0.0
    exit_code: int = 0
    timeline: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.status == "fits"

    @property
    def available(self) -> int:
        """Bytes that torch can reserve."""
        return self.memory - self.context - self.nccl

    def to_json(self) -> str:
        """Return the report as JSON."""
        head = {
            "title": self.lines()[0],
            "limit_bytes": self.available,
            "peak_bytes": self.peak_allocated,
        }
        return json.dumps(
            {**asdict(self), "fits": self.fits, "timeline": {**head, **self.timeline}}
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the report as text."""
        peak = (
            f"peak {_gib(self.peak_allocated)} of {_gib(self.available)} GiB "
            f"(reserved {_gib(self.peak_reserved)})"
        )
        if self.step:
            peak += f", in {self.phase} of step {self.step}"
        rank = f", rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        lines = {
            "fits": [f"fits {self.gpu}{rank}: {peak}"],
            "does not fit": [f"does not fit {self.gpu}{rank}: {peak}"],
            "failed": ["the script failed, but not for lack of memory"],
            "cannot run": ["the script did not run"],
        }[self.status]
        if self.status == "failed" and self.peak_allocated:
            lines.append(f"  until then: {peak}")
        tables = {
            "": self.categories,
            "largest: ": dict(list(self.places.items())[:4]),
            "outside torch: ": {"context": self.context, "NCCL": self.nccl} if self.nccl else {},
            "on the host: ": {"pinned": self.host_pinned, "managed": self.host_managed},
        }
        lines += [f"  {name}{table}" for name, sizes in tables.items() if (table := _table(sizes))]
        if self.problem:
            lines.append(f"  {self.problem.splitlines()[0][:400]}")
        return [*lines, *(f"  note: {note}" for note in self.notes)]


def build_report(result: dict[str, Any], kind: GPU, **known: Any) -> Report:
    """Return the report of what a process wrote."""
    names = set(Report.__dataclass_fields__) - set(known)
    values = {name: value for name, value in result.items() if name in names}
    return Report(**values, **known, notes=tuple(_notes(result, kind, known)))


def _notes(result: dict[str, Any], kind: GPU, known: dict[str, Any]) -> list[str]:
    notes: list[str] = []
    if "+cu13" in result.get("torch", "") and kind.capability < OLDEST:
        notes.append(
            f"torch for CUDA 13 has no code for {known['gpu']}: on a real one, this script needs "
            "the build for CUDA 12.6; code for a T4 was counted"
        )
    if places := result.get("unknown"):
        more = f" and {len(places) - 12} more (--json)" if len(places) > 12 else ""
        notes.append(
            "numbers that hang on large floating-point tensors are random; they were read at "
            f"{', '.join(places[:12])}{more}: branches and sizes there may differ on a GPU"
        )
    if result["status"] in ("failed", "cannot run"):
        return notes
    if not result.get("cudnn"):
        notes.append("cuDNN is off: convolutions and RNNs run through torch's own kernels")
    if known["ranks"] > 1 or result.get("distributed"):
        notes.append(
            "other ranks are not there: what this rank gathers are its own values; NCCL's buffers "
            "are counted as on A100 with NVLink, and other machines differ"
        )
    names = ("cuSOLVER's Xgeev (assumed: four matrices)", "cuFFT (0)", "cuSPARSE (0)")
    if seen := [name for bit, name in enumerate(names) if result.get("assumed", 0) >> bit & 1]:
        notes.append(f"workspaces are not known, and assumed, of {', '.join(seen)}")
    if result.get("compiled"):
        notes.append("whole numbers that compiled code computes are zero, like other results")
    if stopped := result.get("stopped"):
        notes.append(
            f"it was ended after step {result['steps']}, at {stopped}: evaluation, longer batches "
            "and all else that comes later were not seen; --whole runs the script to its end"
        )
    if not result.get("steps"):
        notes.append("no optimizer step ended")
    if result["status"] == "fits" and result.get("out_of_memory"):
        notes.append("the script ran out of memory, caught the error and continued")
    return notes


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _table(sizes: dict[str, int]) -> str:
    return "  ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size >= GIB // 200)
