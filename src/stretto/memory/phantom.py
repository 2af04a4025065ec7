"""Ask the phantom: run the steps on torch's own CUDA build, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, final

import cloudpickle
import torch
from torch import nn

import phantomgpu
from phantomgpu import standins
from phantomgpu.gpus import context_bytes, find_gpu
from phantomgpu.searching import Method, Range
from stretto.batching.policy import size_text
from stretto.data import move_batch
from stretto.errors import FitError
from stretto.memory.amounts import parse_bytes, show_bytes
from stretto.memory.answer import NothingFitsError
from stretto.memory.examples import MOST_SHAPES, UnequalSamples, amount_of, batches_of
from stretto.memory.limits import MemoryLimit, stated
from stretto.memory.sharding import ShardFunction, apply
from stretto.memory.step import WholeStep, read_step, step_bytes

STEPS = 3
"""Steps of a size, and of each shape of a budget. The first creates the state of the optimizer
between blocks that it frees later; the third allocates as all later ones do."""


@final
@dataclass(frozen=True, slots=True)
class Question:
    """A kind of GPU, and how many ranks of it share a model."""

    gpu: str
    device_memory: str | int | None = None
    context: str | int | None = None
    ranks: int = 1
    shard: str | ShardFunction = "fsdp"

    def memory(self) -> tuple[MemoryLimit, dict[str, int], list[str]]:
        """Return what a step may use, what is taken outside of the allocator, and notes.

        Raises:
            FitError: the kind is not known, or the context leaves nothing.
        """
        try:
            kind = find_gpu(str(self.gpu))
        except phantomgpu.UnknownGPUError as error:
            raise FitError.bad("gpu", self.gpu, "there is no such kind", str(error)) from None
        whole, notes = int(kind.memory * 2**30), []
        limit = MemoryLimit(whole, f"what a program sees of an {kind.name}")
        if self.device_memory is not None:
            limit = stated(self.device_memory)
            if limit.bytes > whole:
                notes.append(f"warning: a program sees only {show_bytes(whole)} of an {kind.name}")
        context = context_bytes(kind) if self.context is None else parse_bytes(self.context)
        if context >= limit.bytes:
            raise FitError.cannot(
                f"find a batch size for {limit}",
                why=f"the CUDA context takes {show_bytes(context)}",
                instead="state more memory, or what the context takes, such as context='300MiB'",
            )
        return limit._replace(bytes=limit.bytes - context), {"the CUDA context": context}, notes


def setup_problem() -> str | None:
    """Return what has to be done before the phantom can answer; None if it can."""
    version, cuda = torch.__version__.partition("+")[0], torch.version.cuda or ""
    try:
        standins.check_system()
        is_own = cuda.partition(".")[0] in standins.CUDA
        if is_own or standins.has_cuda(standins.setup_folder(version)):
            return None
    except phantomgpu.PhantomError as error:
        return str(error)
    return "run 'phantomgpu setup' once (about 530 MB)"


def ask(
    question: Question,
    step: WholeStep | Callable[[], WholeStep],
    batch: Any,
    sizes: Range,
    *,
    usable: int,
    method: Method,
) -> tuple[int, dict[int, phantomgpu.Report]]:
    """Return the largest size that runs on the phantom, and the reports of all that were run.

    Args:
        question: the kind of GPU and the ranks.
        step: the step, which travels without the elements of its tensors; or a function that makes
            it, which is called there.
        batch: a micro-batch of any size, or a function that makes one; it travels as it is.
        sizes: the candidates.
        usable: the bytes that the allocator may reserve.
        method: how the search begins.

    Raises:
        NothingFitsError: the smallest candidate does not fit.
        FitError: the step cannot travel, or fails there.
    """
    try:
        answer = phantomgpu.search(
            _run,
            gpu=question.gpu,
            memory=usable + context_bytes(find_gpu(question.gpu)),
            ranks=question.ranks,
            steps=STEPS * MOST_SHAPES if isinstance(batch, UnequalSamples) else STEPS,
            smallest=sizes.smallest,
            largest=sizes.largest,
            multiple=sizes.multiple,
            powers=sizes.powers,
            method=method,
            details=False,
            args=(_Copied(step), cloudpickle.dumps(batch), question.shard, question.ranks),
        )
    except (phantomgpu.PhantomError, ValueError) as error:
        if callable(step):
            step()  # raises what is wrong with it
        raise FitError.cannot(
            "run the step on the phantom",
            why=str(error),
            instead="find it with real steps on the GPU, or run the script: phantomgpu run",
        ) from error
    if answer.largest is None:
        least = amount_of(batch)(sizes.number(sizes.first))
        raise NothingFitsError.cannot(
            f"fit {size_text(least)} into {show_bytes(usable)}",
            why=answer.report.lines()[0],
            instead="make the model or its samples smaller, or spread it over more ranks",
        )
    return answer.largest, answer.trials


@final
class _Copied:
    """A written step. Unpickling imports what it needs: once, before a process forks for each size.

    For a model of transformers, that takes 3 seconds.
    """

    def __init__(self, step: WholeStep | Callable[[], WholeStep]) -> None:
        self.source = step if callable(step) else step_bytes(step)
        self.data = b""

    def __setstate__(self, state: dict[str, Any]) -> None:
        source = state["source"]
        self.data = step_bytes(source()) if callable(source) else source
        with suppress(Exception):  # each trial reads it again and reports what fails
            _register(read_step(self.data, "meta").model)


def _register(model: nn.Module) -> None:
    """Do what constructors of transformers do for a class, because unpickling calls none.

    Without it, the outputs of layers, such as those of routers, are not recorded.
    """
    for module in model.modules():
        if getattr(module, "_can_record_outputs", None):
            from transformers.utils import output_capturing as capturing

            capturing._CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def _sharded(data: bytes, shard: Any, ranks: int) -> WholeStep:
    """Return the step, spread over ranks; the device never has the whole model, if possible."""
    if ranks > 1 and shard != "ddp":
        # A function of the user's may want weights on the device.
        with suppress(Exception) if callable(shard) else nullcontext():
            step: WholeStep = read_step(data, "cuda", parameters="meta")
            apply(step.step, shard, ranks, device="cuda")
            return step
    step = read_step(data, "cuda")
    if ranks > 1:
        apply(step.step, shard, ranks, device="cuda")
    return step


def _run(size: int, copied: _Copied, batch: bytes, shard: Any, ranks: int) -> None:
    """Run the steps of one size; called in the process that has the phantom."""
    if ranks > 1:
        torch.distributed.init_process_group("nccl")
    step = _sharded(copied.data, shard, ranks)
    made = cloudpickle.loads(batch)
    for one in batches_of(made, size) * STEPS:
        step.run(move_batch(one, "cuda"))
