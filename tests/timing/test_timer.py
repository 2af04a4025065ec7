"""`Timer`: the one clock, driven through runs counted by hand, with a fake wall clock."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.timing.by_hand import count_by_hand
from tests.timing.strategies import horizons, timestamps

from stretto.errors import TimeError
from stretto.timing import Horizon, Time, Timer, Timestamp, TimeUnit

SECOND = 10**9
RUN = Horizon("100ep")


class FakeClock:
    """A wall clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.nanoseconds = 5 * SECOND

    def __call__(self) -> int:
        return self.nanoseconds

    def wait(self, seconds: float) -> None:
        self.nanoseconds += round(seconds * SECOND)


def drive(timer: Timer, before: Timestamp, after: Timestamp, size: int) -> None:
    """Move a timer from one batch to the next as a training loop does."""
    is_whole = timer.horizon.last_batch == "drop"
    timer.update(size if is_whole else after.sample - before.sample, seconds=1)


@given(horizons(has_batch_size=True))
def test_it_counts_as_one_counts_by_hand(horizon: Horizon) -> None:
    assert isinstance(horizon.batch_sizes, int)
    size, timer = horizon.batch_sizes, Timer(horizon)
    counted = count_by_hand(horizon, size, batches=50)
    for before, after in pairwise(counted):
        assert timer.timestamp == before
        drive(timer, before, after, size)
    assert timer.timestamp == counted[-1]


@given(horizons(has_batch_size=True), st.data())
def test_it_goes_on_from_saved_state(horizon: Horizon, data: st.DataObject) -> None:
    assert isinstance(horizon.batch_sizes, int)
    size, timer = horizon.batch_sizes, Timer(horizon)
    counted = count_by_hand(horizon, size, batches=50)
    cuts = data.draw(st.sets(st.integers(0, len(counted) - 1), max_size=4))
    for number, (before, after) in enumerate(pairwise(counted)):
        if number in cuts:
            state = json.loads(json.dumps(timer.state_dict()))
            timer = Timer(horizon)
            timer.load_state_dict(state)
        drive(timer, before, after, size)
    assert timer.timestamp._replace(job_nanoseconds=0) == counted[-1]._replace(job_nanoseconds=0)


class TestLastBatch:
    def test_drop_passes_over_what_is_left_for_a_batch_that_has_grown(self) -> None:
        timer = Timer(Horizon("2ep", dataset_num_samples=100, last_batch="drop"))
        timer.update(40)
        timer.end_epoch()
        assert timer.timestamp[:7] == (1, 1, 100, 0, 0, 0, 0)

    def test_tokens_of_a_carried_batch_are_shared_between_its_epochs(self) -> None:
        horizon = Horizon("4ep", dataset_num_samples=10, last_batch="carry")
        timer = Timer(horizon)
        timer.update(5, tokens=7)
        timer.update(8, tokens=81)
        assert timer.timestamp[3:7] == (88, 0, 3, 30)
        timer.update(8, tokens=81, tokens_of_last=lambda samples: 50 + samples)
        assert timer.timestamp[3:7] == (169, 0, 1, 51)
        with pytest.raises(TimeError, match="the whole batch has 7"):
            timer.update(10, tokens=7, tokens_of_last=lambda _: 8)

    def test_a_batch_may_carry_over_several_epochs(self) -> None:
        timer = Timer(Horizon("5ep", dataset_num_samples=3, last_batch="carry"))
        timer.update(8)
        assert timer.timestamp[:7] == (2, 1, 8, 0, 0, 2, 0)

    def test_data_without_a_known_size_end_when_they_end(self) -> None:
        timer = Timer(Horizon("3ep", last_batch="carry"))
        timer.update(7)
        timer.end_epoch()
        timer.update(9, tokens=18)
        assert timer.timestamp[:7] == (1, 2, 16, 18, 1, 9, 18)
        timer.end_epoch(carried=2, tokens=4)
        assert timer.timestamp[:7] == (2, 2, 16, 18, 0, 2, 4)
        assert timer.get_elapsed_duration() == 2 / 3

    def test_samples_of_data_without_a_known_size_are_dropped(self) -> None:
        timer = Timer(Horizon("2ep", last_batch="drop"))
        timer.update(8)
        timer.end_epoch(dropped=3)
        assert timer.timestamp[:7] == (1, 1, 11, 0, 0, 0, 0)

    @pytest.mark.parametrize(
        ("last_batch", "counted", "carried", "message"),
        [
            ("keep", 90, 0, "cannot end the epoch after 90 samples: the data set has 100"),
            ("carry", 90, 0, "cannot end the epoch after 90 samples: the data set has 100"),
            ("drop", 90, 91, "epoch with 91 samples and 0 tokens over: it has had fewer"),
        ],
    )
    def test_epochs_that_do_not_add_up(
        self, last_batch: Any, counted: int, carried: int, message: str
    ) -> None:
        timer = Timer(Horizon("2ep", dataset_num_samples=100, last_batch=last_batch))
        timer.update(counted)
        before = timer.timestamp
        with pytest.raises(TimeError, match=message):
            timer.end_epoch(carried=carried)
        assert timer.timestamp == before

    def test_more_tokens_carried_than_counted(self) -> None:
        timer = Timer(RUN)
        timer.update(5, tokens=5)
        with pytest.raises(TimeError, match="fewer"):
            timer.end_epoch(carried=2, tokens=6)


