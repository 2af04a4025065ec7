from __future__ import annotations

import pytest

from stretto.batching import (
    Fixed,
    Hold,
    IncreaseFunction,
    Monotone,
    checked_size,
    checked_state,
)
from stretto.errors import BatchSizeError
from stretto.timing import Horizon, Timestamp

HORIZON = Horizon("10ep", dataset_num_samples=10)


class Index:
    """An integer of another library, such as NumPy's."""

    def __index__(self) -> int:
        return 12


def test_any_integer_is_a_size() -> None:
    size = checked_size(Index())
    assert (size, type(size)) == (12, int)


def test_a_hold_ends_with_its_first_limit() -> None:
    samples, batches = HORIZON.axis("sp"), HORIZON.axis("ba")
    hold = Hold(((samples, 20),)) & Hold(((batches, 3),))
    assert hold.covers(Timestamp(sample=19, batch=2))
    assert not hold.covers(Timestamp(sample=20, batch=2))
    assert not hold.covers(Timestamp(sample=19, batch=3))
    assert Hold().covers(Timestamp(sample=10**30))
    assert hold & Hold() == hold


def test_a_saved_state_goes_with_its_policy() -> None:
    monotone = Monotone(IncreaseFunction(lambda epoch, size: 1, 8, 64)).bind(HORIZON)
    fixed = Fixed(8).bind(HORIZON)
    assert checked_state(monotone, monotone.start()) == monotone.start()
    with pytest.raises(BatchSizeError, match="this policy keeps no state; resume with the policy"):
        checked_state(fixed, monotone.start())
    with pytest.raises(BatchSizeError, match="this policy keeps inner, largest"):
        checked_state(monotone, fixed.start())
