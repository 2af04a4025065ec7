"""Refuses runs too long for an exact time."""

from __future__ import annotations

from stretto.errors import PlanError, shown
from stretto.planning.sizes import PlannedSizes
from stretto.timing.number import MAX_DIGITS

_LIMIT = 10 ** (MAX_DIGITS - 2)


def check_length(sizes: PlannedSizes) -> None:
    """Refuse a run whose positions exceed the digits of an exact time.

    A fraction of the run is a count times the denominator of the run's length, divided by the
    length. An exact time keeps at most 200 digits.

    >>> from stretto import Horizon
    >>> check_length(PlannedSizes(Horizon("1e50sp"), 8))

    Raises:
        PlanError: its counts have more digits than an exact time keeps.
    """
    run = sizes.horizon.max_duration
    if sizes.end is not None and max(sizes.end) * run.amount.denominator >= _LIMIT:
        raise PlanError.cannot(
            f"plan a run of {shown(str(run))}",
            why=f"where it stands takes more than {MAX_DIGITS} digits",
            instead="write a length that a run can have, such as '90ep'",
        )
