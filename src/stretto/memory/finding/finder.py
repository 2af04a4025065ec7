"""`find_batch_size`: the largest micro-batch that fits, found by the cheapest method."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

from stretto.data import move_batch
from stretto.errors import FitError, shown
from stretto.memory.amounts import margin_of
from stretto.memory.examples import resize_batch
from stretto.memory.finding.agreement import Agreement
from stretto.memory.finding.methods import Finder, Spread
from stretto.memory.finding.result import Answer
from stretto.memory.finding.space import context_bytes, memory_limit
from stretto.memory.prediction.cuda.gpu import gpu_named
from stretto.memory.prediction.cuda.sharding import Shard
from stretto.memory.search import MAXIMUM, CandidateSizes
from stretto.memory.step import WholeStep
from stretto.runtime import TrainStep
from stretto.timing.grammar import checked_whole

FindMethod = Literal["auto", "predict", "probe", "try", "halve"]
MARGIN = "1.5%"
"""The default margin: run-to-run variation of a step on a busy machine."""
MARGIN_OF_PREDICTIONS = "5%"
"""The default without a step on the device: buffers of libraries, fragments."""
MARGIN_OF_CUDA = "1%"
"""The default for a prediction of CUDA's allocator. All answers of `bench/results/cuda_memory.txt`
fit with it."""
MARGIN_OF_PROBES = "25%"
"""The minimum if a probe answers for an absent device, without a step of that size: large batches
may use other kernels."""


def find_batch_size(
    step: TrainStep | WholeStep,
    batch: Any,
    *,
    accumulation: int = 1,
    measures_noise: bool = False,
    method: FindMethod = "auto",
    device_memory: str | int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    gpu: str | None = None,
    context: str | int | None = None,
    world_size: int | None = None,
    shard: str | Shard = "fsdp",
    margin: str | int | None = None,
    minimum: int = 1,
    maximum: int = MAXIMUM,
    multiple_of: int = 1,
    power_of_two: bool = False,
    check: bool = False,
    agree_minimum: Callable[[int], int] | None = None,
) -> Answer:
    """Return the largest micro-batch whose training step fits into memory.

    `auto` starts with the cheapest method. It predicts; if fake tensors cannot trace the model, it
    probes. If the device is present, it calibrates the answer with a step of a tenth of it, and
    tries the answer if much memory is used outside tensors. Model, optimizer and random state are
    restored afterwards.

    - `predict`: uses fake tensors only. It needs neither memory nor the device.
    - `probe`: extrapolates from a few real steps of two or three samples.
    - `try`: runs real steps; doubles the size, then bisects, until memory runs out.
    - `halve`: runs real steps from `maximum` down. It needs the fewest steps, but the answer may be
      only half of what fits.

    Args:
        step: the training step.
        batch: a micro-batch of any size with the longest sequences that occur; or a function that
            makes one of a given size.
        accumulation: micro-batches per step. From the second on, gradients exist during the
            forward pass.
        measures_noise: whether the gradient of each micro-batch is kept apart before it is
            accumulated.
        method: how to find the size.
        device_memory: the memory of the device, such as `"80GiB"`. Default: the free memory of
            this one.
        device: the device type to predict for. For `cuda`, its kernels and its allocator are
            simulated; no GPU is needed. Default: only tensors are counted.
        gpu: the kind of GPU, such as `"a100"`; implies `device="cuda"`. Default: `"h100"`.
        context: what the CUDA context takes of `device_memory`. Default: about as much as
            `nvidia-smi` shows for that kind.
        world_size: the number of ranks that the model is spread over; implies `device="cuda"`. The
            answer is for one rank. Default: the model is on one device.
        shard: how the model is spread over the ranks: `"fsdp"`, `"hsdp:8"`, `"ddp"` or a function;
            see `predict`.
        margin: memory that stays free, in percent (`"3%"`) or bytes (`"512MiB"`). Default: 1.5
            percent; without a real step on the device 5 percent, or 1 percent for `cuda`. It is at
            least 25 percent if a probe answers for an absent device and its answer cannot be
            verified here.
        minimum: the smallest candidate.
        maximum: the largest candidate.
        multiple_of: sizes are multiples of this.
        power_of_two: whether sizes are powers of two.
        check: whether to verify the answer with a real step in any case.
        agree_minimum: returns the minimum of a number over all ranks. Each rank calls
            `find_batch_size`, and all get the same answer.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(1000, 10)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> answer = find_batch_size(step, torch.ones(2, 1000), device_memory="1GiB")
    >>> answer.size > 250_000, answer.certainty, answer.cost.real_steps
    (True, 'exact', 0)

    Raises:
        FitError: no candidate fits, or the method cannot give an answer.
        ConfigError: an amount of memory cannot be read.
    """
    _one_of("by", method, get_args(FindMethod))
    _one_of("for", device, ("cpu", "cuda", None))
    if device == "cpu" and (gpu is not None or world_size is not None):
        raise FitError.cannot(
            "find a batch size for a CPU and a GPU",
            why="device is 'cpu', and gpu or world_size are given",
            instead="leave device out",
        )
    if world_size is not None:
        what, instead = (
            f"find a batch size for {shown(world_size)} ranks",
            "write a positive number",
        )
        world_size = checked_whole(world_size, FitError, what, instead)
    start = time.perf_counter()
    whole = WholeStep.of(step, accumulation=accumulation, measures_noise=measures_noise)
    is_here = device_memory is None
    is_cuda = device == "cuda" or gpu is not None or world_size is not None
    kind = gpu_named(gpu) if is_cuda else None
    if kind is not None and not is_here and method not in {"auto", "predict"}:
        raise FitError.cannot(
            f"find a batch size for {kind.name!r} by {method!r}",
            why="real steps need the GPU",
            instead="leave method out, or device_memory, on that GPU",
        )
    limit = memory_limit(whole, device_memory)
    taken = context_bytes(whole, kind, context, limit, is_here=is_here)
    limit = limit._replace(bytes=limit.bytes - taken)
    usual = MARGIN if is_here and method != "predict" else MARGIN_OF_PREDICTIONS
    usual = usual if kind is None or is_here else MARGIN_OF_CUDA
    reserve = margin_of(usual if margin is None else margin, limit.bytes)
    finder = Finder(
        step=whole,
        make_batch=_maker(batch, whole.device),
        make_fake=_maker(batch, None),
        sizes=CandidateSizes(minimum, maximum, multiple_of, power_of_two),
        limit=limit,
        reserve=reserve,
        reserve_of_probes=margin_of(MARGIN_OF_PROBES, limit.bytes),
        is_here=is_here,
        gpu=kind,
        spread=Spread(world_size, shard),
        outside={"the CUDA context": taken} if taken else {},
        is_checked=check,
        agreement=Agreement(agree_minimum),
    )
    answer = finder.run(method)
    cost = answer.cost._replace(seconds=time.perf_counter() - start)
    return dataclasses.replace(answer, cost=cost)


def _one_of(what: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise FitError.cannot(
            f"find a batch size {what} {shown(value)}",
            why="there is no such choice",
            instead=f"write {', '.join(map(repr, choices))}",
        )


def _maker(batch: Any, device: torch.device | None) -> Callable[[int], Any]:
    """Return a function that makes batches of any size, on `device` or the device of `batch`."""

    def make(size: int) -> Any:
        made = batch(size) if callable(batch) else resize_batch(batch, size)
        return made if device is None else move_batch(made, device)

    return make
