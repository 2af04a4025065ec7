"""The search for the largest number that fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phantomgpu import Report, RunFailedError
from phantomgpu.child import Settings
from phantomgpu.report import RAN_OUT, Status
from phantomgpu.running import Session
from phantomgpu.searching import (
    Answer,
    Method,
    Processes,
    Range,
    Trial,
    _detailed,
    _Tried,
    as_asked,
    bisect,
    downwards,
)


@given(
    constant=st.integers(0, 1000),
    slope=st.floats(0, 10),
    jump=st.sampled_from([1, 64, 500]),
    allocated=st.floats(0.1, 1),
    available=st.integers(0, 5000),
    first=st.integers(1, 5),
    last=st.integers(5, 3000),
    method=st.sampled_from(["predict", "bisect", "halve"]),
)
def test_the_answer_is_the_largest_that_fits(
    *,
    constant: int,
    slope: float,
    jump: int,
    allocated: float,
    available: int,
    first: int,
    last: int,
    method: Method,
) -> None:
    tried: list[int] = []

    def reserved(index: int) -> int:
        return int(constant + slope * (index // jump * jump))

    def used(index: int) -> tuple[int, int]:
        return int(allocated * reserved(index)), reserved(index)

    def fits(index: int) -> bool:
        tried.append(index)
        return reserved(index) <= available

    how: dict[str, Any] = {"start": downwards(first, last, method), "halves": method == "bisect"}
    found = bisect(fits, used, available, first=first, last=last, **how)
    expected = [index for index in range(first, last + 1) if reserved(index) <= available]
    assert found == (expected[-1] if expected else None)
    assert all(first <= index <= last for index in tried)
    assert len(tried) == len(set(tried)) <= 40
    if found is not None:
        assert {found, min(found + 1, last)} <= set(tried)


def test_a_straight_line_takes_few_trials() -> None:
    tried: list[int] = []

    def fits(index: int) -> bool:
        tried.append(index)
        return index <= 29_184

    def used(index: int) -> tuple[int, int]:
        return 10**6 + 4999 * index // 10, 10**6 + 500 * index

    assert bisect(fits, used, 10**6 + 500 * 29_184, first=1, last=1 << 20) == 29_184
    assert len(tried) <= 9


@pytest.mark.parametrize("limit", [3, 5, 8, 13, 30, 77, 300])
@pytest.mark.parametrize("constant", [0.02, 0.3, 0.9])
def test_a_search_takes_few_trials(limit: int, constant: float) -> None:
    """Of the memory, a part is taken whatever the size; blocks are rounded; fragments vary."""
    tried: list[int] = []
    available = 80 * 1024

    def used(index: int) -> tuple[int, int]:
        slope = available * (1 - constant) / limit
        exact = int(available * constant + slope * index)
        return exact, exact + index % 7 * 16

    def fits(index: int) -> bool:
        tried.append(index)
        return index <= limit and used(index)[0] <= available

    assert bisect(fits, used, available, first=1, last=1 << 20) == limit
    assert len(tried) <= 9


@given(st.integers(100, 5000), st.sets(st.integers(1, 15)), st.integers(1, 3))
def test_an_answer_was_run_and_the_next_does_not_fit(
    limit: int, holes: set[int], grid: int
) -> None:
    """The allocator may find room for a number, and none for a smaller one."""
    tried: list[int] = []

    def fits(index: int) -> bool:
        return index <= limit and (limit - index not in holes or index % (1 << grid) == 0)

    def seen(index: int) -> bool:
        tried.append(index)
        return fits(index)

    def used(index: int) -> tuple[int, int]:
        return 1000 + 100 * index, 1000 + 101 * index

    found = bisect(seen, used, 1000 + 100 * limit, first=1, last=1 << 20)
    assert found is not None
    assert found in tried
    assert found + 1 in tried
    assert fits(found)
    assert not fits(found + 1)
    assert len(tried) == len(set(tried)) <= 20


def test_a_number_beyond_the_first_that_does_not_fit_is_tried() -> None:
    """There may be room for 32 samples and none for 21: powers of two leave no fragments."""
    assert bisect(lambda n: n <= 20 or n == 32, lambda n: (n, n), 34, first=1, last=1000) == 32


@pytest.mark.parametrize(
    ("smallest", "largest", "multiple", "powers"),
    [
        *((10, 5, 1, False), (1, 4, 8, False), (9, 15, 8, False), (0, 4, 1, False)),
        *((1, 4, 0, False), (5, 7, 1, True), (1, 64, 3, True), (1, 7, 8, True)),
    ],
)
def test_a_range_without_a_number_is_refused(
    smallest: int, largest: int, multiple: int, powers: bool
) -> None:
    with pytest.raises(ValueError, match="range"):
        Range(smallest, largest, multiple, powers)


@given(st.integers(1, 99), st.integers(1, 99), st.integers(1, 20), st.booleans())
def test_a_range_is_the_numbers_in_it(a: int, b: int, multiple: int, powers: bool) -> None:
    inside = [
        number
        for number in range(a, b + 1)
        if number % multiple == 0 and not (powers and number & (number - 1))
    ]
    if not inside:
        with pytest.raises(ValueError, match="range"):
            Range(a, b, multiple, powers)
    else:
        found = Range(a, b, multiple, powers)
        assert [found.number(index) for index in range(found.first, found.last + 1)] == inside


def report(*, steps: int, status: Status = "fits") -> Report:
    return Report(status=status, gpu="a GPU", memory=1, context=0, steps=steps)


def test_a_number_that_trains_nothing_does_not_fit() -> None:
    """A data set of 2,000 samples, and a loader that drops the last batch."""
    tried = _Tried(None, trains=True)
    runs: list[int] = []

    def trial(number: int) -> Report:
        runs.append(number)
        return report(steps=3 if number <= 2000 else 0)

    def fits(number: int) -> bool:
        return tried.fits(number, trial)

    found = bisect(fits, lambda n: (n, n), 1 << 20, first=1, last=1 << 20)
    assert found == 2000
    assert len(runs) <= 20
    assert "2001" in Answer(found, tried.reports).bound
    assert "optimizer step" in Answer(found, tried.reports).bound


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_a_number_that_takes_no_more_memory_is_no_larger_batch(phase: str) -> None:
    """A data set of 2,000 samples, and a loader that keeps the last batch."""

    def made(number: int) -> Report:
        peak = min(number, 2000)
        return replace(report(steps=1), peak_allocated=peak, phase=phase)

    trials = {number: made(number) for number in (2, 4, 128, 4096, 88983, 1 << 20)}
    answer = _detailed(Answer(1 << 20, trials), made)
    assert answer.largest == (4096 if phase == "backward" else 1 << 20)
    assert ("88983 took no more memory" in answer.bound) == (phase == "backward")


@pytest.mark.parametrize("grows", [False, True])
def test_a_number_that_the_script_ignores_ends_the_search(grows: bool) -> None:
    """A peak may lie in the optimizer: then a pass forward says whether the batch grew."""
    asked: list[tuple[int, int]] = []

    def differ(one: int, other: int) -> bool:
        asked.append((one, other))
        return grows

    tried = _Tried(None, trains=True, differ=differ)
    assert tried.fits(2, lambda _: report(steps=3))
    assert tried.fits(32, lambda _: report(steps=3))
    if grows:
        assert tried.fits(64, lambda _: report(steps=3))
        assert tried.fits(4096, lambda _: report(steps=3))
    else:
        with pytest.raises(RunFailedError, match="ignores"):
            tried.fits(64, lambda _: report(steps=3))
    assert asked == [(2, 64)]


def test_a_number_with_which_a_script_ran_out_of_memory_does_not_fit() -> None:
    """It caught the error, and went on with half of it."""

    def trial(number: int) -> Report:
        return replace(report(steps=3), doubts=(RAN_OUT,) * (number > 40))

    tried = _Tried(None, trains=True)
    fits = lambda n: tried.fits(n, partial(as_asked, trial))  # noqa: E731
    assert bisect(fits, lambda n: (n, n), 100, first=1, last=1000) == 40
    assert Answer(40, tried.reports).bound == "41 does not fit"


def test_a_script_that_never_trains_is_asked_for_its_end() -> None:
    with pytest.raises(RunFailedError, match="--whole"):
        _Tried(None, trains=True).fits(2, lambda _: report(steps=0))
    assert _Tried(None, trains=False).fits(2, lambda _: report(steps=0))


def test_a_single_sample_is_tried_last() -> None:
    """Batch normalisation refuses it."""
    tried: list[int] = []

    def fits(index: int) -> bool:
        tried.append(index)
        return index <= 1

    assert bisect(fits, lambda n: (n, n), 1, first=1, last=8) == 1
    assert tried == [2, 1]


@given(st.integers(1, 1 << 24))
def test_powers_of_two_grow_by_a_few_doublings(most: int) -> None:
    def fits(index: int) -> bool:
        assert 1 << index <= 32 * max(most, 4)
        return 1 << index <= most

    def used(index: int) -> tuple[int, int]:
        return 1 << index, 1 << index

    found = bisect(fits, used, most, first=0, last=24, farthest=lambda index: index + 5)
    assert found == most.bit_length() - 1


def test_searches_with_as_many_ranks_share_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    @contextmanager
    def served(session: Session, command: list[str], seconds: float) -> Iterator[Trial]:
        def trial(number: int, **asked: Any) -> Any:
            return len(started), asked["file"], asked["session"].settings.ranks

        started.append(command)
        yield trial
        started.clear()

    monkeypatch.setattr("phantomgpu.searching._served", served)
    one, many = (Session("h100", None, Settings(ranks=ranks)) for ranks in (1, 8))
    with Processes() as processes:
        found: list[Any] = [
            processes.trial(session, ["python", "call.py", file], 1)(2)
            for session, file in ((one, "a"), (one, "b"), (many, "c"), (one, "d"))
        ]
        assert found == [(1, "a", 1), (1, "b", 1), (2, "c", 8), (2, "d", 1)]
    assert not started
