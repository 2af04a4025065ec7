"""The least seconds that a step can take: what its kernels compute and move, over a kind's peaks.

Kernels of one stream run one after another, each at the peak of the multiprocessors or of the
memory; communication may overlap with them. A real step takes longer: docs/phantomgpu/time.md.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from phantomgpu.gpus import GPU

if TYPE_CHECKING:
    import torch

PUBLISHED = (0.24, 0.77)
"""The shares of this bound that published runs reached (docs/phantomgpu/time.md)."""
BOOST = 1.2
"""GeForce cards clock higher than their data sheet says: up to about 3 of 2.5 GHz."""
SMALLEST = 2 << 20
"""Bytes that fit into the cache of every kind, so that they are not counted."""
_LINKS = ("inside", "between")
# Kernels with such names read or write a part of an argument only.
_PARTLY = (
    "embedding index gather scatter take masked nll_loss where tril triu conv pool upsample slice "
    "grid_sampler select unfold im2col"
)
_LIKE = {"_addmm_activation": "addmm", "_int_mm": "mm", "_slow_conv2d_forward": "convolution"}
_CLASSES = {"attention": "attention", "conv": "convolutions", "mm": "matrix products"}
_VARIED = ("cum_seq_q", "cu_seqlens_q", "window_size_left", "window_size")
"""Arguments of attention to less than all: lengths that lie on the device, a window."""


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
        self.crossed = [one.value for one in self.links]

    def end(self) -> None:
        """Keep what the step did that ended, and begin the next one."""
        moved = [now.value - then for now, then in zip(self.links, self.crossed, strict=True)]
        calls = [[*call, count] for call, count in self.calls.items()]
        tokens = max(self.tokens.values(), default=0)
        self.last = {"calls": calls, "tokens": tokens, **dict(zip(_LINKS, moved, strict=True))}
        self.begin()

    def add(self, kernel: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count a call of a kernel."""
        tensors = [one for one in self.leaves((args, kwargs)) if one.is_cuda]
        outs = self.leaves(out)
        if kernel.base == "index_select" and tensors[0].numel() > SMALLEST:  # an embedding
            self.tokens[tensors[0].shape] += tensors[1].numel()
        flops = self.flops_of(kernel, args, kwargs, out) if kernel.class_ in _MULTIPLY else 0
        is_large = sum(one.nbytes for one in (*tensors, *outs)) > SMALLEST
        if flops or is_large:
            import torch

            targets = kernel.targets(args, kwargs)
            sizes = moved(kernel, targets, tensors, outs) if is_large else (0, 0)
            stream = torch.cuda.current_stream().cuda_stream
            unit = unit_of(kernel.base, tensors[0].dtype) if flops else ""
            self.calls[stream, kernel.class_, unit, flops, *sizes] += 1

    def flops_of(self, kernel: Any, args: Any, kwargs: Any, out: Any) -> float:
        """Return floating-point operations by torch's formulas; causal attention needs half."""
        base = kernel.base
        given = dict(zip(kernel.names, args, strict=False)) | kwargs
        if base not in self.formulas or any(given.get(one) is not None for one in _VARIED):
            return 0
        half = bool(given.get("is_causal") or given.get("custom_mask_type"))
        key = base, half, *(one.shape for one in self.leaves((args, kwargs, out)))
        if key not in self.flops:
            if base == "_slow_conv2d_forward":  # its arguments have another order
                args, kwargs = (*args[:2], None, None, None, None, False), {}
            self.flops[key] = 0
            with suppress(Exception):  # an overload that the formula does not know
                self.flops[key] = self.formulas[base](*args, **kwargs, out_val=out) / (1 + half)
        return self.flops[key]


def formulas() -> dict[str, Any]:
    """Return torch's formulas of floating-point operations, by the names of kernels."""
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # "triton not found"
    from torch.utils.flop_counter import flop_registry

    found = {getattr(one, "__name__", ""): each for one, each in flop_registry.items()}
    return found | {ours: found[theirs] for ours, theirs in _LIKE.items()}


