"""What took the memory: the blocks that are live at the peak, from torch's own history."""

from __future__ import annotations

import contextlib
import gc
import re
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

Event = dict[str, Any]
_Points = dict[int, tuple[Counter[str], Counter[str]]]
"""Of a step: bytes of categories, and of places, by time."""
_SKIPPED = ("/torch/", "torchinductor", "<frozen", "<string>", "importlib", "/phantomgpu/")
_LOSSES = ("cross_entropy", "lossfunction", "_loss", "loss_fn")
_OWNED = ("parameters", "gradients", "optimizer", "buffers", "workspaces")
_SAVES = r"save(_pretrained|_model|_checkpoint|_state|_adapter)?|(?!.*load).*state_dict"
_PHASES = {
    "generation": re.compile(":generate$", re.MULTILINE),
    "save": re.compile(f":({_SAVES})$", re.MULTILINE),
    "clipping": re.compile("clip_grad.py:"),
    "recomputation": re.compile("checkpoint.py:.*recompute"),
}
"""Phases by a file and function that is active, in this order."""
_EVALUATES = {"evaluate", "evaluation_loop", "prediction_step", "validation_step", "test_step"}
"""Names of functions; most evaluations are known by the mode of gradients instead."""
_LARGE = 1 << 20
MOST_STEPS, MOST_PLACES = 8, 8
"""Of the steps that the timeline has beside that of the peak, and of what is largest in one."""
_WORKSPACES = (32 << 20, 8_519_680)
"""Of cuBLAS, on Hopper and on others: torch allocates them once and never frees them."""


@dataclass
class History:
    """What was seen of a run: phases with their steps, and which addresses belong to whom."""

    phases: list[tuple[int, str, int]] = field(default_factory=list)
    owners: list[tuple[int, str, set[int]]] = field(default_factory=list)
    modes: list[tuple[int, str]] = field(default_factory=list)
    """Where the script turned gradients off ("no_grad", "evaluation") and on again ("")."""


_OURS = "phantomgpu/values.py", "torch/_dynamo/eval_frame.py"
"""Files of frames between an operation and torch's own kernel."""


def analyse(
    seen: History, traces: list[list[Event]], peaks: Callable[[int], dict[str, int]]
) -> dict[str, Any]:
    """Return what the report says of memory as plain values, from traces and peaks of devices."""
    for trace in traces:
        follow(trace)
    device = max(range(len(traces)), key=lambda one: most(traces[one], "used"), default=0)
    trace = traces[device] if traces else []
    annotate(seen, trace)
    owned, now = tensors_now() if trace else [], time.time_ns() // 1000
    categorise(trace, [*seen.owners, *((now, what, found) for what, found in owned)])
    at = max(range(len(trace)), key=lambda one: trace[one]["used"], default=0)
    categories: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for block in (one for one in trace[: at + 1] if one.get("end", 0) > at):
        categories[block["category"]] += block["size"]
        if block["category"] not in _OWNED:
            places[place(block)] += block["size"]
    highest = peaks(device)
    return {
        "device": device,
        "peak_allocated": max(most(trace, "used"), highest["allocated_bytes.all.peak"]),
        "peak_reserved": max(most(trace, "held"), highest["reserved_bytes.all.peak"]),
        "phase": trace[at]["phase"] if trace else "start",
        "step": trace[at]["step"] if trace else 0,
        "categories": dict(categories.most_common()),
        "places": dict(places.most_common(12)),
        "peaks_by_phase": peaks_by_phase(trace),
        "peaks_by_step": peaks_by_step(seen, trace) if trace else [],
        "out_of_memory": highest["num_ooms"],
        "timeline": timeline(trace, at) if trace else {},
    }


