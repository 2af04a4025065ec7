from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import (
    NO_SIGNALS,
    BatchSizePolicy,
    DoublingRamp,
    LinearRamp,
    MultipleOf,
    PeriodSizes,
    StagedRamp,
    rampup,
)
from stretto.errors import BatchSizeError, ConversionError
from stretto.planning import plan
from stretto.timing import Horizon, Time, Timestamp

sizes = st.integers(1, 300)


def size_at(policy: BatchSizePolicy, horizon: Horizon, timestamp: Timestamp) -> int:
    bound = policy.bind(horizon)
    return bound.decide(timestamp, bound.start, NO_SIGNALS)[0]


@given(sizes, sizes, st.integers(1, 500), st.integers(0, 600))
def test_a_linear_ramp_is_its_formula(one: int, two: int, over: int, now: int) -> None:
    start, end = sorted((one, two))
    got = size_at(LinearRamp(start, end, Time(over, "sp")), Horizon("1ep"), Timestamp(sample=now))
    assert got == start + int((end - start) * min(Fraction(1), Fraction(now, over)))


@given(st.data(), st.integers(1, 500), st.integers(0, 600))
def test_ramps_stay_between_start_and_end_and_reach_it(
    data: st.DataObject, over: int, now: int
) -> None:
    start, end = sorted((data.draw(sizes), data.draw(sizes)))
    length = Time(over, "sp")
    ramps: list[BatchSizePolicy] = [
        LinearRamp(start, end, length),
        DoublingRamp(start, end, length),
    ]
    if start < end:
        ramps.append(StagedRamp([start, end], length))
    for ramp in ramps:
        got = [size_at(ramp, Horizon("1ep"), Timestamp(sample=s)) for s in (0, now, now + 1, over)]
        assert got[0] == start
        assert got[-1] == end
        assert start <= got[1] <= got[2] <= end


@given(st.data())
def test_holds_end_exactly_where_the_size_changes(data: st.DataObject) -> None:
    start, end = sorted((data.draw(sizes), data.draw(sizes)))
    length = Time(data.draw(st.integers(1, 300)), "sp")
    kind = data.draw(st.sampled_from([LinearRamp, DoublingRamp]))
    bound = kind(start, end, length).bind(Horizon("1ep"))
    now = 0
    while True:
        size = bound.decide(Timestamp(sample=now), {}, NO_SIGNALS)[0]
        hold = bound.holds_until(Timestamp(sample=now), {})
        assert hold is not None
        if not hold.limits:
            break
        ((axis, tick),) = hold.limits
        assert axis.unit == "sp"
        before = bound.decide(Timestamp(sample=tick - 1), {}, NO_SIGNALS)[0]
        after = bound.decide(Timestamp(sample=tick), {}, NO_SIGNALS)[0]
        assert before == size < after
        now = tick
    assert size == end


@pytest.mark.parametrize(
    ("ramp", "expected"),
    [
        (LinearRamp(8, 32, "12ba", increment=8), [8] * 4 + [16] * 4 + [24] * 4 + [32] * 2),
        (DoublingRamp(8, 32, "12ba"), [8] * 6 + [16] * 6 + [32] * 2),
        (DoublingRamp(8, 40, "12ba"), [8] * 4 + [16] * 4 + [32] * 4 + [40] * 2),
        (StagedRamp([1, 5, 50], "10ba"), [1] * 5 + [5] * 5 + [50] * 4),
        (StagedRamp([1, 5, 50, 51], "10ba"), [1] * 4 + [5] * 3 + [50] * 3 + [51] * 4),
        (LinearRamp(8, 8, "10ba"), [8] * 14),
        (DoublingRamp(8, 8, "10ba"), [8] * 14),
    ],
    ids=["increments", "doubling", "doubling to 40", "stages", "thirds", "flat", "flat doubling"],
)
def test_known_ramps(ramp: BatchSizePolicy, expected: list[int]) -> None:
    horizon = Horizon("14ba")
    assert [size_at(ramp, horizon, Timestamp(batch=batch)) for batch in range(14)] == expected


