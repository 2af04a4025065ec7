"""Free memory of a device, and a guard that makes large allocations fail with an error."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.errors import FitError
from stretto.memory.amounts import show_bytes
from stretto.memory.measuring.copies import memory_of

ROOT = Path("/")
"""Where the system's files are."""


class MemoryLimit(NamedTuple):
    """A number of bytes that can be allocated."""

    bytes: int
    source: str
    """What sets the limit, as text for messages."""

    def __str__(self) -> str:
        return f"{show_bytes(self.bytes)} ({self.source})"


def free_memory(device: torch.device, *, root: Path = ROOT) -> MemoryLimit:
    """Return how much memory this process can still allocate on a device.

    On the CPU it is the minimum of three: the available memory of the machine, the remaining limit
    of each control group of the process, and its own limits on data and address space. Memory that
    the process has freed but not returned to the system is not counted: call `release_memory`
    first.

    Args:
        device: the device.
        root: where the system's files are; another folder in tests.

    Raises:
        FitError: this kind of device or system does not report its memory.
    """
    found = list(_host_limits(root)) if device.type == "cpu" else list(_device_limits(device))
    if not found:
        raise FitError.cannot(
            f"tell how much memory there is on '{device}'",
            why="this system does not say",
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
    pieces = {}
    for tensor in tensors:
        for memory in memory_of(tensor):
            if memory.device.type == device.type:
                pieces[memory.data_ptr()] = memory.nbytes()
    return sum(pieces.values())


_LOCK = threading.Lock()
_LIMITS: list[tuple[int, int]] = []
"""The limit of this process before its first guard, and those of the guards that are active."""


@contextlib.contextmanager
def guard(limit: int) -> Iterator[None]:
    """Make allocations fail that exceed the present memory use by more than `limit` bytes.

    Without a limit, Linux grants more memory than it has and kills the process that uses it. With
    a limit, the allocation raises an error. It is the soft limit `RLIMIT_DATA` of this process and
    is restored afterwards. If several guards are active, in other threads too, the lowest limit
    applies. On other systems nothing happens.

    >>> with guard(64 * 2**20):
    ...     _ = torch.ones(2**22)  # 16 MiB
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    with _LOCK:
        used = process_status().get("VmData")
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if not _LIMITS:
            _LIMITS.append((soft, hard))
        bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
        own = (soft if used is None else min([used + limit, *bounds])), hard
        resource.setrlimit(resource.RLIMIT_DATA, own)
        _LIMITS.append(own)
    try:
        yield
    finally:
        with _LOCK:
            _LIMITS.remove(own)
            original, *others = _LIMITS
            resource.setrlimit(resource.RLIMIT_DATA, min(others, default=original))
            if not others:
                _LIMITS.clear()


@contextlib.contextmanager
def bounded(device: torch.device, reserve: int = 0) -> Iterator[None]:
    """Make a step fail if it needs more than the free memory of a device minus `reserve` bytes."""
    if device.type != "cpu":
        # The allocator has no limit in bytes, so allocate the reserve during the step.
        reserved = torch.empty(reserve, dtype=torch.uint8, device=device)
        yield
        del reserved
    elif sys.platform == "linux":
        with guard(max(free_memory(device).bytes - reserve, 0)):
            yield
    else:
        yield


def process_status(root: Path = ROOT) -> dict[str, int]:
    """Return the fields of `/proc/self/status` in bytes, by name."""
    return _read_table(root / "proc/self/status")


def _device_limits(device: torch.device) -> Iterator[MemoryLimit]:
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        limit = int(module.recommended_max_memory())
        yield MemoryLimit(limit - int(module.current_allocated_memory()), "recommended for MPS")
        return
    if not hasattr(module, "mem_get_info"):
        return
    free, total = module.mem_get_info(device)
    reserved, allocated = module.memory_reserved(device), module.memory_allocated(device)
    yield MemoryLimit(free + reserved - allocated, f"free on '{device}'")
    if hasattr(module, "get_per_process_memory_fraction"):
        part = module.get_per_process_memory_fraction(device)
        if part < 1:
            yield MemoryLimit(int(part * total) - allocated, f"{part:.0%} of '{device}'")


def _host_limits(root: Path) -> Iterator[MemoryLimit]:
    available = _read_table(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        yield MemoryLimit(available, "available on this machine")
    yield from _group_limits(root)
    yield from _own_limits(root)


def _own_limits(root: Path) -> Iterator[MemoryLimit]:
    if sys.platform == "win32":
        return
    import resource

    status = process_status(root)
    for name, used in (("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")):
        limit, _ = resource.getrlimit(getattr(resource, name))
        if limit != resource.RLIM_INFINITY and used in status:
            yield MemoryLimit(limit - status[used], f"{name} of this process")


def _group_limits(root: Path) -> Iterator[MemoryLimit]:
    """The remaining limit of each control group, from the innermost to the outermost."""
    for base, path, names in _groups(root):
        places = [base / path, *(base / path).parents] if path else [base]
        for place in places:
            limit = _read_number(place / names[0])
            usage = _read_number(place / names[1])
            if limit is not None and usage is not None:
                # Cached files count as used, but the kernel drops them when memory is needed.
                cache = _read_table(place / "memory.stat").get(names[2], 0)
                yield MemoryLimit(limit - usage + cache, "limit of the control group")
            if place == base:
                break


def _groups(root: Path) -> Iterator[tuple[Path, str, tuple[str, str, str]]]:
    second = ("memory.max", "memory.current", "inactive_file")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, names = mount, second
        elif "memory" in controllers.split(","):
            base, names = mount / "memory", first
        else:
            continue
        # Inside a container this may be a path of the host, which does not exist here.
        inner = path.strip("/")
        yield base, inner if (base / inner).is_dir() else "", names


def _read_number(path: Path) -> int | None:
    text = _read(path).strip()
    # "max" means no limit; version 1 writes a huge number instead.
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else None


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