def is_distributed() -> bool:
    """Return whether the script has joined a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def line_of(frame: FrameType | None) -> tuple[str, str]:
    """Return the line of the script that runs, and the line of torch that it has called."""
    inner = ""
    while frame is not None:
        file = frame.f_code.co_filename
        line = f"{Path(file).name}:{frame.f_lineno}"
        if "/torch/" not in file and not file.startswith((str(Path(__file__).parent), "<")):
            return line, inner
        if "/torch/" in file and not file.endswith(
            ("/_ops.py", "/_tensor.py", "_contextlib.py", "/eval_frame.py")
        ):
            inner = inner or line
        frame = frame.f_back
    return "backward", inner  # autograd's thread has no frame of the script


def follow(trace: list[Event]) -> None:
    """Add to each event the bytes allocated and reserved after it; blocks get their ends."""
    used = held = 0
    live: dict[int, Event] = {}
    for index, event in enumerate(trace):
        action, size = event["action"], event["size"]
        if action == "alloc":
            live[event["addr"]] = event
            event["end"] = len(trace)
            used += size
        elif action == "free_completed" and event["addr"] in live:
            block = event["frees"] = live.pop(event["addr"])
            block["end"] = index
            used -= block["size"]
        elif action in ("segment_alloc", "segment_map"):
            held += size
        elif action in ("segment_free", "segment_unmap"):
            held -= size
        event["used"], event["held"] = used, held


def most(trace: list[Event], what: str) -> int:
    """Return the most bytes "used" or "held"."""
    return max((event[what] for event in trace), default=0)


def annotate(seen: History, trace: list[Event]) -> None:
    """Add to each event its phase and step."""
    phases = [(0, "start", 0), *seen.phases]
    backward: dict[int, int] = {}
    """When backward ended last, by the index of the phase."""
    for event in trace:
        at = bisect(phases, event["time_us"], key=itemgetter(0)) - 1
        # Kernels that are computed run in Python. Segments that `empty_cache` frees have no frames.
        frames = [f for f in event.get("frames", ()) if not f["filename"].endswith(_OURS)]
        event |= {"frames": frames, "step": phases[at][2], "at": at}
        event["phase"] = phases[at][1] if phases[at][1] != "step" else phase_in_step(seen, event)
        if event["phase"] == "backward" and event["action"] == "alloc":
            backward[at] = event["time_us"]
    for event in trace:
        until = backward.get(event["at"], event["time_us"])
        is_over = event["time_us"] > until and event["at"] + 1 < len(phases)
        if event["phase"] == "forward" and is_over and phases[event["at"] + 1][1] == "optimizer":
            event["phase"] = "the part after backward"


def phase_in_step(seen: History, event: Event) -> str:
    """Return what was done in a step, outside of the optimizer, when something was allocated."""
    frames = event["frames"]
    active = "\n".join(f"{f['filename']}:{f['name']}" for f in frames)
    for phase, pattern in _PHASES.items():
        if pattern.search(active):
            return phase
    if not frames or any("autograd/graph.py" in f["filename"] for f in frames[:30]):
        return "backward"
    if not _EVALUATES.isdisjoint(f["name"] for f in frames):
        return "evaluation"
    at = bisect(seen.modes, event["time_us"], key=itemgetter(0))
    return (at and seen.modes[at - 1][1]) or "forward"


def peaks_by_step(seen: History, trace: list[Event]) -> list[tuple[int, ...]]:
    """Return the most bytes allocated and reserved in each optimizer step that ended.

    Each begins with what is there at the end of the one before, as after torch's
    `reset_peak_memory_stats`.
    """
    ended = max(step for _, _, step in seen.phases) - 1
    peaks: list[tuple[int, ...]] = []
    before = 0, 0
    for event in trace:
        now, step = (event["used"], event["held"]), max(event["step"], 1)
        peaks += [before] * (step - len(peaks))  # a replayed CUDA graph has no events
        peaks[step - 1] = tuple(map(max, peaks[step - 1], now))
        before = now
    return [*peaks, *[before] * (ended - len(peaks))][:ended]


def peaks_by_phase(trace: list[Event]) -> dict[str, int]:
    """Return the most bytes allocated in each phase that allocated something."""
    peaks: Counter[str] = Counter()
    for event in trace:
        if event["action"] == "alloc":
            peaks[event["phase"]] = max(peaks[event["phase"]], event["used"])
    return dict(peaks.most_common())


def timeline(trace: list[Event], at: int, most: int = 2000) -> dict[str, Any]:
    """Return bytes over the step of the peak, and over others (docs/phantomgpu/report.md).

    Of events that share a point, the one with the most bytes is kept.
    """
    steps = [one["step"] for one in trace]
    sizes, main = Counter(steps), steps[at]
    shown = {main, *list(sizes)[:: -(-len(sizes) // MOST_STEPS)]}
    widths = {step: 1 + sizes[step] // (most if step == main else -(-most // 8)) for step in shown}
    points: dict[int, _Points] = defaultdict(dict)
    marks: dict[int, dict[str, int]] = defaultdict(dict)
    now, large, first = Counter[str](), Counter[str](), {step: steps.index(step) for step in shown}
    marks[main]["peak"] = at - first[main]
    for index, (event, step) in enumerate(zip(trace, steps, strict=True)):
        block = event if "end" in event else event.get("frees")
        if block is not None:
            size = block["size"] * (1 if block is event else -1)
            now[block["category"]] += size
            if abs(size) >= _LARGE and block["category"] not in _OWNED:
                if block is event:
                    event["place"] = place(event)
                large[block["place"]] += size
        if step in shown:
            if event["action"] == "alloc":
                marks[step].setdefault(event["phase"], index - first[step])
            point = (index - first[step]) // widths[step]
            if point not in points[step] or now.total() > points[step][point][0].total():
                points[step][point] = now.copy(), large.copy()
    made = {one: _drawn(one, widths[one], points[one], marks[one]) for one in sorted(shown)}
    return {**made.pop(main), "others": list(made.values())}


def _drawn(step: int, width: int, points: _Points, marks: dict[str, int]) -> dict[str, Any]:
    """Return a step as plain values: categories from below, and what is largest at some time."""
    categories, places = (list(both) for both in zip(*points.values(), strict=True))
    names = sorted(categories[-1], key=lambda one: min(counts[one] for counts in categories))[::-1]
    most = Counter[str]()
    for counts in places:
        most |= counts
    largest = [name for name, _ in most.most_common(MOST_PLACES)]
    texts = {"peak": "peak", "backward": "backward", "optimizer": "optimizer step"}
    shown = [(marks[name], text) for name, text in texts.items() if name in marks]
    return {
        "step": step,
        "times": [point * width for point in points],
        "categories": [{"name": one, "bytes": [n[one] for n in categories]} for one in names],
        "places": [{"name": one, "bytes": [n[one] for n in places]} for one in largest],
        "marks": [{"at": at // width, "text": text} for at, text in shown],
    }


def tensors_now() -> list[tuple[str, set[int]]]:
    """Return where parameters, gradients, buffers and optimizer states are now."""
    found: dict[str, set[int]] = defaultdict(set)
    for one in gc.get_objects():
        bases = type(one).__mro__
        if torch.nn.Module in bases:
            # Not `one.buffers`, which is a list in Megatron's DistributedDataParallel.
            parameters = list(torch.nn.Module.parameters(one, recurse=False))
            found["parameters"] |= addresses(parameters)
            found["gradients"] |= addresses(p.grad for p in parameters)
            found["buffers"] |= addresses(torch.nn.Module.buffers(one, recurse=False))
        elif torch.optim.Optimizer in bases:
            groups = getattr(one, "param_groups", ())  # wrappers of optimizers may have none
            parameters = [p for group in groups for p in group["params"]]
            found["parameters"] |= addresses(parameters)
            found["gradients"] |= addresses(p.grad for p in parameters)
            states = getattr(one, "state", {}).values()
            states = [state for state in states if isinstance(state, dict)]
            found["optimizer"] |= addresses(t for state in states for t in state.values())
    return list(found.items())


def addresses(tensors: Any) -> set[int]:
    """Return where the memory of tensors begins, looking into subclasses and sparse tensors."""
    found: set[int] = set()
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        inner = getattr(tensor, "__tensor_flatten__", None)
        if inner is not None:
            found |= addresses(getattr(tensor, name) for name in inner()[0])
        elif tensor.layout == torch.sparse_coo:
            plain = tensor.detach()
            found |= addresses((plain.indices(), plain.values()) if plain.is_coalesced() else ())
        elif tensor.is_cuda and not torch.nn.parameter.is_lazy(tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # without storage
                found.add(tensor.untyped_storage().data_ptr())
    return found


def categorise(trace: list[Event], owners: list[tuple[int, str, set[int]]]) -> None:
    """Add to each block its category."""
    known: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for when, what, found in owners:
        for address in found:
            known[address].append((when, what))
    blocks = [one for one in trace if "end" in one]
    logits = {one["size"] for one in blocks if one["size"] >= _LARGE and is_loss(one)}
    for block in blocks:
        is_kept = block["end"] == len(trace)
        until = 1 << 62 if is_kept else trace[block["end"]]["time_us"]
        owned = known.get(block["addr"], ())
        owner = next((what for when, what in owned if block["time_us"] <= when <= until), None)
        if owner is None and block["size"] in _WORKSPACES and is_kept:
            owner = "workspaces"
        block["category"] = owner or category(block, logits)


def category(event: Event, logits: set[int]) -> str:
    """Return what a block is that belongs to no parameter, gradient or optimizer."""
    if is_loss(event) or event["size"] in logits:
        return "logits"
    if event["phase"] in ("optimizer", "clipping", "the part after backward"):
        return "scratch of the optimizer"
    return "scratch of the backward" if event["phase"] == "backward" else "activations"


def is_loss(event: Event) -> bool:
    """Return whether a block was allocated inside a loss function."""
    names = "\n".join(frame["name"].lower() for frame in event["frames"][:12])
    return any(part in names for part in _LOSSES)


def place(event: Event) -> str:
    """Return the line of code that a block was allocated in."""
    for frame in event["frames"]:
        if not any(part in frame["filename"] for part in _SKIPPED):
            return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
    return "torch" if event["frames"] else "backward"
