"""Kinds of GPU: what a program sees of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import final

from phantomgpu import files
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
        source: Where `memory` comes from: message, printed or nominal; see gpus.txt.
        context: GiB that torch's process takes beside its tensors, or None if not measured.
        capability: Compute capability.
        processors: Multiprocessors.
        cache: MiB of L2 cache.
        half: TFLOP/s of matrix products in bf16 or fp16, dense.
        single: TFLOP/s in fp32.
        bandwidth: GB/s of memory.
        link: GB/s between GPUs of a server, one way.
        network: GB/s between servers, one way.
    """

    key: str
    name: str
    memory: float
    source: str
    context: float | None
    capability: tuple[int, int]
    processors: int
    cache: int
    half: float
    single: float
    bandwidth: float
    link: float
    network: float


def _read(line: str) -> GPU:
    """Return the kind that a line of gpus.txt describes."""
    key, capability, memory, source, context, *numbers, name = line.split(maxsplit=12)
    major, minor = map(int, capability.split("."))
    counts, speeds = map(int, numbers[:2]), map(float, numbers[2:])
    known = None if context == "?" else float(context)
    return GPU(key, name, float(memory), source, known, (major, minor), *counts, *speeds)


_LINES = files.read(Path(__file__).with_name("gpus.txt")).decode().splitlines()
GPUS = {gpu.key: gpu for gpu in map(_read, (one for one in _LINES if one[0] not in "#="))}
_NAMES = {key.replace("-", ""): key for key in GPUS}
_NAMES |= {"h10080": "h100", "rtxa6000": "a6000"}
_REFUSED = {
    r"mi\d{2,3}|instinct|radeon|rx\d{4}|gfx\d": "AMD's GPUs run another build of torch (ROCm)",
    r"tpu|gaudi|hpu|trainium|inferentia|ascend|xpu|arc": "it does not run CUDA code",
    r"apple|mps|^m[1-5](pro|max|ultra)?$": "Apple's GPUs run torch's mps device, not CUDA",
    r"laptop|mobile|maxq": "a laptop's card has other memory and clocks; write the kind with its "
    "compute capability, and --memory",
}
"""Patterns of names, and why these are refused."""
UNMEASURED_CONTEXT = 0.5
_LIMITS = {
    one[:2]: one[2:]
    for one in (tuple(map(int, re.findall(r"\d+", line))) for line in _LINES if line[0] == "=")
}
OLDEST = (7, 5)
"""The oldest capability that torch for CUDA 13 has code for."""


def find_gpu(name: str) -> GPU:
    """Return the kind with that name.

    >>> find_gpu("H100").memory
    79.1

    Raises:
        UnknownGPUError: No kind has that name, or two kinds with different memory have it.
    """
    key = re.sub(r"[\s_-]|nvidia|geforce|tesla|gi?b$", "", name.lower())
    key = f"rtx{key}" if re.fullmatch(r"\d{4}(ti)?(super)?(\d{1,2})?", key) else key
    if key in _NAMES:
        return GPUS[_NAMES[key]]
    if sold := [one for one in GPUS if one.partition("-")[0] == key]:
        sizes = " and ".join(one.partition("-")[2] for one in sold)
        why = f"it is sold with {sizes} GB; write {' or '.join(sold)}"
        raise UnknownGPUError(f"cannot play {name!r}: {why}")
    for pattern, why in _REFUSED.items():
        if re.search(pattern, key):
            raise UnknownGPUError(f"cannot play {name!r}: {why}; write one of {', '.join(GPUS)}")
    raise UnknownGPUError(f"no kind of GPU is named {name!r}; write one of {', '.join(GPUS)}")


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
    threads, blocks, optin, shared, code = _LIMITS[gpu.capability]
    major, minor = gpu.capability
    numbers = (memory, context, devices, major, minor, code, gpu.processors, threads, blocks)
    sizes = (optin << 10, shared << 10, gpu.cache << 20)
    return " ".join(map(str, (*numbers, *sizes, gpu.name)))
