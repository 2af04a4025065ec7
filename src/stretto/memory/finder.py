"""`find_batch_size`: the largest micro-batch that fits; `find_num_ranks`: the fewest ranks.

There is one question, whether a size fits, and one search over it. It is answered in three ways: by
an estimate on fake tensors, by the phantom (torch's CUDA build without a GPU), or by a real step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, final, get_args

from phantomgpu import Report
from stretto.data import move_batch
from stretto.errors import FitError, samples_text, shown
from stretto.memory import phantom
from stretto.memory.amounts import margin_of, show_bytes
from stretto.memory.answer import Answer, Certainty, Cost
from stretto.memory.estimate import Estimate, Estimator
from stretto.memory.examples import resize_batch
from stretto.memory.limits import MemoryLimit, allocated_bytes, free_memory, stated
from stretto.memory.phantom import Question
from stretto.memory.search import MAXIMUM, CandidateSizes, Found, NothingFitsError, search
from stretto.memory.sharding import Shard, least_ranks, share_of
from stretto.memory.step import WholeStep, makes_step
from stretto.memory.trial import trials
from stretto.runtime import TrainStep
from stretto.runtime.out_of_memory import release_memory
from stretto.timing.grammar import checked_whole

FindMethod = Literal["auto", "estimate", "phantom", "try", "halve"]
MARGIN = "1.5%"
"""The default margin of real steps: run-to-run variation."""
MARGIN_OF_PHANTOM = "1%"
"""The default margin of the phantom, whose allocator is torch's own."""
ALLOWANCE = "10%"
"""The default margin of an estimate for a GPU or a stated amount of memory: fragments of the
allocator, scratch memory of kernels, workspaces of libraries."""
ALLOWANCE_ON_CPU = "40%"
"""The same on this machine's CPU. What is freed in the middle of the heap of the C library stays
there: steps of small networks were seen to take 1.0 to 1.9 times what their tensors need."""
_NEAR = 0.01
"""A search by real steps may end this fraction below the largest that fits."""
_FAILED = -1


