"""What other clocks get wrong, each by name: composer 0.32.1 unless another one is named."""

from __future__ import annotations

import json
from datetime import timedelta
from itertools import pairwise

import pytest
from tests.timing.by_hand import count_by_hand

from stretto.errors import TimeError, UnitError
from stretto.timing import Every, Horizon, Time, Timer, Timestamp


def test_a_bare_number_is_not_seconds() -> None:
    """There '5' is 50 seconds."""
    with pytest.raises(TimeError, match="unit"):
        Time("5")


def test_empty_text_is_not_zero_seconds() -> None:
    with pytest.raises(TimeError, match="empty"):
        Time("")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("24h", timedelta(hours=24)),
        ("30h", timedelta(hours=30)),
        ("90m", timedelta(minutes=90)),
        ("90s", timedelta(seconds=90)),
        ("1.5h", timedelta(hours=1.5)),
        ("1d", timedelta(days=1)),
    ],
)
def test_wall_times_of_any_length_are_read(text: str, same: timedelta) -> None:
    """There each of these is refused."""
    assert Time(text) == Time(same)


def test_half_an_epoch_is_read() -> None:
    assert Time("0.5ep") * 2 == Time("1ep")


@pytest.mark.parametrize("text", ["nandur", "infdur"])
def test_fractions_of_a_run_are_finite(text: str) -> None:
    with pytest.raises(TimeError, match="number"):
        Time(text)


def test_a_hundred_epochs_times_029_are_29() -> None:
    """There they are 28."""
    assert Time(100, "ep") * 0.29 == Time("29ep")


def test_a_token_beyond_two_to_the_53_is_not_lost() -> None:
    assert Time(f"{2**53 + 1}tok") - Time(f"{2**53}tok") == Time("1tok")
    assert int(Time(2**53 + 1, "tok") * 1.0) == 2**53 + 1


def test_an_epoch_compared_with_a_batch_is_not_equal_and_not_an_error() -> None:
    """There `==` raises; here only what would have to convert does."""
    assert Time("1ep") != Time("1ba")
    with pytest.raises(UnitError):
        Time("1ep") < Time("1ba")  # noqa: B015


def test_a_time_is_not_equal_to_a_text_that_hashes_otherwise() -> None:
    assert Time("1ep") != "1ep"
    assert len({Time("1ep"), Time("1.0ep"), Time(1, "ep")}) == 1


def test_a_run_may_last_a_wall_time() -> None:
    horizon = Horizon("36h")
    assert horizon.elapsed(Timestamp(run_nanoseconds=18 * 3600 * 10**9)) == 0.5


def test_a_tenth_of_three_epochs_of_ten_batches_fires_ten_times() -> None:
    """There it fires 8 times."""
    clock = count_by_hand(Horizon("3ep", dataset_num_samples=40), 4)
    bound = Every("0.1dur").bind(Horizon("3ep", dataset_num_samples=40))
    assert sum(bound(before, after) for before, after in pairwise(clock)) == 10


def test_times_of_different_units_meet_on_one_axis() -> None:
    """There a warm-up and a decay must be of one unit."""
    horizon = Horizon("2ep", dataset_num_samples=100, batch_sizes=32)
    axis = horizon.common_axis([Time("3ba"), Time("1dur")])
    assert horizon.ticks(Time("3ba"), axis) == 96
    assert horizon.ticks(Time("1dur"), axis) == 200


def test_the_state_of_the_clock_is_json() -> None:
    """There it is neither JSON nor can it be loaded with weights only."""
    timer = Timer(Horizon("2ep", dataset_num_samples=100))
    timer.advance(30, tokens=2**60, seconds=0.1)
    state = timer.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert {type(name) for name in state} == {str}
    assert {type(count) for count in state.values()} == {int}


def test_progress_does_not_depend_on_the_batch_size() -> None:
    """Under a ramp, counting steps puts the end of the schedule in the wrong place."""
    horizon = Horizon("1ep", dataset_num_samples=64)
    for sizes in ([8] * 8, [2, 6, 8, 16, 32], [64]):
        timer = Timer(horizon)
        for size in sizes:
            timer.advance(size)
        assert timer.get_elapsed_duration() == 1.0


def test_decimal_suffixes_are_exact() -> None:
    """Megatron reads 1.001B as 1000999999."""
    assert int(Time("1.001Btok")) == 1_001_000_000


def test_a_growing_step_never_jumps_over_a_boundary() -> None:
    """`index % k == 0` does: with one more each step it is true every time, or never again."""
    bound, now, fired = Every("100sp").bind(Horizon("5000sp")), Timestamp(), 0
    for size in range(1, 100):
        after = Timestamp(sample=now.sample + size)
        fired += bound.count(now, after)
        now = after
    assert fired == now.sample // 100


def test_time_never_leaves_the_run() -> None:
    """Elsewhere learning rates go negative past the end."""
    assert Horizon("8ba").elapsed(Timestamp(batch=1000)) == 1.0
