"""`find_batch_size`: the largest micro-batch that fits.

There is one question, whether a size fits, and one search over it. It is answered by running the
step: here, or on the phantom (torch's CUDA build without a GPU).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import NoneType
from typing import Any, final, get_args

import torch

from phantomgpu import Report
from phantomgpu.searching import Method, Range, bisect, downwards
from stretto._foreign import knows_foreign
from stretto.batching.policy import size_text
from stretto.data import move_batch
from stretto.errors import FitError, shown
from stretto.memory import phantom
from stretto.memory.amounts import margin_of
from stretto.memory.answer import Answer, Cost, NothingFitsError
from stretto.memory.examples import UnequalSamples, amount_of, batches_of
from stretto.memory.limits import MemoryLimit, allocated_bytes, free_memory, peak_bytes, stated
from stretto.memory.phantom import Question
from stretto.memory.sharding import ShardFunction, least_ranks
from stretto.memory.step import WholeStep, makes_step
from stretto.memory.trial import trials
from stretto.runtime import TrainStep
from stretto.runtime.out_of_memory import release_memory
from stretto.runtime.ranks import Ranks
from stretto.schedules.fields import one_of
from stretto.timing.grammar import checked_whole

MARGIN = "1.5%"
"""The default margin of real steps: run-to-run variation."""
MARGIN_OF_PHANTOM = "1%"
"""The default margin of the phantom, whose allocator is torch's own."""
MAXIMUM = 1 << 24
"""The default largest size."""
_NEAR = 0.01
"""A search by real steps may end this fraction below the largest that fits."""


