"""The ways to find a batch size, from the cheapest to the dearest, and when to go on to the next.

An oracle says what tensors need; a process takes more: scratch of convolutions, fragments of freed
blocks. So where there is a device, two small real steps say what comes on top at a tenth of the
answer. It is extended in proportion, which errs on the safe side: fragments weigh most in small
steps. Where that takes more than a tenth off the answer, a step of that size says better, and one
more is tried if it shows that more would fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

from stretto.errors import FitError, cannot
from stretto.memory.amounts import show_bytes
from stretto.memory.finding.oracles import NoOracleError, Oracles, needs, no_oracle
from stretto.memory.finding.question import Question
from stretto.memory.finding.ranks import Together
from stretto.memory.finding.result import Answer, Cost, Oracle, RealOracle, peaks_around
from stretto.memory.finding.sizes import Found, Method, search
from stretto.memory.measuring.calibration import Leavings, Overhead
from stretto.memory.measuring.probe import probe
from stretto.memory.measuring.trial import WARM_UP_SIZE, Trials, trials
from stretto.memory.prediction.predict import Certainty, predict

CALIBRATED_PART = 10
"""The larger of the two steps that calibrate is this part of the answer."""
MUCH = 0.9
"""An answer of which calibration leaves less than this is tried."""
LESS = 0.95
"""Where an answer that is checked does not fit, this part of it is tried."""


@final
class Ladder:
    """One search for the answer to a question.

    Args:
        question: what is asked.
        together: the ranks that are to agree.
        predict: makes the first oracle.
        probe: makes the second.
    """

    def __init__(
        self,
        question: Question,
        together: Together,
        *,
        predict: Callable[..., Oracle] = predict,
        probe: Callable[..., Oracle] = probe,
    ) -> None:
        self._question = question
        self._limit = question.limit
        self._reserve = question.reserve
        self._together = together
        self._predict = predict
        self._probe = probe
        self._notes: list[str] = []
        self._oracles = Oracles(question.sizes, together)
        self._trials: list[Trials] = []

    def climb(self, method: str) -> Answer:
        """Return the answer that one way gives, or for `auto` the first that can tell.

        Raises:
            FitError: nothing that is wanted fits, or this way cannot tell.
        """
        if method in {"try", "halve"}:
            return self._tried("bisect" if method == "try" else "halve")
        if method == "predict":
            return self._foretold(self._oracles.make(self._predicting), is_final=True)
        if method == "probe":
            return self._probed()
        # An error of the user's own comes again in a trial, which tolerates none.
        self._oracles.tolerated = Exception
        for name, ask in (("predicted", self._predicted), ("probed", self._probed)):
            try:
                return ask()
            except NoOracleError as error:
                self._notes.append(f"not {name}: {error.message.why}")
        return self._tried("bisect")

    # Oracles

    def _predicting(self) -> Oracle:
        question = self._question
        return self._predict(question.step, question.make_fake, device=question.device)

    def _probing(self) -> Oracle:
        question = self._question
        if question.step.device.type == "meta":
            raise NoOracleError(
                cannot(
                    "probe a model on the meta device",
                    why="real steps need real tensors",
                    instead="predict, or build the model on a device",
                )
            )
        return self._probe(question.step, question.make_batch, also=question.also)

    def _predicted(self) -> Answer:
        """The answer of a prediction, if no real step would know better.

        Raises:
            NoOracleError: there is none, or a real step would.
        """
        oracle = self._oracles.make(self._predicting)
        best = oracle.certainty_if_verified
        if self._question.is_here and best != "exact":
            raise no_oracle(f"it would only be an {best}: {oracle.reason}")
        return self._foretold(oracle)

    def _probed(self) -> Answer:
        return self._foretold(self._oracles.make(self._probing, is_real=True))

    def _foretold(self, oracle: Oracle, *, is_final: bool = False) -> Answer:
        """The answer of an oracle, calibrated on the device if that is here."""
        self._notes.append(oracle.reason)
        found = self._fitting(oracle)
        if not is_final and self._question.is_here:
            return self._calibrated(oracle, found)
        if isinstance(oracle, RealOracle):
            taken = self._oracles.take(oracle, found, self._limit, self._reserve)
            if taken is None:
                self._reserve = max(self._reserve, self._question.reserve_of_probes)
                self._notes.append("no step of this size was taken here, so more is left free")
            found = taken or self._fitting(oracle)
        return self._answer(found, oracle.certainty(found.size), oracle)

    def _fitting(self, oracle: Oracle, overhead: Overhead | None = None) -> Found:
        return self._oracles.largest(oracle, self._limit, self._reserve, overhead)

    # Real steps

    @contextmanager
    def _trying(self) -> Iterator[Trials]:
        question = self._question
        with trials(
            question.step,
            question.make_batch,
            reserve=question.reserve,
            also=question.also,
            smallest=question.sizes.at_most(WARM_UP_SIZE) or question.sizes.smallest,
        ) as tried:
            self._trials.append(tried)
            yield tried

    def _calibrated(self, oracle: Oracle, found: Found) -> Answer:
        """Correct an answer by what small real steps take beyond what the oracle says."""
        with self._trying() as tried:
            overhead, leavings = Overhead(), self._leavings()
            larger = max(2, found.size // CALIBRATED_PART)
            seen: set[int] = getattr(oracle, "sizes", set())
            # A probe has taken the larger one, and prepared libraries for it: a new one next to it.
            sizes = {max(2, larger - 1)} if larger in seen else {max(2, larger // 2), larger}
            for size in sorted(sizes):
                if not self._measure(tried, oracle, overhead, size, leavings):
                    return self._tried("bisect", guess=size // 2, tried=tried)
            self._look_again(leavings, len(seen | tried.sizes))
            if not self._together.all(lambda: overhead.is_known):
                return self._checked(tried, oracle, found)
            corrected = self._fitting(oracle, overhead)
            if self._question.is_checked:
                return self._checked(tried, oracle, corrected, overhead)
            if corrected.size >= MUCH * found.size:
                return self._answer(corrected, "calibrated", oracle, overhead)
            self._explain(overhead, corrected.size)
            if not self._measure(tried, oracle, overhead, corrected.size):
                return self._checked(tried, oracle, corrected, overhead, parts=(LESS, LESS**2))
            better = self._fitting(oracle, overhead)
            if better.size > corrected.size / MUCH and self._fits(tried, better.size):
                return self._answer(better, "tried", oracle, overhead)
            return self._answer(corrected, "tried", oracle, overhead)

    def _leavings(self) -> Leavings:
        question = self._question
        is_limited = self._limit.source.startswith("RLIMIT")
        return Leavings(lambda: question.room().bytes + question.held(), is_limited=is_limited)

    def _look_again(self, leavings: Leavings, sizes: int) -> None:
        """Take off what a run would keep for good of its steps, such as buffers of libraries."""
        left = leavings.room_of_a_run(sizes)
        if left is not None and left < self._limit.bytes:
            self._limit = self._limit._replace(bytes=left)

    def _measure(
        self,
        tried: Trials,
        oracle: Oracle,
        overhead: Overhead,
        size: int,
        leavings: Leavings | None = None,
    ) -> bool:
        """Take a step, and note what it takes on top; False where memory runs out on any rank."""
        watch = (leavings or self._leavings()).watch

        def work() -> bool:
            failures, took = tried.num_out_of_memory, list[int | None]()
            tried.warm_up(size)
            watch(lambda: took.append(tried.footprint(size)))
            if tried.num_out_of_memory > failures:
                return False
            overhead.note(size, took[0], oracle.peak(size) - self._question.held())
            return True

        return self._together.all(work)

    def _checked(
        self,
        tried: Trials,
        oracle: Oracle,
        found: Found,
        overhead: Overhead | None = None,
        parts: Sequence[float] = (1.0, LESS),
    ) -> Answer:
        """Take a step of the size itself; if it does not fit, of a little less."""
        for part in parts:
            size = self._question.sizes.at_most(int(part * found.size))
            if size is not None and self._fits(tried, size):
                return self._answer(
                    Found(size, self._question.sizes.above(size), ()), "tried", oracle, overhead
                )
        return self._tried("bisect", guess=found.size // 2, tried=tried)

    def _tried(
        self, method: Method, guess: int | None = None, tried: Trials | None = None
    ) -> Answer:
        """The answer that trials alone give."""
        question = self._question
        if not question.is_here:
            why = [*self._notes, "trials need the device that has this memory"]
            raise FitError(
                cannot(
                    f"find a batch size for {question.limit}",
                    why="; ".join(why),
                    instead="leave device_memory out, on that device",
                )
            )
        if tried is None:
            with self._trying() as opened:
                return self._tried(method, guess, opened)
        guess = None if guess is None else max(guess, question.sizes.smallest)
        try:
            found = search(
                lambda size: self._fits(tried, size), question.sizes, method=method, guess=guess
            )
        except FitError as error:
            error.add_note(str(tried.last_error))
            raise
        return self._answer(found, "tried", None)

    def _fits(self, tried: Trials, size: int) -> bool:
        return self._together.all(lambda: tried.fits(size))

    # What is said

    def _explain(self, overhead: Overhead, size: int) -> None:
        text = f"a process takes more than its tensors: {show_bytes(overhead.at(size))} at {size:,}"
        is_heap = self._question.step.device.type == "cpu" and os.name == "posix"
        if is_heap and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
            text += "; with MALLOC_MMAP_THRESHOLD_=65536 in its environment it would take less"
        self._notes.append(text)

    def _answer(
        self,
        found: Found,
        certainty: Certainty,
        oracle: Oracle | None,
        overhead: Overhead | None = None,
    ) -> Answer:
        question = self._question
        peaks: dict[int, int] = {}
        known = None if oracle is None else partial(needs, oracle, overhead)
        if oracle is not None and known is not None:
            is_costly = oracle.guess(self._limit.bytes) is not None
            ends = [size for size in (found.size, found.too_large) if size is not None]
            around = ends if is_costly else peaks_around(found.size, question.sizes)
            peaks = {size: known(size) for size in around}
        return Answer(
            size=found.size,
            certainty=certainty,
            too_large=found.too_large,
            limit=self._limit,
            reserve=self._reserve,
            peak=peaks.get(found.size),
            cost=self._cost(),
            notes=tuple(self._notes),
            peaks=peaks,
            oracle=oracle,
            needs=known,
        )

    def _cost(self) -> Cost:
        steps = {"fake": 0, "real": 0, "samples": 0}
        for oracle in self._oracles.made:
            samples = getattr(oracle, "num_samples", None)
            steps["fake" if samples is None else "real"] += oracle.num_steps
            steps["samples"] += samples or 0
        return Cost(
            fake_steps=steps["fake"],
            real_steps=steps["real"] + sum(one.num_steps for one in self._trials),
            num_samples=steps["samples"] + sum(one.num_samples for one in self._trials),
            num_out_of_memory=sum(one.num_out_of_memory for one in self._trials),
        )
