from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from stretto.batching import (
    NO_SIGNALS,
    AtLeast,
    AtMost,
    DoublingRamp,
    Fixed,
    Hold,
    IncreaseFunction,
    LinearRamp,
    Monotone,
    MultipleOf,
    NoiseScale,
    NormTest,
    PeriodSizes,
    PiecewiseConstant,
    Plateau,
    Seesaw,
    SizeFunction,
    StagedRamp,
    as_policy,
    checked_size,
    rampup,
    split,
)
from stretto.ordering import SampleOrder
from stretto.schedules import Cosine
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
    assert monotone.accepts(monotone.start)
    assert fixed.accepts({})
    assert not fixed.accepts(monotone.start)
    assert not monotone.accepts(fixed.start)
    assert not monotone.accepts({"largest": 8, "inner": {"size": 8}})


def test_the_state_of_a_later_period_goes_with_that_period() -> None:
    """What is kept inside depends on the period, and so does what is accepted."""
    policy = PeriodSizes([("10sp", 8), ("rest", Monotone(PiecewiseConstant("0sp:16 20sp:8")))])
    bound = policy.bind(HORIZON)
    _, state = bound.decide(Timestamp(sample=16), bound.start, NO_SIGNALS)
    assert state["period"] == 1
    assert bound.accepts(state)
    assert bound.accepts(bound.start)
    assert not bound.accepts({**state, "period": 0})
    assert not bound.accepts({**state, "period": 2})
    assert not bound.accepts({})


def test_a_lower_maximum_holds_for_a_saved_size() -> None:
    bound = IncreaseFunction(lambda epoch, size: 1, 8, 16).bind(HORIZON)
    size, state = bound.decide(Timestamp(epoch=2), {"size": 20, "epochs_asked": 3}, NO_SIGNALS)
    assert (size, state["size"]) == (16, 16)


def _np(size: int) -> Any:
    return np.int64(size)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: as_policy(n(8)),
        lambda n: PiecewiseConstant({"0ep": n(8)}),
        lambda n: LinearRamp(n(8), n(24), "1ep", increment=n(8)),
        lambda n: DoublingRamp(n(8), n(16), "1ep"),
        lambda n: StagedRamp([n(8), n(16)], "1ep"),
        lambda n: rampup(n(16), "1ep", world_size=n(2), micro_batch_size=n(4)),
        lambda n: SizeFunction(lambda now, size: n(8), n(8)),
        lambda n: IncreaseFunction(lambda epoch, size: n(4), n(4), n(8)),
        lambda n: AtMost(AtLeast(MultipleOf(Fixed(n(9)), n(8)), n(8)), n(16)),
        lambda n: NoiseScale(n(8), n(16), minimum=n(8), window=n(20)),
        lambda n: NormTest(n(8), n(16), eta=0.5, window=n(20)),
        lambda n: Plateau("validation/loss", start=n(8), maximum=n(16), patience=n(1)),
        lambda n: Seesaw(Cosine(), n(8), maximum=n(16), multiple_of=n(8)).policy,
    ],
)
def test_integers_of_numpy_are_integers(make: Any) -> None:
    """And nothing of NumPy's is left, which JSON could not keep."""
    horizon = Horizon("2ep", dataset_num_samples=100)
    bound = make(_np).bind(horizon)
    size, state = bound.decide(Timestamp(), bound.start, NO_SIGNALS)
    assert (size, type(size)) == (8, int)
    assert json.loads(json.dumps(state)) == state
    assert repr(make(_np)).split(" at ")[0] == repr(make(int)).split(" at ")[0]


def test_other_integers_that_count_samples_may_be_of_numpy_too() -> None:
    shared = split(_np(13), _np(2), _np(4), start=_np(1))
    assert (shared.shares, shared.accumulation) == ((6, 7), 2)
    assert SampleOrder(_np(10), _np(3)) == SampleOrder(10, 3)
    assert type(SampleOrder(_np(10), _np(3)).seed) is int
