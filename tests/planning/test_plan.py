from __future__ import annotations

import itertools
import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import (
    AtLeast,
    BatchSizePolicy,
    Bound,
    DoublingRamp,
    Fixed,
    HalfLifeRule,
    LinearRamp,
    LinearRule,
    Monotone,
    MultipleOf,
    NoiseScale,
    PeriodSizes,
    PiecewiseConstant,
    Seesaw,
    SizeFunction,
    SquareRootRule,
    split,
)
from stretto.errors import (
    BatchSizeError,
    ConversionError,
    PlanError,
)
from stretto.planning import bind_run, check_least, plan, walk
from stretto.report import plan_table
from stretto.schedules import Constant, Cosine, Custom, Linear, Periods, StepDecay
from stretto.timing import (
    At,
    BatchSizes,
    Every,
    Horizon,
    LastBatch,
    Time,
    Timer,
    Timestamp,
    TimeUnit,
    advance,
)

HORIZON = Horizon("2ep", dataset_num_samples=1000)


def test_stages_of_a_doubling_ramp() -> None:
    planned = plan(HORIZON, DoublingRamp(8, 32, "50%"), world_size=2, micro_batch_size=4)
    first, second, third = planned.stages
    assert [(s.number, s.size, s.batches) for s in planned.stages] == [
        (1, 8, 63), (2, 16, 31), (3, 32, 32),
    ]  # fmt: skip
    assert (first.first.sample, second.first.sample, third.first.sample) == (0, 504, 1000)
    assert first.end == second.first
    assert (first.shares, first.accumulation) == ((4, 4), 1)
    assert (third.shares, third.accumulation) == ((16, 16), 4)
    assert (first.cut_sizes, second.cut_sizes, third.cut_sizes) == ((), (), (8,))
    assert sum(stage.samples or 0 for stage in planned.stages) == planned.num_samples == 2000
    assert (planned.num_batches, planned.end) == (126, Timestamp(epoch=2, batch=126, sample=2000))
    assert planned.policy == DoublingRamp(8, 32, "50%")


def test_a_smaller_last_batch_in_each_epoch_is_one_stage() -> None:
    planned = plan(Horizon("50ep", dataset_num_samples=1000), 64)
    (stage,) = planned.stages
    assert (stage.batches, stage.cut_sizes) == (50 * 16, (40,))


def test_cut_sizes_are_those_of_the_first_epoch_the_later_ones_and_the_end() -> None:
    horizon = Horizon("3.5ep", dataset_num_samples=100)
    planned = plan(horizon, PiecewiseConstant("0sp:30 60sp:32"))
    assert [stage.cut_sizes for stage in planned.stages] == [(), (8, 4, 18)]
    walked = walk(horizon, PiecewiseConstant("0sp:30 60sp:32").bind(horizon))
    assert {step.size for step in walked} == {30, 32, 8, 4, 18}


@given(st.data())
def test_cut_sizes_are_those_of_the_walk(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 30))
    mode: LastBatch = data.draw(st.sampled_from(["keep", "drop", "carry"]))
    length = data.draw(st.fractions(Fraction(1, 2), 5, max_denominator=4))
    horizon = Horizon(Time(length, "ep"), dataset_num_samples=n, last_batch=mode)
    size = st.integers(1, n if mode == "drop" else 40)
    policy = PiecewiseConstant(
        {"0sp": data.draw(size), f"{data.draw(st.integers(1, 60))}sp": data.draw(size)}
    )
    planned = plan(horizon, policy)
    batches = iter(planned.batches())
    for stage in planned.stages:
        mine = list(itertools.islice(batches, stage.batches))
        assert {batch.decided for batch in mine} == {stage.size}
        assert {batch.size for batch in mine} - {stage.size} == set(stage.cut_sizes)
        assert sum(batch.size for batch in mine) == stage.samples
        assert mine[0].timestamp == stage.first
        assert advance(horizon, mine[-1].timestamp, mine[-1].size) == stage.end or stage.end
    assert next(batches, None) is None