class TestWallTime:
    def test_it_is_measured_from_batch_to_batch(self) -> None:
        clock = FakeClock()
        timer = Timer(RUN, clock=clock)
        clock.wait(2)
        timer.update(1)
        clock.wait(0.5)
        timer.update(1)
        assert timer.timestamp.run_nanoseconds == timer.timestamp.job_nanoseconds == 2_500_000_000
        assert timer.timestamp.batch_nanoseconds == 500_000_000
        assert timer.get("sec") == Time("2.5s")

    def test_an_epoch_has_its_own(self) -> None:
        clock = FakeClock()
        timer = Timer(RUN, clock=clock)
        clock.wait(2)
        timer.update(1)
        timer.end_epoch()
        assert timer.timestamp.epoch_nanoseconds == 0
        clock.wait(1)
        timer.update(1)
        now = timer.timestamp
        assert (now.epoch_nanoseconds, now.run_nanoseconds) == (SECOND, 3 * SECOND)

    def test_what_passes_before_the_start_does_not_count(self) -> None:
        clock = FakeClock()
        timer = Timer(RUN, clock=clock)
        clock.wait(100)
        timer.start()
        clock.wait(1)
        timer.update(1)
        assert timer.get("sec") == Time("1s")

    def test_a_resumed_run_keeps_its_wall_time_and_starts_a_new_job(self) -> None:
        clock = FakeClock()
        timer = Timer(RUN, clock=clock)
        clock.wait(100)
        timer.update(1)
        state = timer.state_dict()
        clock.wait(3600)  # the machine was down
        resumed = Timer(RUN, clock=clock)
        clock.wait(7)  # loading the checkpoint
        resumed.load_state_dict(state)
        clock.wait(5)
        resumed.update(1)
        now = resumed.timestamp
        assert (now.run_nanoseconds, now.job_nanoseconds) == (105 * SECOND, 5 * SECOND)

    def test_there_is_no_cap_at_a_day(self) -> None:
        clock = FakeClock()
        timer = Timer(Horizon("100d"), clock=clock)
        for _ in range(100):
            clock.wait(86_400)
            assert timer.get_elapsed_duration() < 1
            timer.update(1)
        assert timer.get("sec") == Time("100d") == Time(timedelta(days=100))
        assert timer.get_elapsed_duration() == 1.0

    def test_seconds_may_be_told(self) -> None:
        timer = Timer(RUN, clock=FakeClock())
        timer.update(1, seconds=1.5)
        timer.update(1, seconds=np.float32(0.5))  # type: ignore[arg-type]
        assert timer.timestamp.run_nanoseconds == 2 * SECOND
        assert type(timer.timestamp.run_nanoseconds) is int

    def test_what_is_told_is_not_measured_again(self) -> None:
        clock = FakeClock()
        timer = Timer(RUN, clock=clock)
        clock.wait(3)
        seconds = timer.seconds_since_update()
        clock.wait(1)  # the ranks wait for each other
        timer.update(1, seconds=seconds)
        timer.update(1)
        assert (seconds, timer.get("sec")) == (3.0, Time("4s"))

    def test_it_never_goes_back(self) -> None:
        clock = FakeClock()
        timer = Timer(RUN, clock=clock)
        timer.update(1, seconds=10)  # told by another rank, whose clock is ahead
        clock.wait(4)
        assert timer.seconds_since_update() == 0
        timer.update(1)
        assert timer.get("sec") == Time("10s")

    def test_the_real_clock_moves(self) -> None:
        timer = Timer(RUN)
        threading.Event().wait(0.001)
        timer.update(1)
        assert timer.timestamp.run_nanoseconds >= 1_000_000