@knows_foreign
def find_batch_size(
    step: TrainStep | WholeStep | Callable[[], TrainStep],
    batch: Any,
    *,
    accumulation: int = 1,
    measures_noise: bool = False,
    device_memory: str | int | None = None,
    gpu: str | None = None,
    context: str | int | None = None,
    world_size: int = 1,
    shard: str | ShardFunction = "fsdp",
    margin: str | int | None = None,
    minimum: int = 1,
    maximum: int = MAXIMUM,
    multiple_of: int = 1,
    power_of_two: bool = False,
    method: Method = "predict",
    ranks: Ranks | None = None,
) -> Answer:
    """Return the largest micro-batch whose training step fits into memory.

    With `gpu`, the phantom answers for that kind of GPU, which need not be here. Without it, real
    steps answer for the device of the model: the size grows until memory runs out, along the line
    of the peaks where the device tells them. Model, optimizer and random state are restored.

    Args:
        step: the training step; or a function that makes it, which is called with
            `torch.device("meta")`, with the phantom in its process: a large model is built once.
        batch: a micro-batch of any size with the longest sequences that occur; or a function that
            makes one of a given size; or `UnequalSamples`: the answer is then a budget in tokens.
        accumulation: micro-batches per step. From the second on, gradients exist during the
            forward pass.
        measures_noise: whether the gradient of each micro-batch is kept apart before it is
            accumulated.
        device_memory: the memory of that GPU, such as `"40GiB"`. Default: that of its kind.
        gpu: the kind of GPU to ask about, such as `"a100-80"`; `phantomgpu gpus` lists them.
        context: what the CUDA context takes of it. Default: as stated for the kind.
        world_size: the number of ranks that the model is spread over; the answer is for one rank.
        shard: how it is spread: `"fsdp"` (FSDP2, each block of a `ModuleList`, then the rest),
            `"hsdp:8"` (so over 8 ranks, with replicas), `"ddp"`, or a function
            `shard(model, mesh)` that shards the model in place or returns another one. The step has
            the model before that, and the optimizer gets the shards.
        margin: memory that stays free, in percent (`"3%"`) or bytes (`"512MiB"`). Default: 1.5
            percent for real steps, 1 percent for the phantom.
        minimum: the smallest candidate; of a budget, the longest sample if that is more.
        maximum: the largest candidate.
        multiple_of: sizes are multiples of this; 1 leaves the resolution of a budget open.
        power_of_two: whether sizes are powers of two.
        method: how the search begins. `"predict"`: with 2 samples, and then where the line of the
            peaks leads. `"bisect"`: in the middle between `minimum` and `maximum`, and then of what
            is left. `"halve"`: with `maximum`, halved until it fits. Each ends with the largest
            that fits.
        ranks: the processes of a run, which all call `find_batch_size` and get the same answer,
            that of the rank with the least memory; None: this process alone.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(1000, 1000)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> answer = find_batch_size(step, torch.ones(2, 1000), maximum=64)
    >>> answer.size, answer.certainty
    (64, 'tried')

    Raises:
        FitError: no candidate fits, or an argument is wrong.
        ConfigError: an amount of memory cannot be read.
    """
    one_of(method, "method", get_args(Method), FitError)
    world_size, multiple_of = _number("world_size", world_size), _number("multiple_of", multiple_of)
    minimum, maximum = _number("minimum", minimum), _number("maximum", maximum)
    if world_size > 1 and gpu is None:
        raise FitError.bad("world_size", world_size, "it needs a kind of GPU", "add gpu='h100'")
    if not isinstance(ranks, (Ranks, NoneType)):
        raise FitError.bad("ranks", ranks, "it is none", "leave it out: it is for a Trainer")
    start, amount = time.perf_counter(), amount_of(batch)
    if isinstance(batch, UnequalSamples):
        if maximum < batch.longest:
            why = f"the longest sample has {batch.longest:,} tokens"
            raise FitError.bad("maximum", maximum, why, "write a larger one")
        if multiple_of == 1 and minimum < maximum:  # to the last token takes more trials
            multiple_of = 1 << max(0, batch.longest.bit_length() - 7)
        minimum = max(minimum, batch.longest)
    count = _number("accumulation", accumulation)
    how: dict[str, Any] = {"accumulation": count, "measures_noise": measures_noise}
    finder = _Finder(
        partial(WholeStep.of, step, **how) if makes_step(step) else WholeStep.of(step, **how),
        batch,
        sizes=_candidates(minimum, maximum, multiple_of, powers=power_of_two),
        margin=margin,
        method=method,
        ranks=Ranks.of(0, 1) if ranks is None else ranks,
    )
    if gpu is not None:
        answer = finder.for_gpu(Question(gpu, device_memory, context, world_size, shard))
    elif device_memory is not None:
        stated(device_memory)
        why = "it is the memory of a GPU that is not here, and its kind is not known"
        raise FitError.bad("device_memory", device_memory, why, "add gpu='h100'")
    else:
        answer = finder.here()
    seconds, too_large = time.perf_counter() - start, answer.too_large
    return replace(
        answer,
        size=amount(answer.size),
        too_large=None if too_large is None else amount(too_large),
        cost=answer.cost._replace(seconds=seconds, num_samples=amount(answer.cost.num_samples)),
    )


def _number(name: str, given: int) -> int:
    what = f"look for a batch size with {name}={shown(given)}"
    return checked_whole(given, FitError, what, "write a positive number")


def _candidates(minimum: int, maximum: int, multiple_of: int, *, powers: bool) -> Range:
    try:
        return Range(minimum, maximum, multiple_of, powers)
    except ValueError as error:
        why, _, instead = str(error).partition("; ")
        raise FitError.cannot("look for a batch size", why=why, instead=instead) from None


