"""Further micro-batches: which are timed, and that nothing waits for the device."""

from __future__ import annotations

import itertools

import pytest
import torch

from stretto.data import MicroBatch
from stretto.training.further import Further


def pieces(*sizes: int) -> list[MicroBatch]:
    return [MicroBatch(None, size, 0, 1.0) for size in sizes]


class Event:
    """An event of CUDA that the device reaches when `done` says so."""

    clock = itertools.count()
    done = False

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = next(self.clock)

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, end: Event) -> float:
        assert Event.done, "it would wait"
        return 12.0 * (end.at - self.at)


@pytest.mark.parametrize(
    ("batch", "size", "sizes"),
    [(24, 4, (4, 4)), (25, None, (4, 4)), (25, 4, (4,)), (25, 4, (4, 3)), (25, 8, (4, 4))],
    ids=["not due", "whole share", "one", "unequal", "not the stated size"],
)
def test_a_step_that_tells_nothing_is_left_alone(
    batch: int, size: int | None, sizes: tuple[int, ...]
) -> None:
    given = pieces(*sizes)
    assert Further(torch.device("cpu"), 1).watched(batch, size, given) is given


@pytest.mark.parametrize(("ranks", "count", "seconds"), [(1, 2, 3.0), (2, 3, 1.5)])
def test_the_time_after_the_first_counts_without_the_last_of_several_ranks(
    ranks: int, count: int, seconds: float
) -> None:
    further = Further(torch.device("cpu"), ranks)
    further.clock = itertools.count(0, 12 * 10**9).__next__
    assert [*further.watched(25, 4, pieces(*[4] * count))]
    assert further.take() == seconds
    assert further.take() is None
    few = pieces(*[4] * (count - 1))
    assert further.watched(25, 4, few) is few


def test_events_are_read_when_the_device_has_reached_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    further = Further(torch.device("cuda"), 1)
    assert len([*further.watched(75, 4, pieces(4, 4, 4))]) == 3
    assert further.take() is None
    monkeypatch.setattr(Event, "done", True)
    assert further.take() == pytest.approx(0.0015)
