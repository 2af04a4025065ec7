"""Start a script or a function in a process that has a phantom."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from phantomgpu import files, standins
from phantomgpu.child import Settings
from phantomgpu.errors import RunFailedError, SetupNeededError
from phantomgpu.gpus import GIB, context_bytes, driver_facts, find_gpu, parse_memory
from phantomgpu.report import NOTHING, Report, build_report

scratch = partial(tempfile.TemporaryDirectory, prefix="phantomgpu-")
Process: TypeAlias = "subprocess.Popen[Any]"
BOOT = Path(__file__).parent / "boot"
LOCAL_RANKS, MOST_DEVICES, MOST_STAGES = 8, 16, 32
WORST = ("cannot run", "does not fit", "failed", "fits", "unused", "lost")
"""How runs end; the first that happened is reported. Lost: the GPU was used, without a report."""
LAUNCHER = re.compile(
    r"(?:(?:.*/)?env\n)?(?:\w+=.*\n)*(?:.*python[\d.]*\n(?:-[A-Za-z]+\n)*)?"
    r"(?:-m\n(?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch)\n|"
    r"(?:.*/)?(?:torchrun|deepspeed|accelerate\nlaunch)\n)((?:(?!.*\.py\n|(?:-m|--module)\n).*\n)*)"
)
"""A command, one word a line: a launcher and its own options. What follows is the script's."""
NODES = re.compile(r"^--(?:nnodes|num[-_]machines|num[-_]nodes)[=\n](?!1\b)\d+", re.MULTILINE)
GRACE_SECONDS = 5
"""How long a process has to end by itself."""
REPORT_SECONDS = 60
"""How long a process has to make its report, once its time is over."""