def find_batch_size(
    step: TrainStep | WholeStep | Callable[[], TrainStep],
    batch: Any,
    *,
    accumulation: int = 1,
    measures_noise: bool = False,
    method: FindMethod = "auto",
    device_memory: str | int | None = None,
    gpu: str | None = None,
    context: str | int | None = None,
    world_size: int = 1,
    shard: str | Shard = "fsdp",
    margin: str | int | None = None,
    minimum: int = 1,
    maximum: int = MAXIMUM,
    multiple_of: int = 1,
    power_of_two: bool = False,
    agree_minimum: Callable[[int], int] | None = None,
) -> Answer:
    """Return the largest micro-batch whose training step fits into memory.

    With `gpu`, the phantom answers for that kind of GPU; if it is not set up, an estimate does, and
    the notes of the answer say how to get the exact one. With `device_memory` alone, an estimate
    answers. With neither, the answer is for the device of the model: an estimate says where to
    start, and real steps verify it unless much less than the memory is needed. Model, optimizer and
    random state are restored afterwards.

    - `estimate`: adds up the bytes of tensors on fake tensors, and leaves an allowance.
    - `phantom`: runs the steps on torch's CUDA build without a GPU.
    - `try`: runs real steps; doubles the size, then bisects, until memory runs out.
    - `halve`: runs real steps from `maximum` down. It needs the fewest steps, but the answer may be
      only half of what fits.

    Args:
        step: the training step; or a function that makes it, which is called with
            `torch.device("meta")`, with the phantom in its process: a large model is built once.
        batch: a micro-batch of any size with the longest sequences that occur; or a function that
            makes one of a given size.
        accumulation: micro-batches per step. From the second on, gradients exist during the
            forward pass.
        measures_noise: whether the gradient of each micro-batch is kept apart before it is
            accumulated.
        method: how to find the size.
        device_memory: the memory of the device, such as `"80GiB"`. Default: that of the kind of
            GPU, or the free memory of this device.
        gpu: the kind of GPU to ask about, such as `"a100"`; `phantomgpu gpus` lists them.
        context: what the CUDA context takes of it. Default: as stated for the kind.
        world_size: the number of ranks that the model is spread over; the answer is for one rank.
        shard: how it is spread: `"fsdp"` (FSDP2, each block of a `ModuleList`, then the rest),
            `"hsdp:8"` (so over 8 ranks, with replicas), `"ddp"`, or a function
            `shard(model, mesh)` that shards the model in place or returns another one. The step has
            the model before that, and the optimizer gets the shards.
        margin: memory that stays free, in percent (`"3%"`) or bytes (`"512MiB"`). Default: 1.5
            percent for real steps, 1 percent for the phantom, 10 percent for an estimate and 40
            percent for one on this machine's CPU.
        minimum: the smallest candidate.
        maximum: the largest candidate.
        multiple_of: sizes are multiples of this.
        power_of_two: whether sizes are powers of two.
        agree_minimum: returns the minimum of a number over all ranks. Each rank calls
            `find_batch_size`, and all get the same answer.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(1000, 1000)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> answer = find_batch_size(step, torch.ones(2, 1000), device_memory="1GiB")
    >>> answer.size > 100_000, answer.certainty, answer.cost.real_steps
    (True, 'estimate', 0)

    Raises:
        FitError: no candidate fits, or the method cannot give an answer.
        ConfigError: an amount of memory cannot be read.
    """
    if method not in get_args(FindMethod):
        raise FitError.bad(
            "method", method, "there is no such method", f"write one of {get_args(FindMethod)}"
        )
    ranks = checked_whole(
        world_size, FitError, f"use world_size={shown(world_size)}", "write a positive number"
    )
    if ranks > 1 and gpu is None:
        raise FitError.bad("world_size", ranks, "it needs a kind of GPU", "add gpu='h100'")
    start = time.perf_counter()
    how: dict[str, Any] = {"accumulation": accumulation, "measures_noise": measures_noise}
    finder = _Finder(
        partial(WholeStep.of, step, **how) if makes_step(step) else WholeStep.of(step, **how),
        batch,
        sizes=CandidateSizes(minimum, maximum, multiple_of, power_of_two),
        margin=margin,
        agree=agree_minimum,
    )
    if gpu is not None:
        answer = finder.for_gpu(method, Question(gpu, device_memory, context, ranks, shard))
    elif device_memory is not None:
        if method not in ("auto", "estimate"):
            raise FitError.bad(
                "method", method, "device_memory is for an estimate", "leave one of the two out"
            )
        answer = finder.estimated(stated(device_memory), ALLOWANCE)
    else:
        answer = finder.here(method)
    return replace(answer, cost=answer.cost._replace(seconds=time.perf_counter() - start))


class RanksAnswer(NamedTuple):
    """The fewest ranks over which a model has to be spread."""

    num_ranks: int
    answer: Answer
    """The answer for one of so many ranks."""

    def __str__(self) -> str:
        samples = samples_text(self.answer.size)
        return f"fewest ranks for micro-batches of {samples}: {self.num_ranks:,}\n{self.answer}"


def find_num_ranks(
    step: TrainStep | WholeStep | Callable[[], TrainStep],
    batch: Any,
    size: int,
    *,
    gpu: str,
    most: int = 4096,
    shard: str | Shard = "fsdp",
    **how: Any,
) -> RanksAnswer:
    """Return the fewest ranks, a power of two, on which micro-batches of a size fit.

    Args:
        step: the training step, with the model before it is sharded.
        batch: as in `find_batch_size`.
        size: samples of the micro-batch of each rank.
        gpu: the kind of GPU.
        most: the most ranks.
        shard: as in `find_batch_size`; with `"hsdp:8"`, at least 8 ranks are asked about.
        how: other arguments of `find_batch_size`.

    Raises:
        FitError: it does not fit on any number of ranks up to `most`.
    """
    ranks = least_ranks(shard)
    how |= {"gpu": gpu, "shard": shard, "minimum": size, "maximum": size}
    while True:
        try:
            answer = find_batch_size(step, batch, world_size=ranks, **how)
        except NothingFitsError:
            ranks *= 2
            if ranks > most:
                raise
        else:
            return RanksAnswer(ranks, answer)


