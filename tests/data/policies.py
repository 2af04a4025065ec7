"""Strategies for batch size policies."""

from __future__ import annotations

from hypothesis import strategies as st

from stretto.batching import (
    BatchSizePolicy,
    DoublingRamp,
    Fixed,
    LinearRamp,
    PiecewiseConstant,
    SizeFunction,
    StagedRamp,
)


def policies(max_size: int = 20) -> st.SearchStrategy[BatchSizePolicy]:
    """Any static policy with sizes up to `max_size`: constant, steps, ramps, a function.

    >>> from hypothesis import given
    >>> from stretto.timing import Horizon, Timestamp
    >>> @given(policies(max_size=8))
    ... def test_sizes_are_positive(policy):
    ...     bound = policy.bind(Horizon("100sp"))
    ...     assert 1 <= bound.decide(Timestamp(), bound.start, None)[0] <= 8
    >>> test_sizes_are_positive()
    """
    sizes = st.integers(1, max_size)
    ascending = st.lists(sizes, min_size=2, max_size=4, unique=True).map(sorted)
    return st.one_of(
        sizes.map(Fixed),
        st.tuples(sizes, sizes).map(lambda two: PiecewiseConstant(f"0sp:{two[0]} 30%:{two[1]}")),
        ascending.map(lambda some: LinearRamp(some[0], some[-1], "70%")),
        ascending.map(lambda some: DoublingRamp(some[0], some[-1], "50%")),
        ascending.map(lambda some: StagedRamp(some, "80%")),
        st.lists(sizes, min_size=1, max_size=4).map(cycled),
    )


def cycled(sizes: list[int], *, planned: bool = True) -> SizeFunction:
    """Return a policy that cycles through the sizes.

    >>> from stretto.planning import walk
    >>> from stretto.timing import Horizon
    >>> horizon = Horizon("7sp")
    >>> [step.size for step in walk(horizon, cycled([1, 2]).bind(horizon))]
    [1, 2, 1, 2, 1]
    """
    return SizeFunction(lambda timestamp, _: sizes[timestamp.batch % len(sizes)], planned=planned)
