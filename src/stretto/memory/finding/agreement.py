"""`Agreement`: ranks that look for one answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from stretto.errors import FitError

_FAILED = -1


@final
class Agreement:
    """Lets ranks agree on the least of their numbers.

    Args:
        agree_minimum: returns the least of a number over all ranks; None: there is one rank.

    >>> Agreement(lambda number: min(number, 3)).minimum(lambda: 8)
    3
    """

    def __init__(self, agree_minimum: Callable[[int], int] | None = None) -> None:
        self._agree = agree_minimum

    def minimum(self, work: Callable[[], int]) -> int:
        """Do some work on every rank, and return the least number that came of it on any.

        An error on one rank ends the search on all: the others get a `FitError`, and none waits.

        Raises:
            FitError: another rank has failed.
        """
        if self._agree is None:
            return work()
        try:
            number = work()
        except BaseException:
            self._agree(_FAILED)
            raise
        least = self._agree(number)
        if least == _FAILED:
            raise FitError.cannot(
                "find a batch size on this rank alone",
                why="another rank has failed",
                instead="look for the error that it shows",
            )
        return least

    def all(self, work: Callable[[], bool]) -> bool:
        """Do some work on every rank, and return whether it succeeded on all."""
        return self.minimum(lambda: int(work())) == 1