@final
@dataclass
class _Finder:
    """Answers the question for one step, in one of three ways."""

    given: WholeStep | Callable[[], WholeStep]
    batch: Any
    sizes: CandidateSizes
    margin: str | int | None
    agree: Callable[[int], int] | None
    notes: list[str] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)

    @cached_property
    def step(self) -> WholeStep:
        """The step."""
        return self.given() if callable(self.given) else self.given

    @cached_property
    def _estimator(self) -> Estimator:
        return Estimator(self.step, self._make)

    def here(self, method: FindMethod) -> Answer:
        """Answer for the device of the model, in this process."""
        device = self.step.device
        if device.type == "meta" or method == "phantom":
            raise FitError.cannot(
                f"find a batch size for the device '{device}'",
                why="it is not known which GPU is meant",
                instead="add gpu='h100', or device_memory='80GiB' for an estimate",
            )
        release_memory()
        gradients = (p.grad for p in self.step.step.parameters if p.grad is not None)
        static = [*self.step.tensors(), *gradients]
        free = free_memory(device)
        limit = free._replace(bytes=free.bytes + allocated_bytes(static, device))
        allowance = ALLOWANCE_ON_CPU if device.type == "cpu" else ALLOWANCE
        if method == "estimate":
            return self.estimated(limit, allowance)
        guess = self._guess_here(limit, allowance) if method == "auto" else None
        if guess is not None and guess.too_large is None and 2 * (guess.peak or 0) < limit.bytes:
            return guess  # the first step of the run verifies it
        return self._tried(limit, guess, halves=method == "halve")

    def _guess_here(self, limit: MemoryLimit, allowance: str) -> Answer | None:
        """Return where real steps begin: by the phantom for a GPU that it knows, or the estimate.

        None: neither can tell, or not even the smallest size seems to fit.
        """
        kind = phantom.kind_of(self.step.device)
        try:
            if kind is not None:
                return self.for_gpu("phantom", Question(kind, limit.bytes, context=0))
            return self.estimated(limit, allowance)
        except NothingFitsError:
            return None
        except FitError as error:
            self.notes.append(f"not estimated: {error.message.why}")
            return None

    def estimated(
        self,
        limit: MemoryLimit,
        allowance: str,
        share: Callable[[Estimate], int] = attrgetter("bytes"),
    ) -> Answer:
        """Answer by the bytes of tensors.

        Args:
            limit: the memory.
            allowance: the default margin.
            share: returns what one rank needs of an estimate.

        Raises:
            NothingFitsError: the smallest candidate does not fit.
        """
        reserve = margin_of(allowance if self.margin is None else self.margin, limit.bytes)
        usable, peaks = limit.bytes - reserve, dict[int, int]()

        def work() -> Found:
            def fits(size: int) -> bool:
                if size not in peaks:
                    peaks[size] = share(self._estimator.at(size))
                return peaks[size] <= usable

            if not fits(self.sizes.smallest):
                need, smallest = show_bytes(peaks[self.sizes.smallest]), self.sizes.smallest
                raise NothingFitsError.cannot(
                    f"fit {samples_text(smallest)} into {limit}",
                    why=f"a step needs {need}, and {show_bytes(reserve)} stay free",
                    instead="make the model or its samples smaller, or give it more memory",
                )
            return search(fits, self.sizes, guess=self._guess(fits, peaks, usable))

        found = self._agreed(work)
        self.cost = self.cost._replace(fake_steps=self.cost.fake_steps + len(peaks))
        return self._answer(found, "estimate", limit, reserve, peaks)

    def for_gpu(self, method: FindMethod, question: Question) -> Answer:
        """Answer for a kind of GPU that need not be here."""
        if method not in ("auto", "phantom", "estimate"):
            raise FitError.bad(
                "method", method, "a real step needs the GPU", "leave it out, or leave gpu out"
            )
        limit, outside, notes = question.memory()
        self.notes += notes
        missing = None if method == "estimate" else phantom.missing()
        if missing is not None and method == "phantom":
            raise FitError.bad("method", method, missing, "write method='estimate'")
        if missing is not None or method == "estimate":
            if missing is not None:
                self.notes.append(f"for an exact answer from torch's own CUDA code: {missing}")
            answer = self.estimated(limit, ALLOWANCE, partial(share_of, question))
            return replace(answer, outside=outside)
        reserve = margin_of(MARGIN_OF_PHANTOM if self.margin is None else self.margin, limit.bytes)
        trials: dict[int, Report] = {}

        def work() -> Found:
            found, reports = phantom.ask(
                question, self.given, self.batch, self.sizes, limit.bytes - reserve
            )
            trials.update(reports)
            return found

        found = self._agreed(work)
        peaks = {size: one.peak_reserved for size, one in trials.items() if one.fits}
        self.cost = self.cost._replace(
            phantom_steps=len(trials), num_out_of_memory=len(trials) - len(peaks)
        )
        answer = self._answer(found, "phantom", limit, reserve, peaks)
        return replace(answer, outside=outside)

    def _tried(self, limit: MemoryLimit, guess: Answer | None, *, halves: bool) -> Answer:
        """Answer by real steps; on a CPU, at most as large as the estimate."""
        reserve = margin_of(MARGIN if self.margin is None else self.margin, limit.bytes)
        sizes, device = self.sizes, self.step.device
        if guess is not None and device.type == "cpu":
            sizes = replace(sizes, maximum=guess.size)
        with trials(
            self.step, lambda size: move_batch(self._make(size), device), reserve=reserve
        ) as tried:

            def fits(size: int) -> bool:
                return self._agreed(lambda: Found(int(tried.fits(size)), None)).size == 1

            begin = None if guess is None else guess.size
            found = search(fits, sizes, halves=halves, guess=begin, within=_NEAR)
        if guess is not None and found.too_large is None:
            found = found._replace(too_large=guess.too_large)
        self.cost = self.cost._replace(
            real_steps=tried.num_steps,
            num_samples=tried.num_samples,
            num_out_of_memory=tried.num_out_of_memory,
        )
        return self._answer(found, "tried", limit, reserve, {} if guess is None else guess.peaks)

    def _guess(
        self, fits: Callable[[int], bool], peaks: Mapping[int, int], usable: int
    ) -> int | None:
        """Return where a straight line through the memory of two sizes reaches the limit."""
        low = self.sizes.at_most(8) or self.sizes.smallest
        while (high := self.sizes.at_most(4 * low) or low) > low:
            if not fits(low) or not fits(high):
                return None
            # For small batches, the update of the weights is the peak, whatever the size.
            if peaks[high] > 1.2 * peaks[low]:
                slope = (peaks[high] - peaks[low]) / (high - low)
                return high + int((usable - peaks[high]) / slope)
            low = high
        return None

    def _make(self, size: int) -> Any:
        return self.batch(size) if callable(self.batch) else resize_batch(self.batch, size)

    def _agreed(self, work: Callable[[], Found]) -> Found:
        """Do some work on every rank; return what the rank with the least size has found.

        An error on one rank ends the search on all, so none waits.
        """
        if self.agree is None:
            return work()
        try:
            found = work()
        except BaseException:
            self.agree(_FAILED)
            raise
        least = self.agree(found.size)
        if least == _FAILED:
            raise FitError.cannot(
                "find a batch size on this rank alone",
                why="another rank has failed",
                instead="look for the error that it shows",
            )
        return found if least == found.size else Found(least, self.sizes.above(least))

    def _answer(
        self,
        found: Found,
        certainty: Certainty,
        limit: MemoryLimit,
        reserve: int,
        peaks: Mapping[int, int],
    ) -> Answer:
        return Answer(
            found.size,
            certainty,
            found.too_large,
            limit,
            reserve,
            self.cost,
            peaks=dict(sorted(peaks.items())),
            notes=tuple(self.notes),
        )
