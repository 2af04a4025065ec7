"""Inside a run: gives torch the phantom when it is imported, and reports when the run ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.machinery
import importlib.util
import json
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

from phantomgpu import bound, longest, names, standins
from phantomgpu.analysis import History, addresses, analyse, is_distributed, line_of
from phantomgpu.errors import PhantomError, SetupNeededError
from phantomgpu.kernels import set_hook

WATCHDOG_SECONDS = 0.25
"""NCCL's watchdog frees tensors of collectives every 0.1 seconds; steps here are shorter."""
DOES_NOT_FIT = 3
CANNOT_RUN = 4


@dataclass
class Settings:
    """What the run that started this process wants; travels as JSON in the environment."""

    folder: str
    process: int = 0
    """The process that waits for this one."""
    steps: int | None = 3
    ranks: int = 1
    rank: int = 0
    real: bool = False
    """Whether all processes that the script starts run, each on a device of its own."""
    cudnn: bool = False
    modules: bool = False
    values: bool = True
    snapshot: bool = False
    messages: str = ""
    """The folder of what ranks send to each other."""
    details: bool = True
    seconds: float | None = None
    """After how many seconds the script ends, with a report of what was seen until then."""
    longest: bool = False
    """Let loaders give their longest samples first."""
    path: list[str] = field(default_factory=list)


def install() -> None:
    """Wait for the import of torch, unless the run is over and only its environment was kept."""
    settings = Settings(**json.loads(os.environ["PHANTOMGPU_RUN"]))
    if not Path(settings.folder).is_dir():
        return
    if os.getppid() == settings.process:
        end_with_parent()
    check_rank(settings)
    sys.path += [entry for entry in settings.path if entry not in sys.path]
    sys.meta_path.insert(0, _TorchFinder(settings))


def check_rank(settings: Settings) -> None:
    """Let one rank live of those that a launcher such as torchrun starts: it plays the others."""
    rank, world = (int(os.environ.get(one) or 0) for one in ("RANK", "WORLD_SIZE"))
    if settings.real or not world:
        return
    if world != settings.ranks:
        problem = f"the launcher starts {world} ranks; write --ranks {world}: one of them runs"
        _leave(CANNOT_RUN, {"status": "cannot run", "problem": problem}, settings)
    if rank != settings.rank:
        os._exit(0)


def end_with_parent() -> None:
    """Let the system end this process when its parent ends, whatever ends that one."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


class _TorchFinder(MetaPathFinder):
    """Loads the stand-ins before torch, and starts the run after it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del target
        if name in sys.modules or name not in ("torch", *THEN):
            return None
        if name == "torch":
            with _reported(self.settings):
                spec = _find_cuda_torch()
        else:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:  # `importlib.util.find_spec` may ask, too
            spec.loader = _Loader(spec.loader, self.settings, THEN.get(name))
        return spec