class TestAt:
    @given(horizons(), st.data())
    def test_it_stands_there(self, horizon: Horizon, data: st.DataObject) -> None:
        now = data.draw(timestamps(horizon))
        timer = Timer.at(now, horizon)
        assert timer.timestamp == now
        assert timer.horizon is horizon
        for name in Timestamp._fields[:4]:
            assert getattr(timer, name) == getattr(now, name)
        for unit in TimeUnit:
            assert timer.get(unit) == horizon.position(now, unit)
        assert timer.get_elapsed_duration() == horizon.elapsed(now)
        assert Timer.at(now, horizon).state_dict() == now.to_state()


class TestCounts:
    def test_any_integer_type_becomes_an_int(self) -> None:
        timer = Timer(RUN)
        timer.update(np.int32(5), tokens=np.int64(2**62))  # type: ignore[arg-type]
        timer.update(np.int64(1), tokens=np.int64(2**62))  # type: ignore[arg-type]
        timer.end_epoch(carried=np.int64(1))  # type: ignore[arg-type]
        assert {type(value) for value in timer.state_dict().values()} == {int}
        assert timer.token == 2**63

    @pytest.mark.parametrize("count", [-1, 1.0, True, "5", None, np.float64(5)])
    @pytest.mark.parametrize("name", ["samples", "tokens"])
    def test_counts_that_cannot_be(self, name: str, count: Any) -> None:
        timer = Timer(RUN)
        timer.update(5, tokens=5)
        before, counts = timer.timestamp, {"samples": 1, "tokens": 1, name: count}
        if count is not None or name == "samples":
            with pytest.raises(TimeError, match=name):
                timer.update(**counts)
        with pytest.raises(TimeError, match=name.replace("samples", "carried")):
            timer.end_epoch(carried=counts["samples"], tokens=counts["tokens"])
        with pytest.raises(TimeError, match="dropped"):
            timer.end_epoch(dropped=count)
        assert timer.timestamp == before

    @pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
    def test_seconds_that_cannot_be(self, seconds: float) -> None:
        timer = Timer(RUN)
        with pytest.raises(TimeError, match="seconds"):
            timer.update(1, seconds=seconds)
        assert timer.batch == 0


class TestState:
    def test_counters_of_another_data_set_are_refused(self) -> None:
        state = Timestamp(epoch=2, sample=205, sample_in_epoch=5).to_state()
        Timer(Horizon("3ep", dataset_num_samples=100)).load_state_dict(state)
        timer = Timer(Horizon("3ep", dataset_num_samples=90))
        with pytest.raises(TimeError, match="samples"):
            timer.load_state_dict(state)
        assert timer.timestamp == Timestamp()

    def test_records_that_are_not_timestamps(self) -> None:
        with pytest.raises(TimeError, match="timestamp"):
            Timer(RUN).load_state_dict({})

    def test_repr_shows_where_it_stands(self) -> None:
        assert repr(Timer(RUN)).startswith("<Timer at Timestamp(epoch=0, batch=0")
