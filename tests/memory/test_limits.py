"""How much memory there is, by fake systems and by real limits."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from stretto.errors import FitError
from stretto.memory.limits import allocated_bytes, free_memory

CPU = torch.device("cpu")
GIB = 2**30
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")


def system(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


MEMINFO = "MemTotal:  32000000 kB\nMemAvailable:    8388608 kB"


def test_what_the_machine_has(tmp_path: Path) -> None:
    found = free_memory(CPU, root=system(tmp_path, {"proc/meminfo": MEMINFO}))
    assert found.bytes == 8 * GIB
    assert str(found) == "8.00 GiB (available on this machine)"


@pytest.mark.parametrize(
    ("groups", "least"),
    [
        ({}, 8 * GIB),
        ({"a/b/memory.max": 3 * GIB, "a/b/memory.current": GIB}, 2 * GIB),
        # An outer group counts all inside it.
        (
            {
                "a/memory.max": 2 * GIB,
                "a/memory.current": GIB,
                "a/b/memory.max": "max",
                "a/b/memory.current": 5,
            },
            GIB,
        ),
        (
            {
                "a/b/memory.max": 2 * GIB,
                "a/b/memory.current": GIB,
                "a/b/memory.stat": f"anon 7\ninactive_file {GIB // 2}",
            },
            1.5 * GIB,
        ),
        ({"a/b/memory.max": GIB, "a/b/memory.current": 2 * GIB}, 0),
        # Inside a container its own group is the root.
        ({"memory.max": GIB, "memory.current": 0}, GIB),
    ],
)
def test_control_groups(groups: dict[str, object], least: int, tmp_path: Path) -> None:
    files = {f"sys/fs/cgroup/{name}": content for name, content in groups.items()}
    known: dict[str, object] = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b"}
    assert free_memory(CPU, root=system(tmp_path, {**known, **files})).bytes == least


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(FitError, match="device_memory"):
        free_memory(CPU, root=tmp_path)


def test_what_tensors_hold() -> None:
    flat = torch.zeros(100)
    tensors = [flat[:10], flat[50:], torch.zeros(3, dtype=torch.int8), torch.empty(0)]
    assert allocated_bytes(tensors, CPU) == 403
    assert allocated_bytes(tensors, torch.device("meta")) == 0


def in_process(code: str) -> list[str]:
    """Run code in a process of its own, and return what it printed."""
    setup = """
        import resource, torch
        from stretto.memory.limits import bounded, free_memory
        from stretto.runtime.out_of_memory import attempt, is_out_of_memory, release_memory
        torch.set_num_threads(1)
        cpu, MiB = torch.device("cpu"), 2**20
        def limits():
            return resource.getrlimit(resource.RLIMIT_DATA)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(setup) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@linux_only
@pytest.mark.slow
def test_a_bound_makes_memory_run_out_for_real() -> None:
    said = in_process("""
        before = limits()
        with bounded(cpu, free_memory(cpu).bytes - 200 * MiB):
            print(attempt(lambda: torch.ones(25 * MiB).sum().item()).result)  # 100 MiB
            failed = attempt(lambda: torch.ones(75 * MiB))  # 300 MiB
            print("DefaultCPUAllocator" in failed.out_of_memory)
            # All came back, so what fits still does.
            print(attempt(lambda: torch.ones(25 * MiB).sum().item()).result)
            try:
                bytearray(300 * MiB)
            except MemoryError as error:
                print(is_out_of_memory(error))
        print(limits() == before)
        print(torch.ones(75 * MiB).sum().item())
    """)
    assert said == ["26214400.0", "True", "26214400.0", "True", "True", "78643200.0"]


@linux_only
@pytest.mark.slow
def test_what_memory_a_step_held_when_it_ran_out_comes_back() -> None:
    said = in_process("""
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        def step(size):
            model(torch.ones(size, 512)).sum().backward()
        step(2)
        with bounded(cpu, free_memory(cpu).bytes - 300 * MiB):
            for _ in range(2):
                assert attempt(lambda: step(60_000)).out_of_memory
                assert attempt(lambda: step(5_000)).out_of_memory is None
        print(limits()[0] == -1)
    """)
    assert said == ["True"]


@linux_only
@pytest.mark.slow
def test_the_room_under_a_real_limit_is_what_can_be_allocated() -> None:
    said = in_process("""
        used = dict(line.split(":", 1) for line in open("/proc/self/status"))
        now = int(used["VmData"].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (now + 500 * MiB, -1))
        found = free_memory(cpu)
        assert "RLIMIT_DATA" in found.source
        print(abs(found.bytes - 500 * MiB) < 5 * MiB)
        print(attempt(lambda: torch.ones((found.bytes - 10 * MiB) // 4)).out_of_memory)
        print(attempt(lambda: torch.ones((found.bytes + 1 * MiB) // 4)).result)
        with bounded(cpu, 300 * MiB):
            print(attempt(lambda: torch.ones(250 * MiB // 4)).result)
    """)
    assert said == ["True", "None", "None", "None"]
