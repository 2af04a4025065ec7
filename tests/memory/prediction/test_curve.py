"""The curve: interpolation, the front, the search along it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import FitError
from stretto.memory.prediction.curve import evaluate, newton
from stretto.memory.prediction.fit import fit, settled
from stretto.memory.prediction.recording import Allocation, Event, Place, Recording

FORWARD, OPTIMIZER = Place("forward", "m"), Place("optimizer", "")


def recording(size: int, polynomials: list[tuple[int, ...]], order: list[int]) -> Recording:
    """Allocations of polynomial sizes; `order` says which is allocated, and then freed."""
    allocations = [
        Allocation(sum(c * size**k for k, c in enumerate(p)), FORWARD, "temporaries", "op")
        for p in polynomials
    ]
    live: set[int] = set()
    events = []
    for index in order:
        events.append(Event(index, index in live, FORWARD))
        live ^= {index}
    return Recording(size, allocations, events)


POLYNOMIALS = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 50)),
    min_size=1,
    max_size=6,
)


@given(POLYNOMIALS, st.data())
def test_any_size_is_foretold(polynomials: list[tuple[int, ...]], data: st.DataObject) -> None:
    # Each once: what is freed before it is allocated cannot be.
    order = data.draw(
        st.lists(st.integers(0, len(polynomials) - 1), min_size=1, max_size=12).map(_no_second_life)
    )
    curve = fit([recording(size, polynomials, order) for size in (2, 3, 7)])
    for size in (1, 2, 5, 7, 100):
        assert curve.peak(size) == recording(size, polynomials, order).peak
        assert curve.at(size).bytes == curve.peak(size)
        assert sum(curve.at(size).by_category.values()) == curve.peak(size)
        assert sum(curve.at(size).by_module.values()) == curve.peak(size)


def _no_second_life(order: list[int]) -> list[int]:
    return [index for place, index in enumerate(order) if order[:place].count(index) < 2]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=4))
def test_a_polynomial_goes_through_its_points(values: list[int]) -> None:
    sizes = (2, 3, 11, 40)[: len(values)]
    for size, value in zip(sizes, values, strict=True):
        assert evaluate(sizes, newton(sizes, values), size) == value


def test_one_allocation_more_is_paired_by_origin() -> None:
    small = recording(2, [(100,), (0, 1000)], [0, 1])
    with_scratch = recording(3, [(100,), (0, 1000), (4,)], [0, 1, 2])
    assert fit([small, with_scratch]).peak(50) == 50_104
    with pytest.raises(FitError, match="allocate"):
        fit([small, recording(3, [(100,), (0, 1000), (5000,)], [0, 1, 2])])


def test_rounded_scratch_grows_on_a_line() -> None:
    rounded = [recording(size, [(count,)], [0]) for size, count in ((2, 210), (3, 300), (5, 510))]
    assert fit(rounded, noise=Fraction(1, 10)).peak(41) == 210 + 39 * 100
    assert fit(rounded).peak(41) != 210 + 39 * 100


def test_a_first_step_lends_its_bytes() -> None:
    def step(size: int, *, has_state: bool) -> Recording:
        state = [Allocation(50, Place("before", ""), "optimizer")] if has_state else []
        rest = [
            Allocation(10 * size, FORWARD, "activations", "op"),
            Allocation(7, OPTIMIZER, "temporaries", "update"),
        ]
        both = [*state, *rest]
        return Recording(size, both, [Event(i, False, one.place) for i, one in enumerate(both)])

    lent = settled(step(2, has_state=False), step(3, has_state=True))
    assert lent == step(2, has_state=True)
    other = Recording(2, [Allocation(1, FORWARD, "batch", "else")], [Event(0, False, FORWARD)])
    assert settled(other, step(3, has_state=True)) is None
