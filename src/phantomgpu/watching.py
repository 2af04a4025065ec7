"""Inside a run, behind the import of torch: watch the script, and report what it took."""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import sys
import threading
import time
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from phantomgpu import bound, longest
from phantomgpu.analysis import History, addresses, analyse, is_distributed, line_of
from phantomgpu.child import DOES_NOT_FIT, Settings, end_with_parent, leave, save

WATCHDOG_SECONDS = 0.25
"""NCCL's watchdog frees tensors of collectives every 0.1 seconds; steps here are shorter."""


class Run:
    """What is seen of the run in this process: phases, and which tensors belong to whom."""

    current: Run | None = None

    def __init__(self, settings: Settings, library: Any) -> None:
        self.settings, self.library = settings, library
        self.name = ""
        self.steps: dict[int, int] = {}
        self.seen = History()
        self.problem: dict[str, Any] = {}
        self.finished = False
        self.stopped = ""
        self.work: bound.Work | None = None
        self.process = os.getpid()
        self.began = time.perf_counter()

    def start(self) -> None:
        """Watch the process from here on."""
        Run.current = self
        if not self.settings.cudnn:
            torch.backends.cudnn.enabled = False
            torch.backends.cuda.enable_cudnn_sdp(enabled=False)
        torch.cuda._lazy_call(self.begin)
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.after_step)
        if self.settings.longest:
            longest.start()
        self.join()
        if self.settings.seconds is not None:
            timer = threading.Timer(self.settings.seconds, self.interrupt)
            timer.daemon = True
            timer.start()
        sys.excepthook = self.failed
        atexit.register(self.ended)

    def join(self) -> None:
        """Play the other ranks."""
        if self.settings.ranks > 1:
            from phantomgpu import ranks, values

            ranks.start(self.settings.messages, values.Bytes(self.library, []))

    def begin(self) -> None:
        """Record allocations, once CUDA starts."""
        native = torch.cuda.memory.get_allocator_backend() == "native"
        if self.settings.details and native:  # cudaMallocAsync has no history
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
        self.compute()
        self.seen.phases.append((_now(), "step", 1))

    def compute(self) -> None:
        """Let small tensors have values, once; before a fork, all trials have it."""
        if self.work:
            return
        from phantomgpu import values

        self.work = bound.Work(self.library)
        self.work.is_busy = not self.settings.details  # then it counts nothing
        bytes_of = values.start(self.library, self.seen.modes, self.work)
        if bytes_of is not None and torch.distributed.is_available():
            from phantomgpu import ranks

            ranks.follow(bytes_of)

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
        is_first = done == first and first not in others  # the first optimizer to end a step
        if self.work and self.settings.details and is_first:
            self.work.end()
        if is_distributed():
            time.sleep(WATCHDOG_SECONDS)
        most = self.settings.steps
        is_main = threading.current_thread() is threading.main_thread()
        if most is not None and done >= most and is_main:
            self.stopped = line_of(sys._getframe())[0]
            self.finish("fits", 0)

    def interrupt(self) -> None:
        """End a run that takes longer than it may."""
        if torch.cuda.is_initialized():  # or else a process that starts others
            main = sys._current_frames()[threading.main_thread().ident or 0]
            self.stopped = line_of(main)[0]
            self.finish("fits", 0)

    def failed(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report what an exception that nobody caught means."""
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
        if self.finished or (code is None and not torch.cuda.is_initialized()):
            return  # the latter: a helper process
        self.finished = True
        # First, so that the report of a helper process cannot take its place if this one fails.
        save({"status": "failed", "problem": "its report failed"}, self.settings, self.name)
        result = {"status": status, **self.result(), **self.problem}
        if code is None:
            save(result, self.settings, self.name)
            return
        leave(code, result, self.settings, self.name)

    def result(self) -> dict[str, Any]:
        """Return the report of this process as plain values."""
        seconds = time.perf_counter() - self.began
        native = torch.cuda.memory.get_allocator_backend() == "native" and self.settings.details
        snapshot = torch.cuda.memory._snapshot() if native else {"device_traces": [[]]}
        values = sys.modules.get("phantomgpu.values")
        ranks = sys.modules.get("phantomgpu.ranks")
        host: dict[str, int] = getattr(torch.cuda, "host_memory_stats", dict)()
        return {
            **analyse(self.seen, snapshot["device_traces"]),
            "steps": max(self.steps.values(), default=0),
            "host_pinned": host.get("allocated_bytes.peak", 0),
            "host_managed": ctypes.c_size_t.in_dll(self.library, "phantom_most_managed").value,
            "torch": torch.__version__,
            "computes": hasattr(torch.library, "get_kernel"),
            "stopped": self.stopped,
            "unknown": [line for line, _ in values.UNKNOWN.most_common()] if values else [],
            "decides": [line for line, _ in values.DECIDES.most_common()] if values else [],
            "longest": [*longest.NOTES],
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
    run.settings = replace(run.settings, details=details)
    if run.work:
        run.work.is_busy = not details
    run.process, run.name, run.began = os.getpid(), name, time.perf_counter()


def _now() -> int:
    return time.time_ns() // 1000  # the clock of torch's history
