"""What every test shares: hypothesis profiles, the limit on threads, limits on memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerContext
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

ROOT = Path(__file__).parents[1]
FORKED = Path(__file__).with_name("forked_process.py")
RANKS_END_SECONDS = 240

LIMITED = """
import gc
import resource

def data_bytes():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmData"].split()[0]) * 1024

def leave(room):
    gc.freeze()  # each trial collects, and would look at all of torch
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + room, -1))

"""


class _Collected:
    """How many modules there were when collections last began to leave them out."""

    modules = 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of an accelerator that is not here, and long ones unless they are asked for."""
    # The modules of torch and its compiler take a collection a third of a second; a search for a
    # batch size asks for several.
    if len(sys.modules) > _Collected.modules + 300:
        gc.collect()
        gc.freeze()
        _Collected.modules = len(sys.modules)
    if item.get_closest_marker("long") and not os.environ.get("STRETTO_LONG"):
        pytest.skip("takes long: make test-long")
    for marker in ("gpu", "phantom"):
        if item.get_closest_marker(marker):
            from tests import accelerator  # imports torch

            why = accelerator.why_not(marker)
            if why:
                pytest.skip(why)


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
def fork_server() -> ForkServerContext:
    """Start processes in milliseconds: they are forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    # What a rank would import at its first step, too.
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "stretto.training"])
    return context


class Forked:
    """A Python whose process is forked from one that has imported torch."""

    def __init__(
        self, context: ForkServerContext, output: Path, arguments: Sequence[str], **more: str
    ) -> None:
        job = {
            "arguments": list(arguments),
            "environment": more,
            "folder": str(Path.cwd()),
            "output": str(output),
        }
        self._output = output
        self._process = context.Process(
            target=runpy.run_path, args=(str(FORKED), {"JOB": job}, "__main__")
        )
        self._process.start()

    def ended(self, timeout: float) -> int | None:
        """Wait for its end, for so many seconds; return its exit code, if it has ended."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            os.kill(self._process.pid or 0, signal.SIGABRT)
            self._process.join(5)
        self._process.kill()
        return code

    def said(self, stream: str) -> str:
        """What it has written to `stdout` or `stderr`."""
        return self._output.with_suffix(f".{stream}").read_text()


@pytest.fixture(scope="session")
def run_python(
    fork_server: ForkServerContext, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python ARGUMENTS` in the current folder, 3 seconds sooner than a new process would."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        output = tmp_path_factory.mktemp("python") / "0"
        process = Forked(fork_server, output, arguments, **environment)
        code = process.ended(RANKS_END_SECONDS)
        assert code is not None, f"{arguments} has not ended: {process.said('stderr')[-4000:]}"
        said = process.said("stdout"), process.said("stderr")
        return subprocess.CompletedProcess(arguments, code, *said)

    return run


@pytest.fixture(scope="session")
def launch_ranks(
    fork_server: ForkServerContext, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script on real processes of this machine, gloo between them; return what was said.

    They have the environment that torchrun gives them. Unlike torchrun, a rank that fails does not
    end the others: each must end by itself, or the test fails.
    """

    def launch(
        script: Path, *arguments: object, ranks: int = 2, fails: bool = False
    ) -> subprocess.CompletedProcess[str]:
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        output = tmp_path_factory.mktemp("ranks")
        command = [str(one) for one in (script, *arguments)]
        processes = []
        for rank in range(ranks):
            environment = {
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            processes.append(Forked(fork_server, output / str(rank), command, **environment))
        end = time.monotonic() + RANKS_END_SECONDS
        codes = [one.ended(max(0.0, end - time.monotonic())) for one in processes]
        stdout, stderr = (
            "".join(one.said(stream) for one in processes) for stream in ("stdout", "stderr")
        )
        assert None not in codes, f"a rank has not ended: {codes}\n{stderr[-4000:]}"
        assert fails or not any(codes), stderr[-4000:]
        code = next((one for one in codes if one), 0)
        return subprocess.CompletedProcess(command, code, stdout, stderr)

    return launch


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., None]:
    """Start a script through torchrun itself, which starts it again after a failure.

    Slow: the launcher and each rank import torch.
    """

    def start(script: Path, *arguments: object, ranks: int = 2, max_restarts: int = 0) -> None:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)),
                *map(str, (script, *arguments)),
            ],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]

    return start