def _find_cuda_torch() -> importlib.machinery.ModuleSpec | None:
    """Find torch with CUDA code: the installed one, or the one that `phantomgpu setup` made."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    version, cuda = _versions(folder)
    if cuda.partition(".")[0] in standins.CUDA and standins.has_cuda(folder.parent):
        return spec
    standins.check_system()
    made = standins.setup_folder(version)
    if not standins.has_cuda(made):
        raise SetupNeededError(
            f"cannot run: torch {version} is installed {f'for CUDA {cuda}' * bool(cuda)}"
            f"{'without CUDA code' * (not cuda)}, and the stand-ins are for CUDA 12 and 13; run "
            "`phantomgpu setup` once (it downloads the CUDA build of that version, about "
            "530 MB, and leaves your environment as it is)"
        )
    if str(made) not in sys.path:
        sys.path.insert(0, str(made))
    return importlib.machinery.PathFinder.find_spec("torch")


def _versions(folder: Path) -> tuple[str, str]:
    """Return the version of the torch in a folder, and of the CUDA that it was built for."""
    text = (folder / "version.py").read_text()
    found = dict(re.findall(r"^(__version__|cuda)\b.*= '(.*)'", text, re.MULTILINE))
    if "__version__" not in found:
        raise PhantomError(f"cannot find the version of the torch in {folder}")
    return found["__version__"].partition("+")[0], found.get("cuda", "")


def _hide_values(dynamo: ModuleType) -> None:
    del dynamo
    if "phantomgpu.values" in sys.modules:
        sys.modules["phantomgpu.values"].hide()


THEN = {"triton.knobs": set_hook, "torch._dynamo": _hide_values}
"""What follows the import of a module."""


class _Loader(Loader):
    """Runs a module as its own loader does, and something behind it: for torch, the run."""

    def __init__(
        self, loader: Loader, settings: Settings, then: Callable[[ModuleType], None] | None
    ) -> None:
        self.loader, self.settings, self.then = loader, settings, then or self.start

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "torch":
            assert module.__file__
            with _reported(self.settings):
                folder = standins.build(Path(module.__file__).parent)
                self.library = standins.load(folder)
            os.environ.setdefault("TRITON_LIBCUDA_PATH", str(folder))
        self.loader.exec_module(module)
        self.then(module)

    def start(self, torch: ModuleType) -> None:
        del torch
        Run(self.settings, self.library).start()


@contextlib.contextmanager
def _reported(settings: Settings) -> Iterator[None]:
    """End the process, with a report, where a phantom is not possible."""
    try:
        yield
    except PhantomError as error:
        _leave(CANNOT_RUN, {"status": "cannot run", "problem": str(error)}, settings)


class Run:
    """What is seen of the run in this process: phases, and which tensors belong to whom."""

    current: Run | None = None

    def __init__(self, settings: Settings, library: Any) -> None:
        self.settings, self.library = settings, library
        self.name = ""
        self.steps: dict[int, int] = {}
        self.seen = History()
        self.problem: dict[str, Any] = {}
        self.finished = self.computes = False
        self.stopped = ""
        self.work: bound.Work | None = None
        self.process = os.getpid()
        self.began = time.perf_counter()

    def start(self) -> None:
        """Watch the process from here on."""
        import torch
        from torch.optim import optimizer

        Run.current = self
        if not self.settings.cudnn:
            torch.backends.cudnn.enabled = False
            torch.backends.cuda.enable_cudnn_sdp(enabled=False)
        torch.cuda._lazy_call(self.begin)
        optimizer.register_optimizer_step_pre_hook(self.before_step)
        optimizer.register_optimizer_step_post_hook(self.after_step)
        if self.settings.modules:
            names.follow(self.seen.spans)
        if self.settings.longest:
            longest.start()
        self.join()
        if self.settings.seconds is not None:
            # In the main thread, which must not train beside the report.
            signal.signal(signal.SIGALRM, self.interrupt)
            signal.setitimer(signal.ITIMER_REAL, self.settings.seconds)
        sys.excepthook = self.failed
        atexit.register(self.ended)

    def join(self) -> None:
        """Play the other ranks."""
        if self.settings.ranks > 1:
            from phantomgpu import ranks

            ranks.start(self.settings.messages)

    def begin(self) -> None:
        """Record allocations, once CUDA starts."""
        import torch

        native = torch.cuda.memory.get_allocator_backend() == "native"
        if self.settings.details and native:  # cudaMallocAsync has no history
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
        if self.settings.values:
            from phantomgpu import values

            self.work = bound.Work(self.library) if self.settings.details else None
            bytes_of = values.start(self.library, self.seen.modes, self.work)
            self.computes = bytes_of is not None
            if bytes_of is not None and torch.distributed.is_available():
                from phantomgpu import ranks

                ranks.follow(bytes_of)
        self.seen.phases.append((_now(), "step", 1))

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """Note the gradients, which may be gone after the step."""
        if not self.settings.details:
            return
        grads = (p.grad for group in optimizer.param_groups for p in group["params"])
        self.seen.owners.append((_now(), "gradients", addresses(grads)))
        self.seen.phases.append((_now(), "optimizer", self.steps.get(id(optimizer), 0) + 1))

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Count the step; the last one ends the run."""
        done = self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        self.seen.phases.append((_now(), "step", done + 1))
        first, *others = sorted(self.steps.values(), reverse=True)
        if self.work and done == first and first not in others:  # the first optimizer to end a step
            self.work.end()
        if is_distributed():
            time.sleep(WATCHDOG_SECONDS)
        most = self.settings.steps
        is_main = threading.current_thread() is threading.main_thread()
        if most is not None and done >= most and is_main:
            self.stopped = line_of(sys._getframe())[0]
            self.finish("fits", 0)

    def interrupt(self, _number: int, frame: FrameType | None) -> None:
        """End a run that takes longer than it may."""
        import torch

        if torch.cuda.is_initialized():  # or else a process that starts others
            self.stopped = line_of(frame)[0]
            self.finish("fits", 0)

    def failed(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report what an exception that nobody caught means."""
        import torch

        sys.__excepthook__(kind, error, trace)
        problem = f"{kind.__name__}: {error}"
        if "triton" in problem.lower() and importlib.util.find_spec("triton") is None:
            problem = f"Triton is not here; run `phantomgpu setup --triton` once ({problem})"
        self.problem = {"problem": problem}
        cause: BaseException | None = error
        while cause is not None:  # frameworks wrap it
            if isinstance(cause, torch.OutOfMemoryError) or "no room for NCCL" in str(cause):
                self.finish("does not fit", DOES_NOT_FIT)
            cause = cause.__cause__ or cause.__context__
        self.finish("failed", 1)

    def ended(self) -> None:
        """Report a script that ended by itself."""
        if os.getpid() == self.process:
            self.finish("fits", None)

    def finish(self, status: str, code: int | None) -> None:
        """Write what is known for the process that started this one, and leave."""
        import torch

        if self.finished or (code is None and not torch.cuda.is_initialized()):
            return  # the latter: a helper process
        self.finished = True
        # First, so that the report of a helper process cannot take its place if this one fails.
        _save({"status": "failed", "problem": "its report failed"}, self.settings, self.name)
        result = {"status": status, **self.result(), **self.problem}
        if code is None:
            _save(result, self.settings, self.name)
            return
        _leave(code, result, self.settings, self.name)

    def result(self) -> dict[str, Any]:
        """Return the report of this process as plain values."""
        import torch

        seconds = time.perf_counter() - self.began
        native = torch.cuda.memory.get_allocator_backend() == "native" and self.settings.details
        snapshot = torch.cuda.memory._snapshot() if native else {"device_traces": [[]]}
        if self.settings.snapshot:
            with Path(self.settings.folder, f"{self.process}.pickle").open("wb") as file:
                pickle.dump(snapshot, file)
        values = sys.modules.get("phantomgpu.values")
        ranks = sys.modules.get("phantomgpu.ranks")
        host: dict[str, int] = getattr(torch.cuda, "host_memory_stats", dict)()
        return {
            **analyse(self.seen, snapshot["device_traces"]),
            "steps": max(self.steps.values(), default=0),
            "host_pinned": host.get("allocated_bytes.peak", 0),
            "host_managed": ctypes.c_size_t.in_dll(self.library, "phantom_most_managed").value,
            "torch": torch.__version__,
            "computes": self.computes,
            "stopped": self.stopped,
            "unknown": [line for line, _ in values.UNKNOWN.most_common()] if values else [],
            "decides": [line for line, _ in values.DECIDES.most_common()] if values else [],
            "longest": longest.NOTES if self.settings.longest else [],
            "compiled": "torch._inductor.compile_fx" in sys.modules,
            "cudnn": torch.backends.cudnn.enabled,
            "distributed": is_distributed(),
            "peers": list(ranks.PEERS) if ranks else [],
            "seconds": round(seconds, 2),
            "limit": self.settings.seconds if self.stopped else None,
            "assumed": ctypes.c_size_t.in_dll(self.library, "phantom_assumed").value,
            "work": self.work.last if self.work else {},
            "nccl": ctypes.c_size_t.in_dll(self.library, "phantom_nccl").value,
        }


def start_trial(name: str, *, details: bool) -> None:
    """Watch this process anew, after a fork."""
    run = Run.current
    assert run
    end_with_parent()
    run.join()
    run.settings.details = details
    if run.work:
        run.work.is_busy = not details  # then it counts nothing
    run.process, run.name, run.began = os.getpid(), name, time.perf_counter()


def _now() -> int:
    return time.time_ns() // 1000  # the clock of torch's history


def _save(result: dict[str, Any], settings: Settings, name: str = "") -> None:
    rank = os.environ.get("RANK", "0")
    file = Path(settings.folder) / f"{name or 'run'}-{int(rank):06d}-{os.getpid()}.json"
    file.write_text(json.dumps(result))


def _leave(code: int, result: dict[str, Any], settings: Settings, name: str = "") -> NoReturn:
    """Write the result and end the process at once: nothing of the script runs any more."""
    _save(result, settings, name)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
