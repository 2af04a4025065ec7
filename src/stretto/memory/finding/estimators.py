"""Run estimators on all ranks, and agree on the largest size that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from stretto.errors import FitError, first_line
from stretto.memory.amounts import show_bytes
from stretto.memory.finding.agreement import Agreement
from stretto.memory.finding.result import Estimator
from stretto.memory.measuring.calibration import Overhead
from stretto.memory.measuring.limits import MemoryLimit
from stretto.memory.measuring.probe import Probe
from stretto.memory.prediction.cuda.prediction import CudaPrediction
from stretto.memory.search import CandidateSizes, Found, search
from stretto.runtime.out_of_memory import Attempt, attempt

MOST_MENDS = 8
"""A curve that is still wrong after this many verifications is not trusted."""
NEAR = 0.01
"""If each size costs a step, the answer may be this fraction below the largest that fits."""
MOST_STEPS = 3
"""Most real steps that verify an answer for another device."""
_NO, _YES = 1, 2


class NoEstimateError(FitError):
    """An estimator cannot give an answer; another method may."""


def no_estimate(why: str) -> NoEstimateError:
    """Return the error for an estimator that cannot tell."""
    return NoEstimateError.cannot(
        "find a batch size by this method", why=why, instead="write method='auto'"
    )


class NothingFitsError(FitError):
    """The smallest candidate does not fit."""


@final
class EstimatorRunner:
    """Runs estimators on all ranks and agrees on their answers.

    Args:
        sizes: the candidates.
        agreement: lets ranks agree.
    """

    def __init__(self, sizes: CandidateSizes, agreement: Agreement) -> None:
        self._sizes = sizes
        self._agreement = agreement
        self.tolerated: type[Exception] = FitError
        """Errors of real steps after which the next method is used."""
        self.made: list[Any] = []
        """All estimators that were made."""

    def make(self, make: Callable[[], Estimator], *, is_real: bool = False) -> Estimator:
        """Make an estimator, on every rank or on none.

        Raises:
            NoEstimateError: it cannot be made, here or on another rank.
        """

        def work() -> int:
            self.made.append(make())
            return _YES

        self._agreed(work, self.tolerated if is_real else FitError)
        made: Estimator = self.made[-1]
        return made

    def largest(
        self,
        estimator: Estimator,
        limit: MemoryLimit,
        reserve: int,
        overhead: Overhead | None = None,
    ) -> Found:
        """Return the largest size that fits by a curve; it and the next size are verified.

        Raises:
            NothingFitsError: the smallest candidate does not fit.
            NoEstimateError: the estimator gives no answer.
        """
        tolerated = self.tolerated if isinstance(estimator, Probe) else FitError
        usable = limit.bytes - reserve
        limits = [usable + reserve * part // 4 for part in (4, 0, 5, 3, 1, 2)]
        own: list[Found] = []

        def fits(size: int) -> bool:
            if isinstance(estimator, CudaPrediction) and overhead is None:
                return estimator.fits(size, limits)
            return needs(estimator, overhead, size) <= usable

        def find() -> int:
            smallest = self._sizes.smallest
            if not fits(smallest):
                need = show_bytes(estimator.peak(smallest))
                raise NothingFitsError.cannot(
                    f"fit {smallest:,} sample{'s' * (smallest > 1)} into {limit}",
                    why=f"a step needs {need}, and {show_bytes(reserve)} stay free",
                    instead="make the model or its samples smaller, or give it more memory",
                )
            guess = estimator.guess(usable)
            within = 0.0 if guess is None else NEAR
            own[:] = [search(fits, self._sizes, guess=guess, within=within)]
            return own[0].size

        for _ in range(MOST_MENDS):
            size = self._agreed(find, tolerated)
            found = own[0] if size == own[0].size else Found(size, self._sizes.above(size))
            # With a correction, the answer is not where the curve reaches the limit.
            is_end = overhead is None and found.too_large is not None
            ends = [size, found.too_large] if is_end else [size]
            if self._is_confirmed(estimator, ends, tolerated):
                return found
        raise no_estimate(f"after {MOST_MENDS} steps, its curve is wrong about the next one too")

    def take(
        self, estimator: Probe, found: Found, limit: MemoryLimit, reserve: int
    ) -> Found | None:
        """Verify an answer for an absent device by a real step here; correct it if needed.

        Returns:
            None if the step does not fit on this machine.

        Raises:
            NoEstimateError: the step differs too much from the small ones.
        """
        for _ in range(MOST_STEPS):
            size = found.size

            def fits(size: int = size) -> bool:
                return estimator.peak(size) <= limit.bytes - reserve

            def work(size: int = size) -> int:
                if estimator.certainty(size) != "tried":
                    if size > (estimator.largest_here() or 0):
                        return _NO
                    estimator.calibrate(size)
                return _YES

            if self._agreed(work, self.tolerated) == _NO:
                return None
            if self._agreement.all(fits):
                return found
            found = self.largest(estimator, limit, reserve)
        return None

    def _is_confirmed(
        self, estimator: Estimator, sizes: list[Any], tolerated: type[Exception]
    ) -> bool:
        """Return whether steps of these sizes confirm the estimate; if not, it is updated."""

        def work() -> int:
            # Verify all, so that it learns from all.
            verified = [estimator.verify(size) for size in sizes]
            return _YES if all(verified) else _NO

        return self._agreed(work, tolerated) == _YES

    def _agreed(self, work: Callable[[], int], tolerated: type[Exception]) -> int:
        """Return the minimum of `work()` over all ranks.

        Raises:
            NoEstimateError: it failed on this rank or on another.
        """
        said: list[Exception] = []

        def carefully() -> int:
            try:
                done: Attempt[int] = attempt(work, in_finder=True)
            except NothingFitsError:
                raise
            except tolerated as error:
                said.append(error)
                return 0
            if done.result is None:
                said.append(no_estimate(f"memory ran out in a small step: {done.out_of_memory}"))
            return done.result or 0

        least = self._agreement.minimum(carefully)
        if least:
            return least
        if not said:
            raise no_estimate("another rank could not")
        (error,) = said
        if isinstance(error, FitError):
            raise error.recast(NoEstimateError) from error
        raise no_estimate(first_line(error)) from error


def needs(estimator: Estimator, overhead: Overhead | None, size: int) -> int:
    """Return the estimated bytes of a step of that size, with overhead."""
    return estimator.peak(size) + (0 if overhead is None else overhead.at(size))