def test_values_are_base_times_schedule_times_rule() -> None:
    planned = plan(
        HORIZON,
        DoublingRamp(8, 32, "50%"),
        schedules={"lr": Linear(1, 0), "lr@head": 0.5, "weight_decay": Constant()},
        base={"lr": 0.1, "weight_decay": 0.01},
        rule=LinearRule(8),
    )
    first, second, third = (stage.values for stage in planned.stages)
    assert first["lr"].first == pytest.approx(0.1)
    assert second["lr"].first == pytest.approx(0.1 * 2 * (1 - 504 / 2000))
    assert third["lr"].last == pytest.approx(0.1 * 4 * (8 / 2000))
    assert [stage["lr@head"].first for stage in (first, second, third)] == [0.5, 1.0, 2.0]
    assert {value for stage in (first, second, third) for value in stage["weight_decay"]} == {0.01}


def test_rows_are_the_batches_of_the_run() -> None:
    planned = plan(
        HORIZON,
        LinearRamp(3, 40, "1ep"),
        world_size=3,
        micro_batch_size=5,
        schedules={"lr": Cosine()},
        rule=SquareRootRule(40),
    )
    schedule = Cosine().bind(planned.horizon)
    rule = SquareRootRule(40)
    assert (
        planned.stages
        == plan(
            HORIZON,
            LinearRamp(3, 40, "1ep"),
            world_size=3,
            micro_batch_size=5,
            schedules={"lr": Cosine()},
            rule={"sqrt": 40},
        ).stages
    )
    rows = list(planned.batches())
    assert len(rows) == planned.num_batches
    for row in rows:
        assert row.accumulation == split(row.size, 3, 5).accumulation
        assert row.values == {"lr": schedule(row.timestamp) * rule(row.decided)}
    for stage in planned.stages:
        assert stage.values["lr"].first == rows[stage.first.batch].values["lr"]
        assert stage.end is not None
        assert stage.values["lr"].last == rows[stage.end.batch - 1].values["lr"]


def test_schedules_mix_units_exactly_under_a_ramp() -> None:
    # 50 batches of the ramp are 50 batches wherever they end: at sample 8 * 50.
    schedule = Periods([("50ba", Linear(0, 1)), ("rest", Linear(1, 0))])
    planned = plan(HORIZON, DoublingRamp(8, 32, "50%"), schedules={"lr": schedule})
    rows = list(planned.batches())
    assert rows[50].values["lr"] == 1.0
    assert rows[25].values["lr"] == 0.5
    assert rows[51].values["lr"] == pytest.approx(1 - 8 / 1600)


def test_a_plan_is_the_batch_sizes_of_a_horizon() -> None:
    planned = plan(HORIZON, DoublingRamp(8, 32, "50%"))
    assert isinstance(planned, BatchSizes)
    horizon = HORIZON.with_batch_sizes(planned)
    assert horizon.convert("63ba", "sp") == Time("504sp")
    assert horizon.convert("1ep", "ba") == Time("94ba")
    assert bind_run(HORIZON, DoublingRamp(8, 32, "50%")).horizon == planned.horizon


@given(
    st.sampled_from(["0.1dur", "7ba", "13sp", "0.3ep", "1ba", "3sp", "100%"]), st.integers(1, 40)
)
def test_events_are_those_of_the_run(interval: str, size: int) -> None:
    horizon = Horizon("3ep", dataset_num_samples=90)
    trigger = Every(interval) | At("0.25ep", "40ba", "1000ba")
    planned = plan(horizon, LinearRamp(1, size, "50%"), triggers={"evaluate": trigger})
    bound = trigger.bind(planned.horizon)
    times = []
    for row in planned.batches():
        after = advance(horizon, row.timestamp, row.size)
        if bound(row.timestamp, after):
            times.append(after)
    (event,) = planned.events
    assert event.is_exact
    assert event.count == len(times)
    assert event.first == tuple(times[:5])


