from __future__ import annotations

from stretto.batching import (
    NO_SIGNALS,
    Fixed,
    Hold,
    IncreaseFunction,
    Monotone,
    PeriodSizes,
    Steps,
    checked_size,
)
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
    assert monotone.accepts(monotone.start())
    assert fixed.accepts({})
    assert not fixed.accepts(monotone.start())
    assert not monotone.accepts(fixed.start())
    assert not monotone.accepts({"largest": 8, "inner": {"size": 8}})


def test_the_state_of_a_later_period_goes_with_that_period() -> None:
    """What is kept inside depends on the period, and so does what is accepted."""
    policy = PeriodSizes([("10sp", 8), ("rest", Monotone(Steps("0sp:16 20sp:8")))])
    bound = policy.bind(HORIZON)
    _, state = bound.decide(Timestamp(sample=16), bound.start(), NO_SIGNALS)
    assert state["period"] == 1
    assert bound.accepts(state)
    assert bound.accepts(bound.start())
    assert not bound.accepts({**state, "period": 0})
    assert not bound.accepts({**state, "period": 2})
    assert not bound.accepts({})


def test_a_lower_maximum_holds_for_a_saved_size() -> None:
    bound = IncreaseFunction(lambda epoch, size: 1, 8, 16).bind(HORIZON)
    size, state = bound.decide(Timestamp(epoch=2), {"size": 20, "epochs_asked": 3}, NO_SIGNALS)
    assert (size, state["size"]) == (16, 16)
