"""Inside a run, behind the import of torch: watch the script, and report what it took."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import os
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch.optim import optimizer as optimizers

from phantomgpu import bound, longest
from phantomgpu.analysis import History, addresses, analyse, is_distributed, line_of
from phantomgpu.child import DOES_NOT_FIT, Settings, end_with_parent, leave, save
from phantomgpu.report import NOTHING

WATCHDOG_SECONDS = 0.25
"""NCCL's watchdog frees tensors of collectives every 0.1 seconds; steps here are shorter."""
LAUNCH = 64
"""What a launch adds to the clock of the stand-ins; a question whether it is done adds 1."""
PATIENCE = 10
"""So many times as many steps are waited for optimizers that step more rarely."""
RESETS = ("cuda_resetPeakMemory", "cuda_resetAccumulatedMemory", "accelerator_resetPeak")
"""Functions of torch with which scripts reset its peaks and counts."""
NOISE = 1024
"""Bytes that a step may keep, as of a loss in a list."""


class Run:
    """What is seen of the run in this process: phases, and which tensors belong to whom."""

    current: Run | None = None

    def __init__(self, settings: Settings, library: Any) -> None:
        self.settings, self.library = settings, library
        self.name = ""
        self.steps: dict[int, int] = {}
        self.idle = 0
        """Steps of optimizers since whose last one nothing was launched on the device."""
        self.launched = 0
        self.optimizers: list[weakref.ref[Any]] = []
        self.most: dict[int, Counter[str]] = defaultdict(Counter)
        """The peaks of each device, which scripts may reset."""
        self.highest: dict[int, list[int]] = defaultdict(list)
        """The most bytes until the end of each step of an optimizer."""
        self.doubts: dict[str, Any] = {}
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
        for name in (f"_{one}Stats" for one in RESETS if hasattr(torch._C, f"_{one}Stats")):
            setattr(torch._C, name, partial(self.reset, getattr(torch._C, name)))
        sys.excepthook = self.failed
        sys.exit = self.left
        atexit.register(self.ended)

    def join(self) -> None:
        """Play the other ranks."""
        if self.settings.ranks > 1:
            from phantomgpu import ranks, values

            ranks.start(self.settings.messages, values.Bytes(self.library, []))

    def begin(self) -> None:
        """Record allocations, once CUDA starts."""
        if "compile_worker" not in sys.argv[0]:  # torch's own start CUDA, and allocate nothing
            save({"status": "lost"}, self.settings, self.name)  # until there is a report
        native = torch.cuda.memory.get_allocator_backend() == "native"
        if self.settings.details and native:  # cudaMallocAsync has no history
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
            # The script's own would end it, or make it shorter.
            torch._C._cuda_record_memory_history = lambda *_, **__: None
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
        most = self.settings.steps
        is_main = threading.current_thread() is threading.main_thread()
        if not self.has_launched():
            self.idle += 1
            counted = max(self.steps.values(), default=0)
            if most is not None and is_main and self.idle >= most + PATIENCE * counted:
                problem = f"{self.idle} optimizer steps, and {NOTHING}, or write --whole"
                leave(0, {"status": "unused", "problem": problem}, self.settings, self.name)
            return
        done = self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        self.seen.phases.append((_now(), "step", done + 1))
        first, *others = sorted(self.steps.values(), reverse=True)
        is_first = done == first and first not in others  # the first optimizer to end a step
        if self.work and self.settings.details and is_first:
            self.work.end()
        if is_distributed():
            time.sleep(WATCHDOG_SECONDS)
        now = self.peaks(torch.cuda.current_device())
        self.highest[id(optimizer)].append(now["requested_bytes.all.peak"])
        if most is not None and done >= most and is_main:
            waiting = self.waiting(most)
            if waiting and done < PATIENCE * most:
                return
            self.doubts = {"waiting": waiting, "grew": growth(self.highest[id(optimizer)])}
            self.stopped = line_of(sys._getframe())[0]
            self.finish("fits", 0)

    def has_launched(self) -> bool:
        """Return whether something was launched on the device since the last step."""
        before, now = self.launched, ctypes.c_size_t.in_dll(self.library, "phantom_now").value
        self.launched = now
        return torch.cuda.is_initialized() and now - before >= LAUNCH

    def waiting(self, most: int) -> list[str]:
        """Return the kinds of optimizers with weights of their own that have done fewer steps."""
        is_optimizer = optimizers.Optimizer
        self.optimizers = self.optimizers or [
            weakref.ref(one) for one in gc.get_objects() if is_optimizer in type(one).__mro__
        ]
        there = [one for one in (reference() for reference in self.optimizers) if one is not None]
        weights = {id(one): weights_of(one) for one in there}
        done = {number for one in self.steps for number in weights.get(one, ())}
        return sorted(
            type(one).__name__
            for one in there
            if self.steps.get(id(one), 0) < most
            and (id(one) in self.steps or weights[id(one)] - done)
        )

    def peaks(self, device: int) -> Counter[str]:
        """Return the most bytes of a device until now, whatever the script has reset."""
        stats = torch.cuda.memory_stats(device)
        ends = ("bytes.all.peak", "num_ooms")
        now = {name: size for name, size in stats.items() if name.endswith(ends)}
        self.most[device] |= Counter(now)
        return self.most[device]

    def reset(self, real: Any, device: int) -> None:
        """Let the script reset its peaks; ours stay."""
        self.peaks(device)
        real(device)

    def left(self, *code: Any) -> NoReturn:
        """Leave as `sys.exit` does, and note whether that is because memory ran out."""
        if ran_out(sys.exc_info()[1]):
            self.problem = {"left_out_of_memory": True}
        raise SystemExit(*code)

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
        if ran_out(error):
            self.finish("does not fit", DOES_NOT_FIT)
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
        found = analyse(self.seen, snapshot["device_traces"], self.peaks)
        return {
            **found,
            **self.doubts,
            "place": [os.environ.get("CUDA_VISIBLE_DEVICES"), found["device"]],
            "idle": self.idle,
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


def ran_out(error: BaseException | None) -> bool:
    """Return whether memory ran out; frameworks wrap the error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "no room for NCCL" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def weights_of(optimizer: Any) -> set[int]:
    """Return the weights on the device that an optimizer trains."""
    groups = getattr(optimizer, "param_groups", ())  # wrappers of optimizers may have none
    weights = (one for group in groups for one in group["params"])
    return {id(one) for one in weights if one.is_cuda and one.requires_grad}


def growth(peaks: list[int]) -> int:
    """Return by how many bytes the last step raised the peak; the first always does."""
    before, last = [0, *peaks][-2:]
    return last - before if last - before > NOISE else 0


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