def test_a_tenth_of_30_batches_comes_ten_times() -> None:
    horizon = Horizon("3ep", dataset_num_samples=100)
    planned = plan(horizon, 10, triggers={"evaluate": "0.1dur", "save": "1h", "never": "9ep"})
    evaluate, save, never = planned.events
    assert planned.num_batches == 30
    assert (evaluate.count, [now.batch for now in evaluate.first]) == (10, [3, 6, 9, 12, 15])
    assert (save.count, save.first, save.follows) == (None, (), "the wall clock")
    assert (never.count, never.first, never.is_exact) == (0, (), True)


def test_very_many_events_are_counted_by_stages() -> None:
    horizon = Horizon("10ep", dataset_num_samples=1_000_000)
    planned = plan(horizon, 100, triggers={"log": "500sp", "each": "1ba", "often": "1sp"})
    assert [event.count for event in planned.events] == [20_000, 100_000, 100_000]
    assert not any(event.is_exact for event in planned.events)
    assert [now.batch for now in planned.events[0].first] == [5, 10, 15, 20, 25]


def test_a_run_by_the_wall_clock_has_an_open_end() -> None:
    planned = plan(
        Horizon("2h", dataset_num_samples=100),
        "0ep:8 2ep:32",
        schedules={"lr": Linear(1, 0), "weight_decay": 0.1},
        triggers={"evaluate": "1ep", "once": At("3ba")},
    )
    last = planned.stages[-1]
    assert (last.batches, last.end, last.samples, last.values["weight_decay"].last) == (None,) * 4
    assert (planned.num_batches, planned.num_samples, planned.end) == (None, None, None)
    assert "the run ends by wall time" in planned.warnings[0]
    assert planned.warnings[1] == (
        "lr follows the wall clock, so its values are only known in the run"
    )
    assert [event.count for event in planned.events] == [None, None]
    assert [now.batch for now in planned.events[0].first] == [13, 26, 30, 34, 38]
    assert [now.batch for now in planned.events[1].first] == [3]
    assert last.cut_sizes == (4,)
    assert len(list(itertools.islice(planned.batches(), 100))) == 100
    assert planned.to_json()["num_batches"] is None


@pytest.mark.parametrize(
    ("policy", "options", "match"),
    [
        (
            PiecewiseConstant("0ep:16 1ep:6"),
            {"world_size": 8},
            r"of 6 on 8 ranks: .* AtLeast\(policy, 8\), start 6 ranks, .* \(stage 2, ",
        ),
        (
            DoublingRamp(8, 20, "50%"),
            {"world_size": 2, "micro_batch_size": 4, "even": True},
            r"split 20 samples evenly over 2 ranks .*\(stage 3, from batch 94",
        ),
        (
            SizeFunction(lambda timestamp, current: 8, planned=False),
            {},
            "know the batch sizes before the run: they follow what the run measures",
        ),
        (PiecewiseConstant("0tok:8 100tok:16"), {}, "tokens_per_sample"),
        (8, {"base": {"lr": 0.1}}, "schedule"),
    ],
    ids=["ranks", "even", "measured", "tokens", "base"],
)
def test_a_run_that_would_fail_later_is_refused(
    policy: object, options: dict[str, object], match: str
) -> None:
    with pytest.raises(PlanError, match=match):
        plan(HORIZON, policy, **options)  # type: ignore[arg-type]


def test_stages_that_are_over_are_not_checked_again() -> None:
    policy = DoublingRamp(4, 32, "50%")
    with pytest.raises(PlanError, match="batches"):
        plan(HORIZON, policy, world_size=8)
    late = plan(HORIZON, policy).timestamp_at_batch(90)
    assert plan(HORIZON, policy, world_size=8, resume_at=late).world_size == 8
    with pytest.raises(PlanError, match="batches"):
        plan(HORIZON, policy, world_size=64, resume_at=late)


