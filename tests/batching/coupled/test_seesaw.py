from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.batching import (
    NO_SIGNALS,
    AtLeast,
    AtMost,
    DecayGrowth,
    DoublingRamp,
    Fixed,
    Hysteresis,
    IncreaseInsteadOfDecay,
    LinearRule,
    Monotone,
    MultipleOf,
    Pair,
    PeriodSizes,
    PiecewiseConstant,
    PolicyLike,
    PowerOfTwo,
    Seesaw,
    SquareRootRule,
    StagedRamp,
    Staircase,
    as_policy,
)
from stretto.batching.seesaw import paired
from stretto.errors import BatchSizeError, PlanError, ScheduleError
from stretto.planning import Plan, PlannedSizes, plan
from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Custom,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    Periods,
    Polynomial,
    Schedule,
    StepDecay,
)
from stretto.timing import Horizon, Time, Timestamp

RUN = Horizon("2ep", dataset_num_samples=900)

decays = st.sampled_from(
    [
        Cosine(warmup="5%"),
        Cosine(1, 0.1),
        Linear(warmup="90sp"),
        Polynomial(power=2.0, warmup="0.1ep"),
        WSD("40%", warmup="5%"),
        MultiStep(["30%", "60%", "80%"]),
        StepDecay("0.5ep", 0.5),
        Exponential("0.3ep", 0.5),
        InverseSqrt(warmup="60sp"),
        Periods([("10%", Linear(0, 1)), ("rest", Cosine())]),
        Cosine() * Linear(0, 1, over="5%"),
        Custom(lambda timer: 1 - timer.get_elapsed_duration() ** 2),
    ]
)
sizes = st.sampled_from(
    [Fixed(8), Fixed(12), PiecewiseConstant("0sp:8 20%:16"), DoublingRamp(4, 16, "300sp")]
)
couplings = st.builds(
    lambda kind, decay, size, factor, smooth, multiple_of, reference: kind(
        decay,
        size,
        factor=factor,
        smooth=smooth and factor != "continuous",
        maximum=256,
        multiple_of=multiple_of,
        reference=reference,
    ),
    st.sampled_from([Seesaw, IncreaseInsteadOfDecay]),
    decays,
    sizes,
    st.sampled_from([2, 1.5, 4.0, "continuous"]),
    st.booleans(),
    st.sampled_from([1, 4, 6]),
    st.sampled_from([None, 32]),
)


def planned(pair: Pair, horizon: Horizon = RUN) -> Plan:
    schedules = {"lr": pair.schedule, "base": pair.schedule, "decay": pair.decay}
    return plan(horizon, pair.policy, schedules=schedules, rule=pair.rule)


