"""Free memory of a device, and a guard that makes large allocations fail with an error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.errors import FitError
from stretto.memory.amounts import parse_bytes, show_bytes

_ROOT = Path("/")


class MemoryLimit(NamedTuple):
    """A number of bytes that can be allocated."""

    bytes: int
    source: str
    """What sets the limit, as text for messages."""

    def __str__(self) -> str:
        return f"{show_bytes(self.bytes)} ({self.source})"


def stated(amount: str | int) -> MemoryLimit:
    """Return an amount of memory that the user has stated.

    Raises:
        FitError: it is nothing.
        ConfigError: it cannot be read.
    """
    count = parse_bytes(amount)
    if not count:
        raise FitError.bad("device_memory", amount, "it is not above zero", "write 80GiB")
    return MemoryLimit(count, "as stated")


def free_memory(device: torch.device, *, root: Path = _ROOT) -> MemoryLimit:
    """Return how much memory this process can still allocate on a device.

    On the CPU it is the least of the available memory of the machine, of the control groups
    (version 2) of the process, and of its own limit on data.

    Args:
        device: the device.
        root: where the system's files are; another folder in tests.

    Raises:
        FitError: this kind of device or system does not report its memory.
    """
    found = list(_host_limits(root)) if device.type == "cpu" else list(_device_limits(device))
    if not found:
        raise FitError.cannot(
            f"read how much memory '{device}' has",
            why="this system does not report it",
            instead="pass device_memory, for example '16GiB'",
        )
    least = min(found)
    return least._replace(bytes=max(least.bytes, 0))


def allocated_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes that tensors occupy on a device; shared memory counts once.

    >>> shared = torch.zeros(4)
    >>> allocated_bytes([shared, shared[:2], torch.zeros(2, device="meta")], torch.device("cpu"))
    16
    """
    local = (getattr(one, "_local_tensor", one) for one in tensors)  # of a DTensor
    storages = (one.untyped_storage() for one in local if one.layout is torch.strided)
    sizes = {one.data_ptr(): one.nbytes() for one in storages if one.device.type == device.type}
    return sum(sizes.values())


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that tensors had since the last call; 0: the device does not tell."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


@contextlib.contextmanager
def bounded(device: torch.device, reserve: int = 0) -> Iterator[None]:
    """Make a step fail if it needs more than the free memory of a device minus `reserve` bytes.

    Linux grants more host memory than it has and ends the process that uses it. So on a CPU, the
    soft limit `RLIMIT_DATA` of this process is lowered meanwhile; a failed allocation then raises.

    >>> with bounded(torch.device("cpu")):
    ...     _ = torch.ones(2**22)
    """
    if device.type != "cpu":
        # The allocator has no limit in bytes, so allocate the reserve during the step.
        reserved = torch.empty(reserve, dtype=torch.uint8, device=device)
        yield
        del reserved
        return
    used = _read_table(_ROOT / "proc/self/status").get("VmData")
    if sys.platform != "linux" or used is None:
        yield
        return
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + max(free_memory(device).bytes - reserve, 0)
    lower = min(one for one in (limit, before, hard) if one != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (lower, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _device_limits(device: torch.device) -> Iterator[MemoryLimit]:
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        limit = int(module.recommended_max_memory())
        yield MemoryLimit(limit - int(module.current_allocated_memory()), "recommended for MPS")
    elif hasattr(module, "mem_get_info"):
        free, total = module.mem_get_info(device)
        reserved, allocated = module.memory_reserved(device), module.memory_allocated(device)
        yield MemoryLimit(free + reserved - allocated, f"free on '{device}'")
        part = getattr(module, "get_per_process_memory_fraction", lambda _: 1)(device)
        if part < 1:
            yield MemoryLimit(int(part * total) - allocated, f"{part:.0%} of '{device}'")


def _host_limits(root: Path) -> Iterator[MemoryLimit]:
    available = _read_table(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        yield MemoryLimit(available, "available on this machine")
    name = _read(root / "proc/self/cgroup").strip().rpartition("::")[2].strip("/")
    base = root / "sys/fs/cgroup"
    # In a container, the name may be one of the host that does not exist here.
    for group in (base / name, *(base / name).parents):
        limit, usage = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
        if limit.isdecimal() and usage.isdecimal():
            # Cached files count as used, but the kernel drops them when memory is needed.
            cache = _read_table(group / "memory.stat").get("inactive_file", 0)
            yield MemoryLimit(int(limit) - int(usage) + cache, "limit of the control group")
        if group == base:
            break
    used = _read_table(root / "proc/self/status").get("VmData")
    if sys.platform != "win32" and used is not None:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if soft != resource.RLIM_INFINITY:
            yield MemoryLimit(soft - used, "RLIMIT_DATA of this process")


def _read_table(path: Path) -> dict[str, int]:
    """Parse lines of a name and a number; the numbers are returned in bytes."""
    table = {}
    for line in _read(path).splitlines():
        name, *rest = line.replace(":", " ").split()[:3] or [""]
        if rest and rest[0].isdecimal():
            table[name] = int(rest[0]) * (1024 if rest[1:] == ["kB"] else 1)
    return table


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