@pytest.mark.parametrize(
    ("horizon", "options", "match"),
    [
        (Horizon("100tok"), {}, r"\(max_duration\)"),
        (HORIZON, {"policy": PiecewiseConstant("0tok:8 100tok:16")}, r"\(batch_size\)"),
        (HORIZON, {"schedules": {"lr": StepDecay("9tok")}}, r"\(lr\)"),
        (HORIZON, {"triggers": {"evaluate": "9tok"}}, r"\(evaluate\)"),
    ],
    ids=["run", "policy", "schedule", "trigger"],
)
def test_tokens_that_nobody_counts_are_refused(
    horizon: Horizon, options: dict[str, object], match: str
) -> None:
    arguments = {"policy": 8, **options}
    known = Horizon(horizon.max_duration, dataset_num_samples=1000, dataset_num_tokens=4000)
    with pytest.raises(PlanError, match=match):
        plan(known, tracks_tokens=False, **arguments)  # type: ignore[arg-type]


def test_what_only_the_run_knows_is_left_out_of_the_plan() -> None:
    planned = plan(
        HORIZON,
        8,
        schedules={
            "lr": StepDecay("900tok"),
            "lr@head": Custom(lambda timer: 1 / (1 + float(timer.get("sec"))), reads="sec"),
            "weight_decay": 0.1,
        },
        triggers={"evaluate": "1Mtok", "save": At("5m"), "log": "1ba"},
    )
    assert list(planned.stages[0].values) == ["weight_decay"]
    assert next(planned.batches()).values == {"weight_decay": 0.1}
    assert planned.warnings == (
        "lr follows tokens, so its values are only known in the run",
        "lr@head follows the wall clock, so its values are only known in the run",
    )
    assert [event.follows for event in planned.events] == ["tokens", "the wall clock", None]
    unsized = plan(Horizon("90ba"), 8, triggers={"evaluate": "1ep"})
    assert [event.follows for event in unsized.events] == ["epochs"]
    assert "evaluate: by epochs, so its times are only known in the run" in plan_table(unsized)


def test_a_schedule_function_that_reads_more_than_it_says_has_no_plan() -> None:
    def by_tokens(timer: Timer) -> float:
        return 0.5 if timer.token else 1.0

    with pytest.raises(PlanError, match="function"):
        plan(HORIZON, 8, schedules={"lr": by_tokens})
    counted = Horizon("2ep", dataset_num_samples=1000, tokens_per_sample=10)
    assert plan(counted, 8, schedules={"lr": by_tokens}).values_at(1) == {"lr": 0.5}
    assert not plan(HORIZON, 8, schedules={"lr": Custom(by_tokens, "tok")}).values_at(1)


def test_a_function_that_reads_what_only_the_run_knows_has_no_plan() -> None:
    def by_tokens(timestamp: Timestamp, current: int | None) -> int:
        return 8 if timestamp.token < 1000 else 16

    policy = SizeFunction(by_tokens)
    with pytest.raises(BatchSizeError, match="planned"):
        plan(HORIZON, policy)
    with pytest.raises(BatchSizeError, match="planned"):
        plan(HORIZON, PeriodSizes([("rest", AtLeast(policy, 8))]))
    with pytest.raises(PlanError, match="measures"):
        plan(HORIZON, SizeFunction(by_tokens, planned=False))
    counted = Horizon("2ep", dataset_num_samples=1000, tokens_per_sample=10)
    assert [stage.size for stage in plan(counted, policy).stages] == [8, 16]