@settings(max_examples=30, deadline=None)
@given(couplings)
def test_the_cut_of_the_rate_times_the_growth_of_the_size_is_the_cut_of_the_base(
    pair: Pair,
) -> None:
    reference = pair.reference or (
        8 if pair.size == Fixed(8) else 12 if pair.size == Fixed(12) else 16
    )
    for batch in planned(pair).batches():
        undone = (batch.decided / reference) ** (0.5 if isinstance(pair, Seesaw) else 1)
        assert batch.values["lr"] == pytest.approx(batch.values["base"] * undone, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(couplings)
def test_the_base_is_the_schedule_or_it_rounded_up_to_a_power_of_the_factor(pair: Pair) -> None:
    for batch in planned(pair).batches():
        base, decay = batch.values["base"], batch.values["decay"]
        if pair.smooth or pair.factor == "continuous":
            assert base == decay
        else:
            factor = float(pair.factor)
            assert decay * (1 - 1e-6) <= base <= decay * factor * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(couplings)
def test_a_plan_has_the_samples_of_the_run_and_the_sizes_that_are_decided_batch_by_batch(
    pair: Pair,
) -> None:
    got = planned(pair)
    bound, stages = pair.policy.bind(RUN), iter(got.stages)
    assert got.num_samples == 1800
    stage = next(stages)
    last = 0
    for batch in got.batches():
        if batch.timestamp.batch == stage.first.batch + (stage.batches or 0):
            stage = next(stages)
        assert batch.decided == stage.size
        assert batch.decided == bound.decide(batch.timestamp, {}, NO_SIGNALS)[0]
        assert last <= batch.decided <= 256
        assert batch.decided % pair.multiple_of == 0
        last = batch.decided


@pytest.mark.parametrize("horizon", ["1800sp", "2ep", "3600tok"])
def test_the_unit_of_the_run_makes_no_difference(horizon: str) -> None:
    pair = Seesaw(Cosine(warmup="5%"), 8)
    run = Horizon(horizon, dataset_num_samples=900, tokens_per_sample=2)
    rows = [(stage.first.sample, stage.size) for stage in planned(pair, run).stages]
    assert rows == [(stage.first.sample, stage.size) for stage in planned(pair).stages]


def test_seesaw_in_steps_is_the_algorithm_of_the_paper() -> None:
    # Wherever the base is cut by 2, the rate is divided by sqrt(2) and the batch doubled.
    cuts = [math.acos(2 * 0.5**k - 1) / math.pi for k in range(1, 6)]
    got = planned(Seesaw(Cosine(), 8), Horizon("1Msp")).stages
    for k, (cut, stage) in enumerate(zip(cuts, got[1:], strict=False), 1):
        assert stage.size == 8 * 2**k
        assert stage.first.sample - stage.size <= cut * 1e6 <= stage.first.sample
        assert stage.values["lr"].first == pytest.approx(0.5 ** (k / 2))


def test_seesaw_takes_about_a_third_fewer_steps() -> None:
    horizon = Horizon("1Msp")
    in_steps = planned(Seesaw(Cosine(), 16), horizon).num_batches
    continuous = planned(Seesaw(Cosine(), 16, factor="continuous"), horizon).num_batches
    cuts = [math.acos(2 * 0.5**k - 1) / math.pi for k in range(50)]
    parts = [(after - before) / 2**k for k, (before, after) in enumerate(itertools.pairwise(cuts))]
    assert in_steps is not None
    assert continuous is not None
    assert sum(parts) == pytest.approx(0.622, abs=0.001)
    assert in_steps / 62_500 == pytest.approx(sum(parts), abs=0.001)
    # The mean of the cosine, and a little more, since sizes are rounded down.
    assert 0.5 < continuous / 62_500 < 0.511


def test_steps_of_a_schedule_become_steps_of_the_size() -> None:
    pair = IncreaseInsteadOfDecay(MultiStep(["50%", "75%"]), 10, factor="continuous", maximum=1000)
    got = planned(pair, Horizon("40_000sp"))
    assert [(stage.first.sample, stage.size) for stage in got.stages] == [
        (0, 10),
        (20_000, 100),
        (30_000, 1000),
    ]
    assert [stage.values["lr"].first for stage in got.stages] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("factor", [2, 3, "continuous"])
@pytest.mark.parametrize("kind", [Seesaw, IncreaseInsteadOfDecay])
@pytest.mark.parametrize("decay", [Cosine(warmup="5%"), Linear(over="50%"), Linear(1, 0.001)])
def test_without_a_maximum_batches_grow_to_64_times_their_size(
    decay: Schedule, kind: type[Pair], factor: Any
) -> None:
    horizon = Horizon("1Msp", last_batch="carry")
    got = planned(kind(decay, 8, factor=factor), horizon)
    assert max(stage.size for stage in got.stages) == 512
    given = planned(kind(decay, 8, factor=factor, maximum=512), horizon)
    assert list(given.stages) == list(got.stages)
    (warning,) = got.warnings
    assert "grow to 512" in warning
    assert "64 times the 8 before" in warning
    assert not given.warnings


def test_a_bound_that_is_not_reached_is_not_told() -> None:
    assert not planned(Seesaw(Cosine(1, 0.1), 8)).warnings
    assert not planned(Seesaw(Linear(), 8), Horizon("640sp", last_batch="carry")).warnings


def test_the_bound_of_a_warmed_up_batch_is_that_of_its_end() -> None:
    pair = Seesaw(Cosine(), DoublingRamp(2, 4, "10%"), multiple_of=3)
    got = planned(pair, Horizon("1Msp"))
    assert max(stage.size for stage in got.stages) == 255
    assert "64 times the 4 before" in got.warnings[0]


def test_nothing_changes_up_to_the_peak() -> None:
    decay = Cosine(warmup="25%")
    batches = list(planned(Seesaw(decay, 8)).batches())
    before = list(itertools.takewhile(lambda batch: batch.timestamp.sample <= 450, batches))
    assert {batch.decided for batch in before} == {8}
    assert [batch.values["lr"] for batch in before] == [b.values["decay"] for b in before]


def test_a_warm_up_of_the_batch_goes_before() -> None:
    pair = Seesaw(Cosine(warmup="10%"), DoublingRamp(4, 16, "20%"), maximum=64)
    got = planned(pair)
    assert [stage.size for stage in got.stages] == [4, 8, 16, 32, 64]
    at = {stage.size: stage.values for stage in got.stages}
    assert at[8]["lr"].first == pytest.approx(at[8]["base"].first * math.sqrt(8 / 16))
    assert at[16]["lr"].first == 1.0


def test_runs_of_unknown_token_counts_follow_the_clock() -> None:
    pair = Seesaw(Linear(), 8, maximum=64)
    bound = pair.policy.bind(Horizon("1000tok"))
    decided = [bound.decide(Timestamp(token=t), {}, NO_SIGNALS)[0] for t in (0, 499, 500, 750, 999)]
    assert decided == [8, 8, 16, 32, 64]
    hold = bound.holds_until(Timestamp(token=100), {})
    assert hold is not None
    assert [(axis.unit, tick) for axis, tick in hold.limits] == [("tok", 500)]


def test_runs_that_end_by_the_clock_grow_with_the_schedule() -> None:
    pair = Seesaw(Linear(over="1000sp", warmup="10sp"), 8, maximum=32)
    bound = pair.policy.bind(Horizon("1h"))
    decided = [bound.decide(Timestamp(sample=s), {}, NO_SIGNALS)[0] for s in (0, 500, 511, 2000)]
    assert decided == [8, 8, 16, 32]
    assert PlannedSizes(Horizon("1h"), pair.policy).num_batches is None


def test_pairs_are_values() -> None:
    pair = Seesaw(Cosine(warmup="5ep"), "0ep:8 1ep:16", factor=4, maximum=64, reference=8)
    text = repr(pair)
    names: dict[str, Any] = {kind.__name__: kind for kind in (Seesaw, PiecewiseConstant, Cosine)}
    again = eval(text, {**names, "Time": Time})
    assert again == pair
    kinds = (AtMost, DecayGrowth, Staircase, SquareRootRule, PiecewiseConstant, Cosine)
    names |= {kind.__name__: kind for kind in kinds}
    for one in (pair.policy, pair.schedule, pair.rule):
        assert eval(repr(one), names) == one
    assert hash(pair.schedule) == hash(again.schedule)
    half = Seesaw(Cosine(warmup="2.5ep"), "0ep:8 0.5ep:16", factor=4, maximum=64, reference=8)
    assert pair.scaled(0.5) == half
    assert pair.schedule.scaled(0.5) == half.schedule
    assert pair.policy.scaled(0.5) == half.policy


@pytest.mark.parametrize(
    ("decay", "run", "why"),
    [
        (Linear(over="100ba"), RUN, "batches"),
        (Cosine(), Horizon("100ba"), "batches"),
        (Linear(over="1h"), RUN, "seconds"),
        (Linear(over="100tok"), Horizon("1000sp"), None),
        (Linear(over="100tok") * Cosine(), Horizon("1000sp"), "mixes 'tok' and 'sp'"),
        (Custom(lambda timer: 1 / (1 + timer.batch)), RUN, "reads other counters"),
        (Constant(warmup="5%"), RUN, "does not fall"),
        (Linear(0, 1), RUN, "does not fall"),
        (CosineRestarts("30%"), RUN, "rises again"),
    ],
)
def test_schedules_that_a_batch_size_cannot_follow_are_refused(
    decay: Schedule, run: Horizon, why: str | None
) -> None:
    pair = Seesaw(decay, 8)
    if why is None:
        assert pair.policy.bind(run).units == {"tok"}
        return
    with pytest.raises(BatchSizeError, match=why):
        pair.policy.bind(run)
    with pytest.raises(BatchSizeError, match=why):
        pair.schedule.bind(run)


def test_only_sizes_that_are_a_function_of_time_are_multiplied() -> None:
    periods = PeriodSizes([("10%", 8), ("rest", 16)])
    with pytest.raises(BatchSizeError, match="alone"):
        Seesaw(Cosine(), periods, reference=16).policy.bind(RUN)
    with pytest.raises(BatchSizeError, match="maximum"):
        Seesaw(Cosine(), 8, maximum=4)


def test_the_size_of_the_schedule_is_the_last_one_or_must_be_stated() -> None:
    """A rule must know what the learning rate is meant for before there is a run."""
    stated: list[tuple[PolicyLike, int]] = [
        (8, 8),
        ("0sp:8 20%:16", 16),
        (DoublingRamp(4, 16, "300sp"), 16),
        (StagedRamp([2, 6], "10%"), 6),
        (MultipleOf(Fixed(20), 8), 16),
    ]
    for size, last in stated:
        assert Seesaw(Cosine(), size).rule == SquareRootRule(last)
    periods = PeriodSizes([("10%", 8), ("rest", 16)])
    for unknown in (lambda timestamp, size: 8, periods):
        with pytest.raises(BatchSizeError, match="reference=256"):
            Seesaw(Cosine(), unknown)
        assert Seesaw(Cosine(), unknown, reference=256).rule == SquareRootRule(256)


def test_a_multiple_that_would_lift_the_rate_from_the_first_batch_is_refused() -> None:
    """Sizes are rounded down, never up; a warm-up alone may begin with a whole multiple."""
    with pytest.raises(BatchSizeError, match="multiple"):
        Seesaw(Cosine(), 16, multiple_of=64)
    with pytest.raises(BatchSizeError, match="multiple"):
        Seesaw(Cosine(), 16, maximum=20, multiple_of=64)
    planned(Seesaw(Cosine(), 16, multiple_of=64, reference=64))
    ramp = planned(Seesaw(Cosine(), DoublingRamp(4, 16, "300sp"), multiple_of=8))
    assert [stage.size for stage in ramp.stages][:2] == [8, 16]


def test_restarts_as_many_as_places_that_are_looked_at_are_seen() -> None:
    with pytest.raises(BatchSizeError, match="rises"):
        Seesaw(CosineRestarts("9995sp"), 16).policy.bind(Horizon("10_240_000sp"))
    with pytest.raises(BatchSizeError, match="rises"):
        Seesaw(CosineRestarts("10_000sp"), 16).policy.bind(Horizon("10_240_000sp"))


def test_a_warm_up_of_the_batch_may_shrink_from_the_size_that_the_schedule_is_meant_for() -> None:
    got = planned(Seesaw(Linear(1, 0), "0sp:64 192sp:4", reference=64), Horizon("1000sp"))
    assert [stage.values["lr"].first for stage in got.stages[:2]] == [1.0, 0.25]
    # Whoever says that the schedule is meant for less has a larger rate from the first batch on.
    got = planned(Seesaw(Linear(1, 0), 16, reference=4), Horizon("1000sp"))
    assert got.stages[0].values["lr"].first == 2.0


def test_what_a_plan_advises_for_sizes_of_a_pair_is_not_refused() -> None:
    dropping = Horizon("2531sp", dataset_num_samples=100, last_batch="drop")
    wide = Seesaw(Linear(), 3, reference=8, maximum=1000)
    with pytest.raises(BatchSizeError, match="AtMost"):
        plan(dropping, wide.policy)
    assert plan(dropping, AtMost(wide.policy, 100)).stages[-1].size == 100
    with pytest.raises(PlanError, match="AtLeast"):
        plan(RUN, Seesaw(Cosine(), 4).policy, world_size=8)
    plan(RUN, AtLeast(Seesaw(Cosine(), 4).policy, 8), world_size=8)
    even: dict[str, Any] = {"world_size": 8, "micro_batch_size": 2, "even": True}
    with pytest.raises(PlanError, match="MultipleOf"):
        plan(RUN, Seesaw(Cosine(), 12).policy, **even)
    plan(RUN, MultipleOf(Seesaw(Cosine(), 12).policy, 16), **even)


@pytest.mark.parametrize("factor", [2, 3, 4.0, 5, 10, 1.1, 1.5, 1.25, 2.5, 1.01, 2**0.5, 2**20])
def test_sizes_are_those_of_the_exact_power_of_the_factor(factor: float) -> None:
    exact = Fraction(str(factor))
    cuts = [float(exact) ** -steps * (1 - 1e-12) for steps in range(60)]
    decay = Custom(lambda timer: cuts[timer.sample])
    for size in (1, 3, 8, 10, 100, 1000, 12_345):
        bound = DecayGrowth(decay, size, factor, 10**6).bind(Horizon("60sp"))
        for steps in range(60):
            grown = bound.decide(Timestamp(sample=steps), {}, NO_SIGNALS)[0]
            assert grown == math.floor(size * min(Fraction(exact**steps), Fraction(10**6)))


def test_the_least_factor_grows_nearly_as_if_continuous() -> None:
    run = Horizon("10_000sp")
    near = planned(Seesaw(Cosine(), 100, factor=1.01), run).stages
    smooth = planned(Seesaw(Cosine(), 100, factor="continuous"), run).stages
    assert near[-1].size == pytest.approx(smooth[-1].size, rel=0.02)


@pytest.mark.parametrize(
    "factor",
    [1, 0.5, -2, float("nan"), float("inf"), "2", None, True, 2**20 + 1, 10**400, -(10**400),
     1 + Fraction(1, 2**80)],
)  # fmt: skip
def test_factors_that_grow_nothing_or_too_much_are_refused(factor: Any) -> None:
    with pytest.raises(BatchSizeError, match="factor"):
        Seesaw(Cosine(), 8, factor=factor)


def test_the_schedule_is_that_of_the_whole_run() -> None:
    pair = Seesaw(Cosine(), 8)
    assert (pair.schedule * 0.5).bind(RUN)(Timestamp()) == 0.5
    with pytest.raises(ScheduleError, match="period"):
        Periods([("10%", 1.0), ("rest", pair.schedule)]).bind(RUN)


wraps = st.sampled_from(
    [
        lambda policy: AtMost(policy, 48),
        lambda policy: AtLeast(policy, 12),
        lambda policy: MultipleOf(policy, 12),
        PowerOfTwo,
        Monotone,
        lambda policy: Hysteresis(policy, 1.25),
        lambda policy: PeriodSizes([("50%", 8), ("rest", policy)]),
    ]
)


@settings(max_examples=30, deadline=None)
@given(couplings, wraps)
def test_the_rate_follows_the_sizes_that_a_wrapper_leaves(pair: Pair, wrap: Any) -> None:
    schedules = {"lr": pair.schedule, "base": pair.schedule}
    got = plan(RUN, wrap(pair.policy), schedules=schedules, rule=pair.rule)
    for batch in got.batches():
        follows = batch.values["base"] * pair.rule(batch.decided)
        assert batch.values["lr"] == pytest.approx(follows, rel=1e-12)


def test_beside_a_pair_there_is_no_other_rule_or_schedule_of_the_rate() -> None:
    with pytest.raises(BatchSizeError, match="leave"):
        paired(Seesaw(Cosine(), 8), {}, LinearRule(8))
    with pytest.raises(BatchSizeError, match="leave"):
        paired(Seesaw(Cosine(), 8), {"lr@head": 0.5})


@pytest.mark.parametrize("make", [Seesaw, IncreaseInsteadOfDecay])
def test_a_factor_that_the_schedule_never_falls_by_is_refused(make: type[Pair]) -> None:
    decay = Cosine(1, 0.05)
    with pytest.raises(BatchSizeError, match="factor"):
        make(decay, 16, factor=32).policy.bind(Horizon("1000sp"))
    make(decay, 16, factor=19).policy.bind(Horizon("1000sp"))
    make(decay, 16, factor="continuous").policy.bind(Horizon("1000sp"))
    make(Cosine(1, 0), 16, factor=32).policy.bind(Horizon("1000sp"))


def test_a_pair_is_no_batch_size() -> None:
    with pytest.raises(BatchSizeError, match="pair"):
        as_policy(Seesaw(Cosine(), 16))
