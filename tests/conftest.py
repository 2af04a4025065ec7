"""What every test shares: hypothesis profiles, the limit on threads, limits on memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from torch import nn

# Set before anything imports torch: results and speed must not depend on the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=40,
    deadline=None,  # no timing asserts: a slow machine is not a failure
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", max_examples=2_000, deadline=None)
settings.load_profile(os.environ.get("STRETTO_HYPOTHESIS_PROFILE", "ci"))

LIMITED = """
import resource
from stretto.memory.limits import process_status

def leave(room):
    resource.setrlimit(resource.RLIMIT_DATA, (process_status()["VmData"] + room, -1))

"""


@pytest.fixture(autouse=True)
def _limits_stay() -> Iterator[None]:
    """Find the test that leaves a limit on memory behind, not one that suffers from it."""
    if sys.platform != "linux":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    after = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, before)
    assert after == before, "a limit on the data of the process was left behind"


@pytest.fixture
def limited() -> Callable[..., str]:
    """Run code in a process of its own, and return what it printed.

    There `leave(bytes)` sets a real limit: what is beyond it fails as it does on a full machine.
    """
    if sys.platform != "linux":
        pytest.skip("needs Linux's limits")

    def run(code: str, *arguments: str, folder: Path | None = None) -> str:
        done = subprocess.run(
            [sys.executable, "-c", LIMITED + textwrap.dedent(code), *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            cwd=folder,
            # Freed blocks go back to the system at once: else fragments of the heap decide, by
            # chance.
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.fixture(scope="session")
def data_parallel() -> Callable[[nn.Module], nn.parallel.DistributedDataParallel]:
    """Wrap a module for DDP; skip where this torch cannot do so.

    DDP broadcasts the parameters, and gloo of torch 2.7 knows no complex numbers.
    """
    from torch import nn

    def wrap(module: nn.Module) -> nn.parallel.DistributedDataParallel:
        try:
            return nn.parallel.DistributedDataParallel(module)
        except RuntimeError as error:
            is_complex = any(parameter.is_complex() for parameter in module.parameters())
            if is_complex and "Invalid scalar type" in str(error):
                pytest.skip("gloo of this torch cannot broadcast complex parameters")
            raise

    return wrap


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Start a script on real processes of this machine, gloo between them; return what was said.

    One rank is a plain process. Each imports torch: seconds on a quiet machine, a minute on a busy
    one.
    """

    def start(
        script: Path, *arguments: object, ranks: int = 2, max_restarts: int = 0, fails: bool = False
    ) -> subprocess.CompletedProcess[str]:
        launcher = [
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *("--max-restarts", str(max_restarts)),
        ]
        done = subprocess.run(
            [
                *(sys.executable, *(launcher if ranks > 1 else ())),
                *map(str, (script, *arguments)),
            ],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert fails or done.returncode == 0, done.stderr[-4000:]
        return done

    return start
