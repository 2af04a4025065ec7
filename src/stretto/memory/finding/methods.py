"""Runs the methods that find a batch size, from the cheapest to the most expensive.

An estimator predicts the memory of tensors. A process needs more: scratch space of convolutions,
fragments of freed blocks. If the device is present, two small real steps measure this overhead at a
tenth of the answer. It is extrapolated in proportion to the size. That is conservative, because
fragments weigh most in small steps. If the overhead lowers the answer by more than a tenth, a step
of that size measures it again, and one more size is tried if more would fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

from stretto.errors import FitError
from stretto.memory.amounts import show_bytes
from stretto.memory.finding.agreement import Agreement
from stretto.memory.finding.estimators import EstimatorRunner, NoEstimateError, needs, no_estimate
from stretto.memory.finding.result import Answer, Cost, Estimator, peaks_around
from stretto.memory.measuring.calibration import Overhead, RetainedMemory
from stretto.memory.measuring.limits import MemoryLimit, allocated_bytes, free_memory
from stretto.memory.measuring.probe import Probe, probe
from stretto.memory.measuring.trial import WARM_UP_SIZE, Trials, trials
from stretto.memory.prediction.certainty import Certainty
from stretto.memory.prediction.cuda.gpu import Gpu
from stretto.memory.prediction.cuda.prediction import CudaPrediction
from stretto.memory.prediction.cuda.sharding import Shard
from stretto.memory.prediction.predict import predict
from stretto.memory.prediction.tensors import step_tensors
from stretto.memory.search import CandidateSizes, Found, search
from stretto.memory.step import WholeStep

CALIBRATED_PART = 10
"""The larger of the two calibration steps has this fraction (1/10) of the answer."""
MUCH = 0.9
"""If calibration lowers the answer below this fraction, the lower answer is tried."""
LESS = 0.95
"""If a checked answer does not fit, this fraction of it is tried."""


class Spread(NamedTuple):
    """How a model is spread over ranks."""

    ranks: int | None = None
    """How many; None: the model is on one device, or sharded already."""
    shard: str | Shard = "fsdp"


@final
@dataclass
class Finder:
    """Searches for the largest batch size whose step fits into memory."""

    step: WholeStep
    make_batch: Callable[[int], Any]
    """Makes a batch of a given size on the device of the step."""
    make_fake: Callable[[int], Any]
    """The same on any device, for steps on fake tensors."""
    sizes: CandidateSizes
    limit: MemoryLimit
    reserve: int
    is_here: bool
    """Whether the limit is the memory of the step's own device."""
    gpu: Gpu | None = None
    """The kind of GPU to predict for; None: only the bytes of tensors are counted."""
    spread: Spread = field(default_factory=Spread)
    """For a GPU, how the model is spread over ranks."""
    outside: dict[str, int] = field(default_factory=dict)
    """Bytes of the device, beyond the limit, by what takes them."""
    reserve_of_probes: int = 0
    """The minimum reserve if the size found by a probe was not verified by a step."""
    is_checked: bool = False
    """Whether to verify the answer with a real step."""
    agreement: Agreement = field(default_factory=Agreement)
    """Lets ranks agree on each answer."""
    predict: Callable[..., Estimator] = predict
    """Makes the estimator that uses fake tensors."""
    probe: Callable[..., Estimator] = probe
    """Makes the estimator that runs small real steps."""

    def __post_init__(self) -> None:
        self._notes: list[str] = []
        self._estimators = EstimatorRunner(self.sizes, self.agreement)
        self._trials: list[Trials] = []

    def static_bytes(self) -> int:
        """Return the bytes of parameters, buffers and optimizer state on the device."""
        return allocated_bytes(step_tensors(self.step), self.step.device)

    def run(self, method: str) -> Answer:
        """Return the answer of one method, or for `auto` of the first method that works.

        Raises:
            FitError: no candidate fits, or the method cannot give an answer.
        """
        if method in {"try", "halve"}:
            return self._tried(halves=method == "halve")
        if method == "predict" and self.gpu is not None:
            return self._predicted_for_cuda()
        if method == "predict":
            return self._estimated(self._estimators.make(self._predicting), is_final=True)
        if method == "probe":
            return self._probed()
        if self.gpu is not None and not self.is_here:
            # A probe on a CPU would show the kernels of a CPU.
            return self._predicted_for_cuda()
        # An error in the user's code occurs again in a trial, which raises it.
        self._estimators.tolerated = Exception
        for name, ask in (("predicted", self._predicted), ("probed", self._probed)):
            try:
                return ask()
            except NoEstimateError as error:
                self._notes.append(f"not {name}: {error.message.why}")
        return self._tried()

    # Estimators

    def _predicting(self) -> Estimator:
        if self.gpu is None:
            return self.predict(self.step, self.make_fake)
        return self.predict(
            self.step,
            self.make_fake,
            device="cuda",
            gpu=self.gpu.name,
            world_size=self.spread.ranks,
            shard=self.spread.shard,
        )

    def _probing(self) -> Estimator:
        if self.step.device.type == "meta":
            raise NoEstimateError.cannot(
                "probe a model on the meta device",
                why="real steps need real tensors",
                instead="predict, or build the model on a device",
            )
        return self.probe(self.step, self.make_batch)

    def _predicted(self) -> Answer:
        """Return the answer of a prediction, unless a real step would be more certain.

        Raises:
            NoEstimateError: there is no prediction, or a real step would be more certain.
        """
        estimator = self._estimators.make(self._predicting)
        best = estimator.certainty_if_verified
        if self.is_here and best != "exact":
            raise no_estimate(f"it would only be an {best}: {estimator.reason}")
        return self._estimated(estimator)

    def _predicted_for_cuda(self) -> Answer:
        estimator = self._estimators.make(self._predicting)
        assert isinstance(estimator, CudaPrediction)
        taken = estimator.communication_bytes
        if taken:
            self.limit = self.limit._replace(bytes=max(0, self.limit.bytes - taken))
            self.outside["buffers of NCCL, about"] = taken
        return self._estimated(estimator, is_final=True)

    def _probed(self) -> Answer:
        return self._estimated(self._estimators.make(self._probing, is_real=True))

    def _estimated(self, estimator: Estimator, *, is_final: bool = False) -> Answer:
        """Return the answer of an estimator, calibrated if the device is present."""
        self._notes.append(estimator.reason)
        found = self._fitting(estimator)
        if not is_final and self.is_here:
            return self._calibrated(estimator, found)
        if isinstance(estimator, Probe):
            taken = self._estimators.take(estimator, found, self.limit, self.reserve)
            if taken is None:
                self.reserve = max(self.reserve, self.reserve_of_probes)
                self._notes.append("no step of this size was taken here, so more is left free")
            found = taken or self._fitting(estimator)
        return self._answer(found, estimator.certainty(found.size), estimator)

    def _fitting(self, estimator: Estimator, overhead: Overhead | None = None) -> Found:
        return self._estimators.largest(estimator, self.limit, self.reserve, overhead)

    # Real steps

    @contextmanager
    def _trying(self) -> Iterator[Trials]:
        with trials(
            self.step,
            self.make_batch,
            reserve=self.reserve,
            smallest=self.sizes.at_most(WARM_UP_SIZE) or self.sizes.smallest,
        ) as tried:
            self._trials.append(tried)
            yield tried

    def _calibrated(self, estimator: Estimator, found: Found) -> Answer:
        """Correct an answer by the overhead of small real steps over the estimate."""
        with self._trying() as tried:
            overhead, retained = Overhead(), self._retained_memory()
            larger = max(2, found.size // CALIBRATED_PART)
            seen: set[int] = getattr(estimator, "sizes", set())
            # A probe has run the larger size already, so libraries are warm for it: use a new size.
            sizes = {max(2, larger - 1)} if larger in seen else {max(2, larger // 2), larger}
            for size in sorted(sizes):
                if not self._measure(tried, estimator, overhead, size, retained):
                    return self._tried(guess=size // 2, tried=tried)
            # A run retains memory, such as buffers of libraries.
            left = retained.room_in_run(len(seen | tried.sizes))
            if left is not None and left < self.limit.bytes:
                self.limit = self.limit._replace(bytes=left)
            if not self.agreement.all(lambda: overhead.is_known):
                return self._checked(tried, estimator, found)
            corrected = self._fitting(estimator, overhead)
            if self.is_checked:
                return self._checked(tried, estimator, corrected, overhead)
            if corrected.size >= MUCH * found.size:
                return self._answer(corrected, "calibrated", estimator, overhead)
            self._explain(overhead, corrected.size)
            if not self._measure(tried, estimator, overhead, corrected.size):
                return self._checked(tried, estimator, corrected, overhead, parts=(LESS, LESS**2))
            better = self._fitting(estimator, overhead)
            if better.size > corrected.size / MUCH and self._fits(tried, better.size):
                return self._answer(better, "tried", estimator, overhead)
            return self._answer(corrected, "tried", estimator, overhead)

    def _retained_memory(self) -> RetainedMemory:
        is_limited = self.limit.source.startswith("RLIMIT")
        return RetainedMemory(
            lambda: free_memory(self.step.device).bytes + self.static_bytes(), is_limited=is_limited
        )

    def _measure(
        self,
        tried: Trials,
        estimator: Estimator,
        overhead: Overhead,
        size: int,
        retained: RetainedMemory | None = None,
    ) -> bool:
        """Run a step and record its overhead; return False if any rank runs out of memory."""
        watch = (retained or self._retained_memory()).watch

        def work() -> bool:
            failures, took = tried.num_out_of_memory, list[int | None]()
            tried.warm_up(size)
            watch(lambda: took.append(tried.footprint(size)))
            if tried.num_out_of_memory > failures:
                return False
            overhead.note(size, took[0], estimator.peak(size) - self.static_bytes())
            return True

        return self.agreement.all(work)

    def _checked(
        self,
        tried: Trials,
        estimator: Estimator,
        found: Found,
        overhead: Overhead | None = None,
        parts: Sequence[float] = (1.0, LESS),
    ) -> Answer:
        """Run a step of the size itself; if it does not fit, of slightly smaller sizes."""
        for part in parts:
            size = self.sizes.at_most(int(part * found.size))
            if size is not None and self._fits(tried, size):
                return self._answer(
                    Found(size, self.sizes.above(size)), "tried", estimator, overhead
                )
        return self._tried(guess=found.size // 2, tried=tried)

    def _tried(
        self, guess: int | None = None, tried: Trials | None = None, *, halves: bool = False
    ) -> Answer:
        """Return the answer of trials alone."""
        if not self.is_here:
            why = [*self._notes, "trials need the device that has this memory"]
            raise FitError.cannot(
                f"find a batch size for {self.limit}",
                why="; ".join(why),
                instead="leave device_memory out, on that device",
            )
        if tried is None:
            with self._trying() as opened:
                return self._tried(guess, opened, halves=halves)
        guess = None if guess is None else max(guess, self.sizes.smallest)
        try:
            found = search(
                lambda size: self._fits(tried, size), self.sizes, halves=halves, guess=guess
            )
        except FitError as error:
            error.add_note(str(tried.last_error))
            raise
        return self._answer(found, "tried", None)

    def _fits(self, tried: Trials, size: int) -> bool:
        return self.agreement.all(lambda: tried.fits(size))

    # The answer

    def _explain(self, overhead: Overhead, size: int) -> None:
        text = f"a process takes more than its tensors: {show_bytes(overhead.at(size))} at {size:,}"
        is_heap = self.step.device.type == "cpu" and os.name == "posix"
        if is_heap and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
            text += "; with MALLOC_MMAP_THRESHOLD_=65536 in its environment it would take less"
        self._notes.append(text)

    def _answer(
        self,
        found: Found,
        certainty: Certainty,
        estimator: Estimator | None,
        overhead: Overhead | None = None,
    ) -> Answer:
        peaks: dict[int, int] = {}
        known = None
        if estimator is not None:
            known = partial(needs, estimator, overhead)
            is_costly = estimator.guess(self.limit.bytes) is not None
            ends = [size for size in (found.size, found.too_large) if size is not None]
            around = ends if is_costly else peaks_around(found.size, self.sizes)
            peaks = {size: known(size) for size in around}
        return Answer(
            size=found.size,
            certainty=certainty,
            too_large=found.too_large,
            limit=self.limit,
            reserve=self.reserve,
            peak=peaks.get(found.size),
            cost=self._cost(),
            notes=tuple(self._notes),
            peaks=peaks,
            estimator=estimator,
            needs=known,
            outside=self.outside,
        )

    def _cost(self) -> Cost:
        made = self._estimators.made
        probes = [one for one in made if isinstance(one, Probe)]
        real: list[Trials | Probe] = [*self._trials, *probes]
        return Cost(
            fake_steps=sum(one.num_steps for one in made if one not in probes),
            real_steps=sum(one.num_steps for one in real),
            num_samples=sum(one.num_samples for one in real),
            num_out_of_memory=sum(one.num_out_of_memory for one in self._trials),
        )