def run(
    script: str | Path | Sequence[str] | Callable[..., Any],
    *,
    gpu: str,
    memory: int | str | None = None,
    ranks: int = 1,
    rank: int = 0,
    every_stage: bool = False,
    steps: int | None = 3,
    devices: int | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    cudnn: bool = False,
    longest: bool = False,
    timeout_seconds: float | None = None,
    variables: dict[str, str] | None = None,
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
        every_stage: Run a rank of each stage of a pipeline, and report the fullest.
        steps: After how many optimizer steps the script ends; None: it runs to its end.
        devices: The number of GPUs that the process sees; 1, or up to 8 with ranks.
        args: Arguments of the function, or of the script.
        kwargs: Keyword arguments of the function.
        cudnn: Leave cuDNN on; what needs it is then refused.
        longest: Let every DataLoader that knows its samples give the longest ones in each batch.
        timeout_seconds: How long the script may take. With `steps=None`, the report is then what
            was seen until the limit.
        variables: Environment variables of the script.
        quiet: Do not show what the script prints.

    Returns:
        What the run took. A run that does not fit is a report, not an error.

    Raises:
        RunFailedError: The run left no report, because the process was killed or used no CUDA.
        SetupNeededError: The installed torch has no CUDA code.
    """
    standins.check_system()
    how: dict[str, Any] = {"steps": steps, "ranks": ranks, "cudnn": cudnn, "longest": longest}
    seconds = timeout_seconds if steps is None else None
    settings = Settings(**how, real=devices is not None, seconds=seconds)
    session = Session(gpu, memory, settings, devices)
    _within("rank", rank, 0, ranks - 1)
    session.variables = variables or {}
    with command_of(script, args, kwargs) as command, scratch() as messages:
        session.settings = replace(settings, messages=messages)
        start = partial(session.start, command, timeout_seconds, quiet=quiet)
        report = start(rank)
        if every_stage:
            report = fullest(session.others, report, start)
    if callable(script):
        return report
    how |= {"gpu": gpu, "memory": memory, "rank": report.rank, "timeout_seconds": timeout_seconds}
    how |= {"script": command, "folder": str(Path.cwd()), "devices": devices}
    return replace(report, again=how)


def fullest(ran: dict[int, Report], first: Report, start: Callable[[int], Report]) -> Report:
    """Run the ranks that a rank sends to, and theirs; return the report of the fullest."""
    note, waiting = "", list(first.peers)
    if not waiting and first.ranks > 1:
        waiting = [first.ranks - 1 if first.rank == 0 else 0]
        note = f"no rank sent to another: only ranks {first.rank} and {waiting[0]} were run"
    while waiting and len(ran) < MOST_STAGES:
        rank = waiting.pop(0)
        report = ran[rank] if rank in ran else start(rank)
        done = {*ran, *waiting}
        waiting += [one for one in report.peers if one not in done]
    if waiting:
        note = f"ranks {', '.join(map(str, waiting))} and those behind them were not run"
    report = min(ran.values(), key=lambda one: (WORST.index(one.status), -one.peak_reserved))
    stages = [(rank, one.peak_allocated, one.peak_reserved) for rank, one in sorted(ran.items())]
    return replace(report, stages=stages, notes=(*report.notes, *filter(None, [note])))


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
        python = [sys.executable] if script and str(script[0]).endswith(".py") else []
        yield [*python, *script, *map(str, args)]
    else:
        import cloudpickle

        with scratch() as folder:
            file = Path(folder, "function.pickle")
            files.write(file, cloudpickle.dumps((script, tuple(args), kwargs or {})))
            yield [sys.executable, str(BOOT / "call.py"), str(file)]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as an error does: what was started ends before."""
    is_main = threading.current_thread() is threading.main_thread()
    both = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    numbers = [one for one in both if signal.getsignal(one) is signal.SIG_DFL]

    def leave(number: int, _frame: object) -> NoReturn:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    with ExitStack() as stack:
        for one in numbers:
            signal.signal(one, leave)
            stack.callback(signal.signal, one, signal.SIG_DFL)
        yield


@contextmanager
def started(command: list[str], **how: Any) -> Iterator[Process]:
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
    more = f"for more, write --timeout {2 * (seconds or 0):g} (timeout_seconds in Python)"
    return RunFailedError(f"{what} did not end within {seconds:g} seconds; {more}")


def rank_environment(rank: int, ranks: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, on nodes of eight GPUs."""
    local = min(ranks, LOCAL_RANKS)
    node, beside = rank // local, min(local, ranks - rank // local * local)
    numbers = {"LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": beside, "MASTER_PORT": 29500}
    numbers |= {"RANK": rank, "ROLE_RANK": rank, "WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks}
    numbers |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": -(-ranks // local)}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _within(name: str, value: int, least: int, most: int, unit: str = "") -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}; write {least} to {most}{unit}")


class Session:
    """A kind of GPU, and how processes that see it are started."""

    def __init__(
        self, gpu: str, memory: int | str | None, settings: Settings, devices: int | None = None
    ) -> None:
        self.kind = kind = find_gpu(gpu)
        if memory is None:
            memory = int(kind.memory * GIB)
        self.memory = parse_memory(memory) if isinstance(memory, str) else memory
        count = min(settings.ranks, LOCAL_RANKS) if devices is None else devices
        _within("memory", self.memory, 1 << 20, 1 << 40, " bytes, such as '24GiB'")
        _within("ranks", settings.ranks, 1, 1 << 20)
        _within("devices", count, 1, MOST_DEVICES)
        self.name = f"an {kind.name}" if kind.name[0] == "N" else f"a {kind.name}"
        self.settings = settings
        self.variables: dict[str, str] = {}
        self.others: dict[int, Report] = {}
        self.context = min(context_bytes(kind), self.memory)
        self.facts = driver_facts(kind, memory=self.memory, context=self.context, devices=count)

    def environment(self, folder: str, rank: int = 0) -> dict[str, str]:
        """Return the environment of a process with a phantom, which writes into a folder."""
        found = [entry for entry in sys.path if entry and entry != str(BOOT)]
        own = {"folder": folder, "rank": rank, "process": os.getpid(), "path": found}
        path = [str(BOOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {
            "PHANTOMGPU_RUN": json.dumps(asdict(self.settings) | own),
            "PHANTOMGPU_FACTS": self.facts,
            "PYTHONPATH": os.pathsep.join(path),
            "TORCH_COMPILE_CACHE_KEY_TAG": "phantomgpu",  # a real GPU must not find these kernels
            "TMPDIR": folder,  # what a script that is ended leaves behind goes with it
        }
        if self.settings.ranks > 1:
            ours |= rank_environment(rank, self.settings.ranks)
        hidden = ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        rest = {name: value for name, value in os.environ.items() if name not in hidden}
        kernels = {"TORCHINDUCTOR_CACHE_DIR": str(standins.cache_folder() / "kernels")}
        return {**kernels, **rest, **self.variables, **ours}

    def start(
        self, command: list[str], seconds: float | None, own: int = 0, *, quiet: bool = True
    ) -> Report:
        """Run a command until it ends, beside the ranks whose messages it needs.

        Returns:
            The report of its own rank; those of all that ran are in `others`.
        """
        if shutil.which(command[0]) is None:
            raise RunFailedError(f"cannot run {command[0]!r}: no such command")
        launcher = LAUNCHER.match("".join(f"{one}\n" for one in command))
        nodes = NODES.search(launcher[1]) if launcher else None
        if nodes and self.settings.messages:
            instead = "leave it and its options out: --ranks 16 -- python train.py"
            given = nodes[0].replace("\n", " ")
            why = f"cannot run {given!r}: the launcher waits for other machines"
            raise RunFailedError(f"{why}; {instead}")
        # With a time limit of its own, the script ends itself, with a report.
        more = 0 if self.settings.seconds is None else REPORT_SECONDS
        began = time.monotonic()
        with ended_by_signals(), ExitStack() as stack:
            runs = {own: self.launch(stack, command, own, quiet=quiet)}
            while left := [one for one, _ in runs.values() if one.poll() is None]:
                with suppress(subprocess.TimeoutExpired):
                    left[0].wait(0.05)
                if seconds and time.monotonic() - began > seconds + more:
                    raise too_long("the script", seconds)
                for rank in self.wanted(runs):
                    runs[rank] = self.launch(stack, command, rank, quiet=True)
            for rank, (one, folder) in runs.items():
                report = self.report(folder, "run", one.wait(), folder / "output.log")
                self.others[rank] = replace(report, rank=rank)
        return self.others[own]

    def wanted(self, runs: dict[int, tuple[Process, Path]]) -> list[int]:
        """Say which ranks ended, and return those that others wait for."""
        if not self.settings.messages:
            return []
        for rank, (one, _) in runs.items():
            if one.poll() is not None:
                Path(self.settings.messages, f"ended-{rank}").touch()
        found = [int(file.name[7:]) for file in Path(self.settings.messages).glob("wanted-*")]
        return [rank for rank in found if rank not in runs and rank not in self.others]

    def launch(
        self, stack: ExitStack, command: list[str], rank: int, *, quiet: bool
    ) -> tuple[Process, Path]:
        """Start a process that plays a rank, in its own folder; the stack ends it."""
        folder = Path(stack.enter_context(scratch()))
        output = stack.enter_context(files.log_file(folder))
        quietly = {"stdout": output, "stderr": subprocess.STDOUT} if quiet else {}
        process = started(command, env=self.environment(str(folder), rank), **quietly)
        return stack.enter_context(process), folder

    def beside(self, result: dict[str, Any], rest: list[dict[str, Any]]) -> dict[str, str]:
        """Return what other processes leave in doubt, each with its note."""
        found: dict[str, str] = {}
        if lost := sum(one["status"] == "lost" for one in rest):
            tag = f"{lost} without a report"
            found[tag] = f"processes that used the GPU, {tag}: what they took was not seen"
        place = result.get("place")
        if same := [one for one in rest if one.get("peak_reserved") and one["place"] == place]:
            total = sum(one["peak_reserved"] + self.context for one in [result, *same])
            tag, sizes = f"{1 + len(same)} processes", f"{total / GIB:.2f} GiB with their contexts"
            found[tag] = f"{tag} used this GPU: if at a time, {sizes}, of {self.memory / GIB:.2f}"
        return found

    def report(self, folder: Path, name: str, code: int, log: Path | None = None) -> Report:
        """Return the report that the processes of a run left.

        Raises:
            RunFailedError: They left none.
            SetupNeededError: The installed torch has no CUDA code.
        """
        found = sorted(folder.glob(f"{name}-*.json"))
        results = [files.read_json(file, "report", status=str) for file in found]
        results.sort(key=lambda one: (WORST.index(one["status"]), -one.get("peak_allocated", 0)))
        result = results[0] if results else {"status": "lost"}
        if result["status"] == "fits" and not code and result.get("peak_reserved") == 0:
            result = {"status": "unused", "problem": NOTHING}
        if result["status"] in ("unused", "lost"):
            text = files.read(log, last=2000).decode(errors="replace") if log else ""
            why = result.get("problem") or _ended(code, used=bool(results))
            raise RunFailedError(f"the script left no report: {why}\n{text}".rstrip())
        if result["status"] == "cannot run":
            raise SetupNeededError(result["problem"])
        if result["status"] == "fits" and code:
            ran_out = any(one.get("left_out_of_memory") for one in results)
            problem = f"it ended with exit code {code}"
            if result.get("out_of_memory") and not ran_out:
                problem += "; it had run out of memory before, and caught the error"
            result |= {"status": "does not fit" if ran_out else "failed", "problem": problem}
        others = {"others": self.beside(result, results[1:])}
        how = {"memory": self.memory, "context": self.context, "ranks": self.settings.ranks}
        return build_report(result | others, self.kind, gpu=self.name, exit_code=code, **how)


def _ended(code: int, *, used: bool) -> str:
    """Say how a process ended that left no report."""
    if code < 0:
        killed = ", perhaps because this machine has too little memory" * (code == -signal.SIGKILL)
        return f"{signal.Signals(-code).name} ended it{killed}"
    if used:
        return f"it used CUDA, and ended at once with exit code {code}, as by os._exit"
    if code:
        return f"it failed with exit code {code} before it used CUDA"
    return "it ended without using CUDA; choose the GPU, as by its option --device cuda"
