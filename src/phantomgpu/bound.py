"""The least seconds that a step can take: what its kernels compute and move, over a kind's peaks.

Kernels of one stream run one after another, and each of them at the peak of the multiprocessors or
of the memory; communication may overlap with them. A real step takes longer, by the ratio that
docs/phantomgpu/time.md measured.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import weakref
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from phantomgpu.gpus import GPU

if TYPE_CHECKING:
    import torch

PUBLISHED = (0.2, 0.6)
"""The shares of this bound that published runs reached (docs/phantomgpu/time.md)."""
BOOST = 1.2
"""GeForce cards clock higher than their data sheet says: up to about 3 of 2.5 GHz."""
SMALLEST = 2 << 20
"""Bytes that fit into the cache of every kind, so that they are not counted."""
MOST_CALLS = 20_000
"""Of a step, so many different calls are counted."""
_LINKS = ("inside", "between")
# Kernels with such names read or write a part of an argument only.
_PARTLY = (
    "embedding index gather scatter take masked nll_loss where tril triu conv pool upsample slice "
    "grid_sampler select unfold im2col"
)
_LIKE = {"_addmm_activation": "addmm", "_int_mm": "mm"}
_VARIED = ("cum_seq_q", "cu_seqlens_q", "window_size_left", "window_size")


class Work:
    """What the kernels of this process compute and move, step by step."""

    def __init__(self, library: ctypes.CDLL) -> None:
        from phantomgpu.values import leaves

        self.leaves, self.formulas = leaves, formulas()
        self.links = [ctypes.c_double.in_dll(library, f"phantom_{one}") for one in _LINKS]
        self.flops: dict[Any, float] = {}
        self.last: dict[str, Any] = {}
        self.is_busy = False
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.calls: Counter[tuple[Any, ...]] = Counter()
        self.tokens: Counter[torch.Size] = Counter()
        self.embedded: tuple[weakref.ref[torch.UntypedStorage] | None, set[int]] = None, set()
        self.crossed = [one.value for one in self.links]

    def end(self) -> None:
        """Keep what the step did that ended, and begin the next one."""
        moved = [now.value - then for now, then in zip(self.links, self.crossed, strict=True)]
        self.last = {
            "calls": [[*call, count] for call, count in self.calls.items()],
            "tokens": max(self.tokens.values(), default=0),
            **dict(zip(_LINKS, moved, strict=True)),
        }
        self.begin()

    def add(self, kernel: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count a call of a kernel."""
        tensors = [one for one in self.leaves((args, kwargs)) if one.is_cuda]
        outs = self.leaves(out)
        if kernel.base == "index_select" and tensors[0].numel() > SMALLEST:
            self.embed(*tensors[:2])
        flops = self.flops_of(kernel, args, kwargs, out) if kernel.multiplies else 0
        is_large = sum(one.nbytes for one in (*tensors, *outs)) > SMALLEST
        if not (flops or is_large) or len(self.calls) > MOST_CALLS:
            return
        import torch

        targets = kernel.targets(args, kwargs) if is_large else []
        read, written = moved(kernel, targets, tensors, outs) if is_large else (0, 0)
        stream = torch.cuda.current_stream().cuda_stream
        unit = unit_of(kernel.base, tensors[0].dtype) if flops else ""
        self.calls[stream, class_of(kernel), unit, flops, read, written] += 1

    def embed(self, weight: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count tokens, which a table turns into vectors; other tables do not make them more."""
        storage = tokens.untyped_storage()
        same, weights = self.embedded
        if same is None or same() is not storage or weight.data_ptr() in weights:
            self.tokens[weight.shape] += tokens.numel()
            weights = set()
        self.embedded = weakref.ref(storage), weights | {weight.data_ptr()}

    def flops_of(self, kernel: Any, args: Any, kwargs: Any, out: Any) -> float:
        """Return floating-point operations by torch's formulas; causal attention needs half."""
        base, shapes = kernel.base, [one.shape for one in self.leaves((args, kwargs, out))]
        given = dict(zip(kernel.names, args, strict=False)) | kwargs
        if any(given.get(one) is not None for one in _VARIED):
            return 0  # lengths that lie on the device, or a window
        half = bool(given.get("is_causal") or given.get("custom_mask_type"))
        key = base, half, *shapes
        if key not in self.flops:
            self.flops[key] = 0
            with suppress(Exception):  # an overload that the formula does not know
                self.flops[key] = self.computed(base, args, kwargs, out) / (1 + half)
        return self.flops[key]

    def computed(self, base: str, args: Any, kwargs: Any, out: Any) -> float:
        """Return what torch's formula says of a call."""
        if base.endswith("grouped_mm"):
            one, other = args[:2]
            both = one.dim() == other.dim() == 2  # its groups share what is summed
            pairs: int = out.shape[-2] * out.shape[-1] if both else out.numel()
            return 2.0 * pairs * int(one.shape[-1])
        if "conv" in base and "backward" not in base:
            args = *args[:2], None, None, None, None, "transpose" in base
            base, kwargs = "convolution", {}
        return float(self.formulas[base](*args, **kwargs, out_val=out))


def formulas() -> dict[str, Any]:
    """Return torch's formulas of floating-point operations by the names of kernels."""
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # "triton not found"
    has_triton = "triton" in sys.modules
    if not has_triton:  # its import takes 0.2 seconds, for formulas that a script registers
        sys.modules["triton"] = None  # type: ignore[assignment]
    from torch.utils.flop_counter import flop_registry

    if not has_triton:
        del sys.modules["triton"]
    found = {getattr(one, "__name__", ""): each for one, each in flop_registry.items()}
    return found | {ours: found[theirs] for ours, theirs in _LIKE.items()}


def multiplies(base: str) -> bool:
    """Return whether a kernel may have a formula."""
    return base in _LIKE or any(part in base for part in ("mm", "conv", "attention"))


def moved(
    kernel: Any,
    targets: list[torch.Tensor],
    tensors: list[torch.Tensor],
    outs: list[torch.Tensor],
) -> tuple[float, float]:
    """Return the bytes that a kernel must read and write, each of a storage once."""
    base = kernel.base
    overwrites = kernel.overwrites or base in ("copy_", "_foreach_zero_", "_foreach_copy_")
    if base.startswith("_f"):  # lists of tensors; gradients are among the targets, but not written
        all_, changed = (sum(one.nbytes for one in some) for some in (tensors, targets))
        written = changed / 2 if base.startswith("_fused") else changed
        return all_ - changed * overwrites, written + sum(one.nbytes for one in outs)
    where = {one.data_ptr() for one in targets}
    is_partly = any(part in base for part in _PARTLY.split())
    fresh = [one for one in outs if one.data_ptr() not in where]
    read = [] if is_partly else [one for one in tensors if one.data_ptr() not in where]
    if is_partly and not kernel.is_out:
        targets = []
    elif not overwrites:
        read += targets
    return size_of(read), size_of([*fresh, *targets])


def size_of(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of tensors, what they share once."""
    sizes: Counter[int] = Counter()
    wholes: dict[int, int] = {}
    for one in tensors:
        storage = one.untyped_storage()
        sizes[storage.data_ptr()] += one.nbytes
        wholes[storage.data_ptr()] = storage.nbytes()
    return sum(min(size, wholes[where]) for where, size in sizes.items())


def unit_of(base: str, kind: torch.dtype) -> str:
    """Return which of a GPU's units multiplies."""
    import torch

    if kind == torch.float32:
        with suppress(RuntimeError):  # settings of two kinds, old and new
            exact = torch.get_float32_matmul_precision() == "highest"
            return "single" if exact and "mm" in base else "tf32"
    return {1: "byte", 2: "half", 4: "tf32"}.get(kind.itemsize, "single")


def class_of(kernel: Any) -> str:
    """Return the class of a kernel, as the report names it."""
    base = kernel.base
    for part, name in (("attention", "attention"), ("conv", "convolutions"), ("_f", "optimizer")):
        if base.startswith(part) if part == "_f" else part in base:
            return name
    return "matrix products" if kernel.multiplies else "other kernels"


def bound_of(work: dict[str, Any], kind: GPU) -> dict[str, Any]:
    """Return the least seconds of a step on a kind of GPU, and what they are made of."""
    boost = BOOST if "GeForce" in kind.name else 1.0
    half, cache = kind.half * boost * 1e12, kind.cache << 20
    single = kind.single * boost * 1e12
    tensor = half / 2 if kind.capability >= (8, 0) else single
    byte = half * (4 if "GeForce" in kind.name else 2)
    speeds = {"half": half, "tf32": max(tensor, single), "single": single, "byte": byte, "": 1.0}
    streams: Counter[int] = Counter()
    classes: Counter[str] = Counter()
    totals = [0.0, 0.0, 0.0]
    for stream, name, unit, flops, read, written, count in work["calls"]:
        # What the cache holds at the start need not be read, nor what it holds at the end written.
        bytes_ = max(read - cache, 0) + max(written - cache, 0)
        seconds = flops / speeds[unit], bytes_ / (kind.bandwidth * 1e9)
        streams[stream] += max(seconds) * count
        classes[name] += max(seconds) * count
        done = (*seconds, flops)
        totals = [total + one * count for total, one in zip(totals, done, strict=True)]
    links = max(work["inside"] / kind.link, work["between"] / kind.network) / 1e9
    kernels = max([*totals[:2], *streams.values()])
    return {
        "seconds": max(kernels, links),
        "classes": dict(classes.most_common()),
        "links": links,
        "flops": totals[2],
        "tokens": work["tokens"],
    }


def line_of(bound: dict[str, Any]) -> str:
    """Return the line of the report."""
    seconds, tokens = bound["seconds"], bound["tokens"]
    parts = {**bound["classes"], "links between GPUs": bound["links"]}
    shown = ", ".join(f"{name} {one:.2g}" for name, one in parts.items() if one > seconds / 100)
    rate = f"{tokens / seconds:,.0f} tokens/s" if tokens else f"{1 / seconds:.3g} steps/s"
    low, high = (f"{100 * share:.0f}" for share in PUBLISHED)
    return (
        f"time: a step takes at least {seconds:.3g} s ({shown}), so at most {rate} of this rank; "
        f"published runs reached {low} to {high} percent of such a bound"
    )
