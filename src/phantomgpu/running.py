"""Start a script or a function in a process that has a phantom."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from phantomgpu import standins
from phantomgpu.child import CANNOT_RUN, Settings
from phantomgpu.errors import RunFailedError, SetupNeededError
from phantomgpu.gpus import GIB, context_bytes, driver_facts, find_gpu, parse_memory
from phantomgpu.report import Report, build_report

BOOT = Path(__file__).parent / "boot"
LOCAL_RANKS, MOST_DEVICES = 8, 16
GRACE_SECONDS = 5
"""How long a process has to end by itself."""


def run(
    script: str | Path | Sequence[str] | Callable[..., Any],
    *,
    gpu: str,
    memory: int | str | None = None,
    ranks: int = 1,
    rank: int = 0,
    steps: int | None = 3,
    devices: int | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    modules: bool = False,
    cudnn: bool = False,
    values: bool = True,
    snapshot: str | Path | None = None,
    timeout_seconds: float | None = None,
    quiet: bool = True,
) -> Report:
    """Run a script or a function on a GPU that does not exist, and report its memory.

    Args:
        script: A command (`["python", "train.py"]`), a Python file, or a function. A function and
            its arguments travel to another process by cloudpickle.
        gpu: The kind of GPU, one of `phantomgpu.GPUS`.
        memory: Another size than that kind's, in bytes or as '40GiB'.
        ranks: The number of ranks; one of them runs.
        rank: Which of them, from 0.
        steps: After how many optimizer steps the script ends; None: it runs to its end.
        devices: The number of GPUs that the process sees; 1, or up to 8 with ranks.
        args: Arguments of the function, or of the script.
        kwargs: Keyword arguments of the function.
        modules: Run a second time, with hooks, for the names of modules.
        cudnn: Leave cuDNN on; what needs it is then refused.
        values: Compute small whole numbers for real.
        snapshot: A file for torch's memory snapshot.
        timeout_seconds: How long the script may take.
        quiet: Do not show what the script prints.

    Returns:
        What the run took. A run that does not fit is a report, not an error.

    Raises:
        RunFailedError: The run left no report, because the process was killed or used no CUDA.
        SetupNeededError: The installed torch has no CUDA code.
    """
    standins.check_system()
    session = Session(gpu, memory, ranks, devices, rank)
    settings = Settings(
        "", steps=steps, ranks=ranks, cudnn=cudnn, values=values, snapshot=snapshot is not None
    )
    with command_of(script, args, kwargs) as command:
        report = session.start(command, settings, snapshot, timeout_seconds, quiet=quiet)
        if modules and report.status in ("fits", "does not fit"):
            settings.modules, settings.snapshot = True, False
            named = session.start(command, settings, None, timeout_seconds, quiet=True)
            differs = named.peak_allocated != report.peak_allocated
            note = ("names of modules are of a second run, whose peak differed",)
            notes = report.notes + note * differs
            report = replace(report, places=named.places, notes=notes)
    return report


@contextmanager
def command_of(
    script: str | Path | Sequence[str] | Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
) -> Iterator[list[str]]:
    """Return the command line of a script or a function; a function is a file meanwhile."""
    if isinstance(script, str | Path):
        yield [sys.executable, str(script), *map(str, args)]
    elif not callable(script):
        yield [*script, *map(str, args)]
    else:
        import cloudpickle

        with tempfile.TemporaryDirectory(prefix="phantomgpu-") as folder:
            file = Path(folder, "function.pickle")
            file.write_bytes(cloudpickle.dumps((script, tuple(args), kwargs or {})))
            yield [sys.executable, str(BOOT / "call.py"), str(file)]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as an error does: what was started ends before."""
    numbers = []
    if threading.current_thread() is threading.main_thread():
        both = (signal.SIGTERM, signal.SIGHUP)
        numbers = [one for one in both if signal.getsignal(one) is signal.SIG_DFL]

    def leave(number: int, frame: object) -> NoReturn:
        del frame
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for one in numbers:
        signal.signal(one, leave)
    try:
        yield
    finally:
        for one in numbers:
            signal.signal(one, signal.SIG_DFL)


