"""Kinds of GPU: what a program sees of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import final

from phantomgpu.errors import UnknownGPUError

GIB = 1 << 30
UNITS = {
    "b": 1,
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
"""Bytes in each unit, in small letters."""
# The digits are bounded, so that parsing any text is fast.
_AMOUNT = re.compile(r"(\d{1,18}(?:_\d{3}){0,5}(?:\.\d{1,9})?) ?([a-z]{1,3})", re.I | re.ASCII)


@final
@dataclass(frozen=True, slots=True)
class GPU:
    """A kind of GPU.

    Attributes:
        key: What `--gpu` takes.
        name: What `torch.cuda.get_device_name` returns.
        memory: GiB that a program sees, as in messages of `torch.OutOfMemoryError`.
        capability: Compute capability.
        facts: Multiprocessors, threads and blocks of each, KiB of shared memory per block (with
            opt-in) and per multiprocessor, MiB of L2 cache.
        context: GiB that torch's process takes beside its tensors, or None if not measured.
        source: Where `context` comes from.
    """

    key: str
    name: str
    memory: float
    capability: tuple[int, int]
    facts: tuple[int, int, int, int, int, int]
    context: float | None = None
    source: str = "not measured"


MESSAGE = "one public out-of-memory message: in use, minus what torch had reserved"
# Capabilities and limits: "Compute Capabilities" in NVIDIA's CUDA programming guide; processors
# and caches: the white papers. Memory: totals in public messages of torch.OutOfMemoryError (they
# vary by 0.1 GiB with the driver and ECC); where none was found, `nominal` in the name says so.
_AMPERE, _ADA = (2048, 32, 163, 164), (1536, 24, 99, 100)
_HOPPER, _AMPERE_SMALL = (2048, 32, 227, 228), (1536, 16, 99, 100)
GPUS = {
    gpu.key: gpu
    for gpu in (
        GPU("t4", "Tesla T4", 14.75, (7, 5), (40, 1024, 16, 64, 64, 4), 0.10, MESSAGE),
        GPU("a10", "NVIDIA A10", 22.0, (8, 6), (72, *_AMPERE_SMALL, 6)),
        GPU("a30", "NVIDIA A30", 23.5, (8, 0), (56, *_AMPERE, 24)),
        GPU("a6000", "NVIDIA RTX A6000", 47.53, (8, 6), (84, *_AMPERE_SMALL, 6)),
        GPU("a100-40", "NVIDIA A100-SXM4-40GB", 39.5, (8, 0), (108, *_AMPERE, 40), 0.49, MESSAGE),
        GPU("a100", "NVIDIA A100-SXM4-80GB", 79.25, (8, 0), (108, *_AMPERE, 40)),
        GPU("l4", "NVIDIA L4", 22.03, (8, 9), (58, *_ADA, 48), 0.21, MESSAGE),
        GPU("l40s", "NVIDIA L40S", 44.4, (8, 9), (142, *_ADA, 96), 0.20, MESSAGE),
        GPU("rtx3090", "NVIDIA GeForce RTX 3090", 23.68, (8, 6), (82, *_AMPERE_SMALL, 6)),
        GPU("rtx4090", "NVIDIA GeForce RTX 4090", 23.6, (8, 9), (128, *_ADA, 72), 0.46, MESSAGE),
        GPU("rtx5090", "NVIDIA GeForce RTX 5090", 31.37, (12, 0), (170, *_ADA, 96), 0.58, MESSAGE),
        GPU("h100", "NVIDIA H100 80GB HBM3", 79.1, (9, 0), (132, *_HOPPER, 50), 0.75, MESSAGE),
        GPU("h200", "NVIDIA H200", 139.8, (9, 0), (132, *_HOPPER, 50), 0.65, MESSAGE),
        GPU("b200", "NVIDIA B200", 178.35, (10, 0), (148, *_HOPPER, 126), 0.70, MESSAGE),
    )
}
ALIASES = {"a100-80": "a100", "h100-80": "h100", "rtxa6000": "a6000"}
UNMEASURED_CONTEXT = 0.5
_CODE = {(8, 9): 86}
"""Capabilities that run code which torch compiles for another."""


def find_gpu(name: str) -> GPU:
    """Return the kind with that name.

    >>> find_gpu("H100").memory
    79.1

    Raises:
        UnknownGPUError: No kind has that name.
    """
    key = re.sub(r"[\s_]|nvidia|geforce|gb$", "", name.lower())
    key = f"rtx{key}" if key.isdecimal() else ALIASES.get(key, key)
    if key not in GPUS:
        raise UnknownGPUError(f"no kind of GPU is named {name!r}; write one of {', '.join(GPUS)}")
    return GPUS[key]


def parse_memory(text: str) -> int:
    """Return the bytes that an amount such as '80GiB', '24GB' or '16384MiB' means.

    GiB is 1024^3, GB is 1000^3, as on a disk; '80' and '80G' may mean either, so they are refused.

    >>> parse_memory("16GiB"), parse_memory("1.5 MB")
    (17179869184, 1500000)
    """
    found = _AMOUNT.fullmatch(text.strip())
    size = UNITS.get(found[2].lower()) if found else None
    if found is None or size is None:
        raise ValueError(f"cannot read {text[:40]!r} as memory; write such as '24GiB' or '24GB'")
    return int(Fraction(found[1].replace("_", "")) * size)


def context_bytes(gpu: GPU) -> int:
    """Return what a process takes of the memory before torch allocates a tensor."""
    return int((UNMEASURED_CONTEXT if gpu.context is None else gpu.context) * GIB)


def driver_facts(gpu: GPU, *, memory: int, context: int, devices: int) -> str:
    """Return the facts as the stand-ins read them from the environment (native/device.h)."""
    processors, threads, blocks, optin, shared, cache = gpu.facts
    major, minor = gpu.capability
    code = _CODE.get(gpu.capability, 10 * major + minor)
    numbers = (memory, context, devices, major, minor, code, processors, threads, blocks)
    sizes = (optin << 10, shared << 10, cache << 20)
    return " ".join(map(str, (*numbers, *sizes, gpu.name)))