@pytest.mark.parametrize("over", ["0.5ep", "10sp", "50tok", "25%", "0.25dur"])
def test_a_ramp_may_be_in_any_unit(over: str) -> None:
    horizon = Horizon("2ep", dataset_num_samples=20, tokens_per_sample=5)
    got = [
        size_at(DoublingRamp(1, 4, over), horizon, Timestamp(sample=s, token=5 * s))
        for s in (0, 4, 5, 9, 10)
    ]
    assert got == [1, 1, 2, 2, 4]


def test_a_ramp_may_follow_the_wall_clock() -> None:
    bound = LinearRamp(1, 3, "2m").bind(Horizon("1h"))
    assert not bound.is_static
    assert bound.decide(Timestamp(run_nanoseconds=60 * 10**9), {}, NO_SIGNALS)[0] == 2


def test_whole_epochs_of_unknown_length_are_enough() -> None:
    bound = StagedRamp([8, 16, 64], "2ep").bind(Horizon("4ep"))
    got = [bound.decide(Timestamp(epoch=epoch), {}, NO_SIGNALS)[0] for epoch in range(4)]
    assert got == [8, 16, 64, 64]


def test_scaling_stretches_the_length_but_not_fractions() -> None:
    assert LinearRamp(8, 64, "2ep", increment=8).scaled(0.5) == LinearRamp(
        8, 64, "1ep", increment=8
    )
    assert DoublingRamp(8, 64, "5ba").scaled(0.5) == DoublingRamp(8, 64, "3ba")
    assert StagedRamp([8, 64], "10%").scaled(2) == StagedRamp([8, 64], "10%")
    with pytest.raises(BatchSizeError, match="positive"):
        LinearRamp(8, 64, "2ep").scaled(0)


def test_rampup_drops_accumulation_down_to_the_lowest_size() -> None:
    ramp = rampup(4096, "1Btok", world_size=8, micro_batch_size=64)
    assert ramp == DoublingRamp(512, 4096, "1Btok")
    # The pull request's own example: from 1024 there are two stages before 4096.
    ramp = rampup(
        4096, "1Btok", world_size=8, micro_batch_size=128, initial_global_train_batch_size=1024
    )
    assert ramp == DoublingRamp(1024, 4096, "1Btok")


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 12), st.integers(1, 12))
def test_every_size_of_rampup_is_even(world: int, micro: int, first: int, more: int) -> None:
    unit = world * micro
    ramp = rampup(
        unit * (first + more),
        "1ep",
        world_size=world,
        micro_batch_size=micro,
        initial_global_train_batch_size=unit * first,
    )
    assert isinstance(ramp, DoublingRamp)
    assert all(size % unit == 0 for size in ramp.sizes)


@pytest.mark.parametrize(
    "value",
    [
        LinearRamp(8, 64, "2.5ep"),
        LinearRamp(8, 64, "1/3ep", increment=8),
        DoublingRamp(8, 64, "1h30m"),
        StagedRamp([8, 9], "10%"),
    ],
    ids=repr,
)
def test_repr_reads_back(value: BatchSizePolicy) -> None:
    assert eval(repr(value)) == value
    assert hash(eval(repr(value))) == hash(value)
    assert [time.amount > 0 for time in value.times()] == [True]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: LinearRamp(0, 8, "1ep"), "use 0 as a batch size"),
        (lambda: LinearRamp(8, 16.0, "1ep"), "use 16.0 as a batch size"),
        (lambda: LinearRamp(True, 16, "1ep"), "use True as a batch size"),
        (lambda: LinearRamp(16, 8, "1ep"), "a ramp does not shrink"),
        (lambda: DoublingRamp(16, 8, "1ep"), "a ramp does not shrink"),
        (lambda: LinearRamp(8, 20, "1ep", increment=8), "16 or 24"),
        (lambda: LinearRamp(8, 16, "1ep", increment=0), "use 0"),
        (lambda: DoublingRamp(8, 16, "0ep"), "over='0ep': it is not longer than 0"),
        (lambda: StagedRamp([8], "1ep"), "ascending"),
        (lambda: StagedRamp([8, 8], "1ep"), "ascending"),
        (lambda: rampup(100, "1ep", world_size=8, micro_batch_size=4), "multiple"),
        (
            lambda: rampup(
                64, "1ep", world_size=8, micro_batch_size=4, initial_global_train_batch_size=48
            ),
            "initial",
        ),
    ],
)
def test_wrong_ramps_are_refused(make: object, match: str) -> None:
    assert callable(make)
    with pytest.raises(BatchSizeError, match=match):
        make()