@contextmanager
def started(command: list[str], **how: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a command in a group of processes, and end all that is left of the group."""
    with subprocess.Popen(command, start_new_session=True, **how) as process:  # noqa: S603
        try:
            yield process
        finally:
            for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(seconds)


def too_long(what: str, seconds: float | None) -> RunFailedError:
    """Return the error of a process that took too long."""
    return RunFailedError(
        f"{what} did not end within {seconds:g} seconds; if it needs more, write --timeout "
        f"{2 * (seconds or 0):g} (timeout_seconds in Python)"
    )


def rank_environment(rank: int, ranks: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, on nodes of eight GPUs."""
    local = min(ranks, LOCAL_RANKS)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank % local,
        "GROUP_RANK": rank // local,
        "ROLE_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": min(local, ranks - rank // local * local),
        "GROUP_WORLD_SIZE": -(-ranks // local),
        "ROLE_WORLD_SIZE": ranks,
        "MASTER_PORT": 29500,
    }
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


class Session:
    """A kind of GPU, and how processes that see it are started."""

    def __init__(
        self,
        gpu: str,
        memory: int | str | None,
        ranks: int = 1,
        devices: int | None = None,
        rank: int = 0,
    ) -> None:
        self.kind = kind = find_gpu(gpu)
        if isinstance(memory, str):
            memory = parse_memory(memory)
        count = min(ranks, LOCAL_RANKS) if devices is None else devices
        for name, value, least, most in (
            ("memory", int(kind.memory * GIB) if memory is None else memory, 1 << 20, 1 << 40),
            ("ranks", ranks, 1, 1 << 20),
            ("rank", rank, 0, max(ranks, 1) - 1),
            ("devices", count, 1, MOST_DEVICES),
        ):
            if not least <= value <= most:
                unit = " bytes, such as '24GiB'" if name == "memory" else ""
                raise ValueError(f"{name} is {str(value)[:40]}; write {least} to {most}{unit}")
        self.name = f"an {kind.name}" if kind.name[0] == "N" else f"a {kind.name}"
        self.ranks, self.rank = ranks, rank
        self.memory = int(kind.memory * GIB) if memory is None else memory
        self.context = min(context_bytes(kind), self.memory)
        self.facts = driver_facts(kind, memory=self.memory, context=self.context, devices=count)

    def environment(self, settings: Settings) -> dict[str, str]:
        """Return the environment of a process with a phantom."""
        settings.process = os.getpid()
        settings.path = [entry for entry in sys.path if entry and entry != str(BOOT)]
        path = [str(BOOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {
            "PHANTOMGPU_RUN": json.dumps(asdict(settings)),
            "PHANTOMGPU_FACTS": self.facts,
            "PYTHONPATH": os.pathsep.join(path),
            "TORCH_COMPILE_CACHE_KEY_TAG": "phantomgpu",  # a real GPU must not find these kernels
            "TMPDIR": settings.folder,  # what a script that is ended leaves behind goes with it
        }
        if self.ranks > 1:
            ours |= rank_environment(self.rank, self.ranks)
        hidden = ("CUDA_VISIBLE_DEVICES",)
        rest = {name: value for name, value in os.environ.items() if name not in hidden}
        return {"TORCHINDUCTOR_CACHE_DIR": str(standins.cache_folder() / "kernels"), **rest, **ours}

    def start(
        self,
        command: list[str],
        settings: Settings,
        snapshot: str | Path | None,
        timeout_seconds: float | None,
        *,
        quiet: bool,
    ) -> Report:
        """Run a command until it ends, and return its report."""
        if shutil.which(command[0]) is None:
            raise RunFailedError(f"cannot run {command[0]!r}: no such command")
        with (
            ended_by_signals(),
            tempfile.TemporaryDirectory(prefix="phantomgpu-") as folder,
            Path(folder, "output.log").open("wb") as output,
        ):
            settings.folder = folder
            quietly = {"stdout": output, "stderr": subprocess.STDOUT} if quiet else {}
            with started(command, env=self.environment(settings), **quietly) as process:
                try:
                    code = process.wait(timeout_seconds)
                except subprocess.TimeoutExpired:
                    raise too_long("the script", timeout_seconds) from None
            if snapshot is not None:
                for made in sorted(Path(folder).glob("*.pickle"))[:1]:
                    shutil.copyfile(made, snapshot)
            return self.report(Path(folder), "run", code, Path(folder, "output.log"))

    def report(self, folder: Path, name: str, code: int, log: Path | None = None) -> Report:
        """Return the report that the processes of a run left.

        Raises:
            RunFailedError: They left none.
            SetupNeededError: The installed torch has no CUDA code.
        """
        results = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}-*.json"))]
        if not results:
            text = log.read_text(errors="replace")[-2000:] if log else ""
            raise RunFailedError(
                f"the script ended with exit code {code} and left no report: it did not use CUDA, "
                f"or it was killed\n{text}".rstrip()
            )
        order = ("cannot run", "does not fit", "failed", "fits")
        result = min(results, key=lambda one: (order.index(one["status"]), -one.get("steps", 0)))
        if result["status"] == "cannot run":
            raise SetupNeededError(result["problem"])
        if result["status"] == "fits" and code:
            status = "does not fit" if result.get("out_of_memory") else "failed"
            result |= {"status": status, "problem": f"it ended with exit code {code}"}
        return build_report(
            result,
            self.kind,
            gpu=self.name,
            memory=self.memory,
            context=self.context,
            ranks=self.ranks,
            rank=self.rank,
            exit_code=CANNOT_RUN if result["status"] == "cannot run" else code,
        )