def class_of(base: str) -> str:
    """Return the class of a kernel, as the report names it."""
    if base.startswith(("_foreach", "_fused")):
        return "optimizer"
    return next((name for part, name in _CLASSES.items() if part in base), "other kernels")


_MULTIPLY = set(_CLASSES.values())


def moved(kernel: Any, targets: list[Any], tensors: list[Any], outs: list[Any]) -> tuple[int, int]:
    """Return the bytes that a kernel must read and write."""
    base, where = kernel.base, {one.data_ptr() for one in targets}
    read = [one for one in tensors if one.data_ptr() not in where]
    if any(part in base for part in _PARTLY.split()):
        read, targets = [], targets if kernel.is_out else []
    elif not (kernel.overwrites or base in ("copy_", "_foreach_zero_", "_foreach_copy_")):
        read += targets
    written = size_of([*(one for one in outs if one.data_ptr() not in where), *targets])
    # Gradients are among the targets of fused optimizers, and not written.
    return size_of(read), written // 2 if base.startswith("_fused") else written


def size_of(tensors: list[Any]) -> int:
    """Return the bytes of tensors, each place once and none twice by strides of zero."""
    sizes = {one.data_ptr(): min(one.nbytes, one.untyped_storage().nbytes()) for one in tensors}
    return sum(sizes.values())


def unit_of(base: str, kind: torch.dtype) -> str:
    """Return which of a GPU's units multiplies."""
    import torch

    if kind == torch.float32 and "mm" in base:
        with suppress(RuntimeError):  # settings of two kinds, old and new
            return "single" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return {1: "byte", 2: "half", 4: "tf32"}.get(kind.itemsize, "single")


def bound_of(work: dict[str, Any], kind: GPU) -> dict[str, Any]:
    """Return the least seconds of a step on a kind of GPU, and what they are made of."""
    is_small = "GeForce" in kind.name
    half, single = (one * (BOOST if is_small else 1) * 1e12 for one in (kind.half, kind.single))
    tensor = half / 2 if kind.capability >= (8, 0) else single
    speeds = {"half": half, "tf32": max(tensor, single), "single": single, "": single}
    speeds["byte"] = half * (4 if is_small else 2)
    streams: Counter[int] = Counter()
    classes: Counter[str] = Counter()
    units: Counter[str] = Counter()
    for stream, name, unit, flops, read, written, count in work["calls"]:
        # What the cache holds at the start need not be read, nor what it holds at the end written.
        crossing = sum(max(size - (kind.cache << 20), 0) for size in (read, written))
        parts = count * flops / speeds[unit], count * crossing / (kind.bandwidth * 1e9)
        units += Counter(flops=count * flops, computing=parts[0], memory=parts[1])
        streams[stream] += max(parts)
        classes[name] += max(parts)
    links = max(work["inside"] / kind.link, work["between"] / kind.network) / 1e9
    return {
        "seconds": max([units["computing"], units["memory"], links, *streams.values()]),
        "classes": dict(classes.most_common()),
        "links": links,
        "flops": units["flops"],
        "tokens": work["tokens"],
    }


def line_of(bound: dict[str, Any]) -> str:
    """Return the line of the report."""
    seconds, tokens = bound["seconds"], bound["tokens"]
    parts = {**bound["classes"], "links between GPUs": bound["links"]}
    shown = ", ".join(f"{name} {one:.2g}" for name, one in parts.items() if one > seconds / 100)
    rate = f"{tokens / seconds:,.0f} tokens/s" if tokens else f"{1 / seconds:,.2f} steps/s"
    low, high = (f"{100 * share:.0f}" for share in PUBLISHED)
    return (
        f"time: a step takes at least {seconds:.3g} s ({shown}), so at most {rate} of this rank; "
        f"published runs reached {low} to {high} percent of such a bound"
    )