def test_warnings_say_what_may_not_be_meant() -> None:
    def warned(policy: object, mode: LastBatch = "keep", **options: object) -> str:
        horizon = Horizon("2ep", dataset_num_samples=100, last_batch=mode)
        return "\n".join(plan(horizon, policy, **options).warnings)  # type: ignore[arg-type]

    assert warned(20) == ""
    assert "has 4 samples for 8 ranks, so some run a dummy" in warned(32, world_size=8)
    assert "has 4 samples, which is not split evenly" in warned(32, world_size=2, even=True,
                                                                micro_batch_size=4)  # fmt: skip
    assert "leaves out 8 of 200 samples" in warned(32, "drop")
    assert "batches of 128 are cut to the 100 samples of an epoch" in warned(128)
    assert warned(64, "carry", world_size=8) == ""
    assert "has 8 samples" in warned(64, "carry", world_size=16)
    assert "is over before 3ep of the batch size policy" in warned(LinearRamp(10, 20, "3ep"))
    assert "300sp" in warned("0ep:20 300sp:25")


def test_json_keeps_the_plan() -> None:
    planned = plan(
        HORIZON,
        DoublingRamp(8, 32, "50%"),
        schedules={"lr": Linear(1, 0)},
        triggers={"evaluate": "50%"},
    )
    record = planned.to_json()
    assert json.loads(json.dumps(record)) == record
    assert record["batch_size"] == repr(planned.policy)
    stage = record["stages"][1]  # type: ignore[index]
    assert stage["first"]["ep"] == "0.504ep"
    assert stage["first"]["dur"] == "0.252dur"
    assert stage["first"]["batch"] == 63
    assert stage["values"]["lr"]["first"] == planned.stages[1].values["lr"].first
    assert record["events"][0]["first"][1]["sample"] == 2000  # type: ignore[index]


def test_a_plan_shows_itself() -> None:
    planned = plan(HORIZON, AtLeast(Fixed(8), 16))
    assert repr(planned) == "<Plan of 2ep: 126 batches in 1 stages>"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (NoiseScale(2, 64), r"of 2 on 3 ranks.* AtLeast\(policy, 3\), start 2 ranks"),
        (MultipleOf(NoiseScale(8, 64, minimum=2), 2), "of 2 on 3 ranks"),
        (Seesaw(Linear(), 2).policy, "AtLeast"),
        (AtLeast(NoiseScale(2, 64), 3), None),
        (NoiseScale(3, 64), None),
        (SizeFunction(lambda timestamp, current: 2, planned=False), None),
    ],
    ids=repr,
)
def test_the_least_size_that_only_the_run_can_tell_is_one_that_ranks_can_share(
    policy: BatchSizePolicy, message: str | None
) -> None:
    bound = policy.bind(Horizon("1000tok"))
    if message is None:
        check_least(bound, world_size=3)
        return
    with pytest.raises(PlanError, match=message):
        check_least(bound, world_size=3)
    check_least(bound, world_size=2)


def test_a_batch_that_never_shrinks_is_never_below_its_first() -> None:
    policy = NoiseScale(64, 512, minimum=2)
    with pytest.raises(PlanError, match="batches"):
        check_least(policy.bind(Horizon("1ep")), world_size=4)
    check_least(Monotone(policy).bind(Horizon("1ep")), world_size=4)
    assert Monotone(policy).bind(Horizon("1ep")).bounds == (64, 512)


def test_there_are_no_batches_beyond_the_ends() -> None:
    planned = plan(Horizon("40sp"), 8, schedules={"lr": Linear(1, 0)})
    assert planned.values_at(4) == {"lr": pytest.approx(0.2)}
    with pytest.raises(PlanError, match="batches"):
        planned.sample_at_batch(-1)
    with pytest.raises(PlanError, match="batches"):
        planned.values_at(-5)
    with pytest.raises(PlanError, match="counted"):
        planned.values_at(5)


class ReadsFraction(BatchSizePolicy):
    """Says that it reads the fraction of the run."""

    def bind(self, horizon: Horizon) -> Bound:
        return Bound(
            decide=lambda timestamp, state, signals: (8, state),
            is_static=True,
            units=frozenset({TimeUnit.DURATION}),
        )