@final
@dataclass
class _Finder:
    """Answers the question for one step."""

    given: WholeStep | Callable[[], WholeStep]
    batch: Any
    sizes: Range
    margin: str | int | None
    method: Method
    ranks: Ranks

    @cached_property
    def step(self) -> WholeStep:
        """The step."""
        return self.given() if callable(self.given) else self.given

    def here(self) -> Answer:
        """Answer for the device of the model, in this process."""
        device = self.step.device
        if device.type == "meta":
            raise FitError.cannot(
                f"find a batch size for the device '{device}'",
                why="it is not known which GPU is meant",
                instead="add gpu='h100'",
            )
        release_memory()
        gradients = (p.grad for p in self.step.step.parameters if p.grad is not None)
        static = [*self.step.tensors(), *gradients]
        free = free_memory(device)
        limit = free._replace(bytes=free.bytes + allocated_bytes(static, device))
        return self._tried(limit)

    def for_gpu(self, question: Question) -> Answer:
        """Answer for a kind of GPU that need not be here."""
        least_ranks(question.shard)
        limit, outside, notes = question.memory()
        missing = phantom.setup_problem()
        if missing is not None:
            raise FitError.cannot(
                f"find a batch size for {question.gpu}",
                why="the phantom, which answers for a GPU that is not here, is not set up",
                instead=missing,
            )
        reserve = margin_of(MARGIN_OF_PHANTOM if self.margin is None else self.margin, limit.bytes)
        trials: dict[int, Report] = {}

        def work() -> int:
            largest, reports = phantom.ask(
                question,
                self.given,
                self.batch,
                self.sizes,
                usable=limit.bytes - reserve,
                method=self.method,
            )
            trials.update(reports)
            return largest

        size = self._agreed(work)
        peaks = {number: one.peak_reserved for number, one in sorted(trials.items()) if one.fits}
        failed = trials.keys() - peaks.keys()
        return Answer(
            size,
            "phantom",
            _too_large(size, failed),
            limit,
            reserve,
            Cost(phantom_steps=len(trials), num_out_of_memory=len(failed)),
            peaks=peaks,
            notes=tuple(notes),
            outside=outside,
        )

    def _tried(self, limit: MemoryLimit) -> Answer:
        """Answer by real steps."""
        reserve = margin_of(MARGIN if self.margin is None else self.margin, limit.bytes)
        sizes, device, peaks, failed = self.sizes, self.step.device, dict[int, int](), set[int]()
        with trials(self.step, lambda size: self._make(size, device), reserve=reserve) as tried:

            def fits(index: int) -> bool:
                size = sizes.number(index)
                found = self._agreed(lambda: int(tried.fits(size))) == 1
                peaks[size] = peak_bytes(device)
                failed.update(() if found else (size,))
                return found

            def used(index: int) -> tuple[int, int]:
                return peaks[sizes.number(index)], peaks[sizes.number(index)]

            found = bisect(
                fits,
                used,
                limit.bytes - reserve,
                first=sizes.first,
                last=sizes.last,
                start=downwards(sizes.first, sizes.last, self.method, powers=sizes.powers),
                halves=self.method == "bisect",
                farthest=(lambda index: index + 3) if sizes.powers else (lambda index: 8 * index),
                within=_NEAR,
            )
        if found is None:
            raise NothingFitsError.cannot(
                f"fit {size_text(amount_of(self.batch)(sizes.number(sizes.first)))} into {limit}",
                why="memory ran out",
                instead="make the model or its samples smaller, or give it more memory",
            )
        size = sizes.number(found)
        return Answer(
            size,
            "tried",
            _too_large(size, failed),
            limit,
            reserve,
            Cost(
                real_steps=tried.num_steps,
                num_samples=tried.num_samples,
                num_out_of_memory=tried.num_out_of_memory,
            ),
            peaks={one: peaks[one] for one in sorted(peaks.keys() - failed) if peaks[one]},
        )

    def _make(self, size: int, device: torch.device) -> Iterator[Any]:
        return (move_batch(one, device) for one in batches_of(self.batch, size))

    def _agreed(self, work: Callable[[], int]) -> int:
        """Do some work on every rank; return the least result.

        An error on one rank ends the search on all, so none waits.
        """
        return min(self.ranks.together(work))


def _too_large(size: int, failed: Iterable[int]) -> int | None:
    """Return the smallest size above `size` that did not fit."""
    return min((number for number in failed if number > size), default=None)