def modernbert(start: int, end: int, tokens: int) -> list[int]:
    """Where each size of ModernBERT's `BatchSizeWarmupScheduler` ends, in exact arithmetic."""
    whole, before, thresholds = sum(range(start, end)), 0, []
    for size in range(start, end):
        before += size
        thresholds.append(-(-tokens * before // whole))
    return thresholds


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5000), st.integers(0, 5500))
def test_a_ramp_of_equal_batches_is_modernberts(start: int, more: int, over: int, now: int) -> None:
    ramp = LinearRamp(start, start + more, Time(over, "tok"), equal="batches")
    thresholds = modernbert(start, start + more, over)
    bound = ramp.bind(Horizon("1ep"))
    got = bound.decide(Timestamp(token=now), bound.start, NO_SIGNALS)[0]
    expected = next((start + i for i, end in enumerate(thresholds) if now < end), start + more)
    assert got == expected
    stages = StagedRamp(range(start, start + more + 1), Time(over, "tok"), equal="batches")
    assert size_at(stages, Horizon("1ep"), Timestamp(token=now)) == expected
    hold = bound.holds_until(Timestamp(token=now), {})
    assert hold is not None
    later = [end for end in thresholds if end > now]
    assert [tick for _, tick in hold.limits] == later[:1]


def test_each_size_of_a_ramp_of_equal_batches_has_equally_many_of_them() -> None:
    horizon = Horizon("100Ktok", dataset_num_samples=10**6, tokens_per_sample=10)
    for ramp in (
        LinearRamp(8, 40, "80Ktok", increment=8, equal="batches"),
        DoublingRamp(8, 64, "56Ktok", equal="batches"),
        StagedRamp([10, 20, 50, 60], "80Ktok", equal="batches"),
        DoublingRamp(8, 64, "300ba", equal="batches"),
    ):
        *stages, _ = plan(horizon, ramp).stages
        assert len({stage.batches for stage in stages}) == 1, ramp
        assert eval(repr(ramp)) == ramp
        assert "equal='batches'" in repr(ramp)
        assert ramp.scaled(2) != ramp
        assert "equal='batches'" in repr(ramp.scaled(2))
    assert "equal" not in repr(DoublingRamp(8, 64, "1ep"))


def test_equal_batches_of_what_is_not_known_are_refused() -> None:
    with pytest.raises(BatchSizeError, match="batch"):
        DoublingRamp(8, 64, "1h", equal="batches").bind(Horizon("1ep"))
    with pytest.raises(BatchSizeError, match="batch"):
        LinearRamp(8, 64, "10%", equal="batches").bind(Horizon("1h"))
    with pytest.raises(ConversionError, match="epoch"):
        DoublingRamp(8, 32, "2ep", equal="batches").bind(Horizon("4ep"))
    assert DoublingRamp(8, 32, "3ep", equal="batches").bind(Horizon("4ep")).bounds == (8, 32)
    with pytest.raises(BatchSizeError, match="batches"):
        StagedRamp([8, 16], "1ep", equal="steps")  # type: ignore[arg-type]


def test_a_ramp_without_stages_says_so() -> None:
    horizon = Horizon("2ep", dataset_num_samples=1000)
    none_left = rampup(64, "50%", world_size=4, micro_batch_size=16)
    periods = PeriodSizes([("10%", 8), ("rest", none_left)])
    for policy in (none_left, LinearRamp(64, 64, "1ep"), MultipleOf(none_left, 8), periods):
        (warning,) = plan(horizon, policy).warnings
        assert "no stages left: it starts at its end, 64 samples" in warning
    assert plan(horizon, rampup(64, "50%", world_size=2, micro_batch_size=16)).warnings == ()