@pytest.mark.parametrize(
    ("run", "follows"), [("1ep", "they follow epochs"), ("30m", "they follow the wall clock")]
)
def test_a_fraction_is_one_of_what_the_run_is_measured_in(run: str, follows: str) -> None:
    with pytest.raises(PlanError, match=follows):
        plan(Horizon(run), ReadsFraction())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, -0.1, True, "0.1", None])
def test_a_base_value_is_a_number(value: object) -> None:
    base: dict[str, float] = {"lr": value}  # type: ignore[dict-item]
    with pytest.raises(PlanError, match="finite"):
        plan(Horizon("40sp"), 8, schedules={"lr": 1.0}, base=base)


def test_other_base_values_may_be_negative() -> None:
    base = {"beta2_decay": -0.8}  # Adafactor's
    planned = plan(Horizon("40sp"), 8, schedules={"beta2_decay": Linear(1, 0.5)}, base=base)
    assert planned.values_at(0) == {"beta2_decay": -0.8}


@pytest.mark.parametrize(
    ("run", "last_batch", "bound"),
    [
        ("18sp", "keep", "at least 5 batches"),
        ("18sp", "drop", "at most 5 batches"),
        ("6ba", "keep", "at most 24 samples"),
        ("6ba", "drop", "at least 24 samples"),
        ("2ep", "keep", "it assumes that no epoch ends inside a batch"),
    ],
)
def test_a_plan_of_data_of_unknown_length_says_that_it_is_a_bound(
    run: str, last_batch: LastBatch, bound: str
) -> None:
    planned = plan(Horizon(run, last_batch=last_batch), 4)
    assert not planned.is_exact
    assert f"this plan is a bound ({bound}); state the number" in planned.warnings[-1]
    assert planned.to_json()["is_exact"] is False
    if "ep" not in run:
        assert bound in plan_table(planned).splitlines()[0]
    exact = plan(Horizon(run, last_batch="carry"), 4), plan(Horizon(run, dataset_num_samples=9), 4)
    for one in exact:
        assert (one.is_exact, one.to_json()["is_exact"]) == (True, True)
        assert not any("bound" in line for line in one.warnings)


def test_what_mixes_units_in_data_of_unknown_length_is_refused_as_by_the_run() -> None:
    with pytest.raises(ConversionError, match="last_batch='carry'"):
        plan(Horizon("18sp"), 4, schedules={"lr": Linear(warmup="2ba")})
    assert plan(Horizon("18sp"), 4, schedules={"lr": Linear(warmup="10%")}).num_batches == 5
    assert plan(Horizon("9ba"), 4, schedules={"lr": Linear(warmup="2ba")}).num_batches == 9


def test_a_plan_knows_its_base_and_the_values_of_its_end() -> None:
    # 40 samples: the last batch begins at 32, and the run ends after it.
    schedules = {"lr": Linear(1, 0), "weight_decay": Constant()}
    planned = plan(Horizon("40sp"), 8, schedules=schedules, base={"lr": 3e-4}, values={"own": 2.0})
    assert planned.values_at(4)["lr"] == pytest.approx(0.6e-4)
    assert planned.values_at_end == {"lr": 0.0, "weight_decay": 1.0, "own": 2.0}
    assert planned.base == {"lr": 3e-4}
    assert planned.scheduled == ("lr", "weight_decay")
    ruled = plan(Horizon("40sp"), "0sp:8 16sp:16", schedules={"lr": 1.0}, rule={"linear": 8})
    assert ruled.values_at_end == {"lr": 2.0}
    assert plan(Horizon("1h"), 8, schedules={"lr": 1.0}).values_at_end is None


def test_a_plan_names_what_only_the_run_knows() -> None:
    by_time = Custom(lambda now: 1.0, reads="sec")
    planned = plan(Horizon("40sp"), 8, schedules={"lr": by_time}, rule={"betas.1": HalfLifeRule(8)})
    assert set(planned.scheduled) == {"lr", "betas.1"}
    assert planned.values_at_end == {}
