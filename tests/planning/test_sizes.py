"""Where batches begin, in closed form, against the walk over each of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, get_args

import pytest
from hypothesis import event, given, reject
from hypothesis import strategies as st

from stretto.batching import (
    AtLeast,
    AtMost,
    BatchSizePolicy,
    Bound,
    DoublingRamp,
    Fixed,
    Hold,
    Hysteresis,
    IncreaseFunction,
    LinearRamp,
    Monotone,
    MultipleOf,
    PeriodSizes,
    PiecewiseConstant,
    PowerOfTwo,
    SizeFunction,
    StagedRamp,
)
from stretto.errors import BatchSizeError, ConversionError, PlanError
from stretto.planning import PlannedSizes, bind_run, walk
from stretto.timing import Horizon, LastBatch, Time, Timestamp
from stretto.timing.batches import EqualBatches

LIMIT = 400
MODES: tuple[LastBatch, ...] = get_args(LastBatch)


def times(draw: st.DrawFn, units: list[str]) -> Time:
    unit = draw(st.sampled_from(units))
    amount = draw(st.fractions(Fraction(1, 10), 2, max_denominator=12))
    return Time(amount if unit in ("ep", "dur") else -(-amount * 20 // 1), unit)


class Draw(NamedTuple):
    """What a policy is drawn from."""

    draw: st.DrawFn
    units: list[str]
    largest: int

    def time(self) -> Time:
        return times(self.draw, self.units)

    def sizes(self) -> tuple[int, int]:
        start, end = sorted(self.draw(st.integers(1, self.largest)) for _ in range(2))
        return start, end


def staged(given: Draw) -> BatchSizePolicy:
    size = st.integers(1, given.largest)
    sizes = sorted(given.draw(st.lists(size, min_size=2, max_size=5, unique=True)))
    return StagedRamp(sizes, given.time())


def wild(given: Draw) -> BatchSizePolicy:
    return SizeFunction(lambda now, size: 1 + (7 * now.sample + now.batch) % given.largest)


def now_and_then(given: Draw) -> BatchSizePolicy:
    def function(now: Timestamp, size: int | None) -> int:
        return ((size or 0) + 3) % given.largest + 1

    return SizeFunction(function, 1, every=given.time())


SIMPLE: list[Callable[[Draw], BatchSizePolicy]] = [
    lambda given: Fixed(given.sizes()[0]),
    lambda given: LinearRamp(*given.sizes(), given.time()),
    lambda given: DoublingRamp(*given.sizes(), given.time()),
    lambda given: staged(given) if given.largest > 1 else Fixed(1),
    lambda given: PiecewiseConstant(
        {Time("0sp"): given.sizes()[1], given.time(): given.sizes()[0]}
    ),
    lambda given: IncreaseFunction(lambda epoch, size: epoch % 3, *given.sizes()),
    wild,
    now_and_then,
]


def hysteresis(given: Draw, inner: BatchSizePolicy) -> BatchSizePolicy:
    wait = given.time() if given.draw(st.booleans()) else None
    return Hysteresis(inner, given.draw(st.sampled_from([1.1, 1.5, 2])), wait=wait)


def periods(given: Draw, inner: BatchSizePolicy) -> BatchSizePolicy:
    second = given.draw(st.sampled_from(SIMPLE))(given)
    last = given.draw(st.sampled_from(SIMPLE))(given)
    return PeriodSizes([(given.time(), inner), (given.time(), second), ("rest", last)])


def multiples(given: Draw, inner: BatchSizePolicy) -> BatchSizePolicy:
    return MultipleOf(inner, given.draw(st.integers(1, max(1, given.largest // 3))))


WRAPPED: list[Callable[[Draw, BatchSizePolicy], BatchSizePolicy]] = [
    lambda given, inner: AtMost(inner, given.sizes()[1]),
    lambda given, inner: AtLeast(inner, given.sizes()[0]),
    lambda given, inner: PowerOfTwo(inner),
    lambda given, inner: Monotone(inner),
    multiples,
    hysteresis,
    periods,
]


@st.composite
def planned_sizes(draw: st.DrawFn) -> PlannedSizes:
    """Any run of a few epochs with any policy that is known before."""
    n = draw(st.integers(1, 40))
    tokens = draw(st.sampled_from([None, 1, 7]))
    mode = draw(st.sampled_from(MODES))
    units = ["ep", "ba", "sp", *(["tok"] if tokens else [])]
    horizon = Horizon(
        times(draw, units), dataset_num_samples=n, tokens_per_sample=tokens, last_batch=mode
    )
    given = Draw(draw, [*units, "dur"], n if mode == "drop" else 2 * n)
    policy = draw(st.sampled_from(SIMPLE))(given)
    try:
        for wrap in draw(st.lists(st.sampled_from(WRAPPED), max_size=2)):
            policy = wrap(given, policy)
        return PlannedSizes(horizon, policy)
    except BatchSizeError as error:
        # Bounds that the rounding inside does not allow; periods that leave nothing for the rest.
        event(str(error)[:30])
        reject()


@given(planned_sizes())
def test_the_plan_is_the_walk(sizes: PlannedSizes) -> None:
    walked = walk(sizes.horizon, sizes.policy.bind(sizes.horizon))
    steps = list(itertools.islice(walked, LIMIT))
    total = sizes.num_batches
    assert total is not None
    assert len(steps) == min(LIMIT, total)
    for number, step in enumerate(steps):
        assert sizes.sample_at_batch(number) == step.timestamp.sample
        assert sizes.timestamp_at_batch(number) == step.timestamp
    planned = [
        (stage.size, stage.equal.size_of(number))
        for stage in sizes.stages
        for number in range(min(LIMIT, stage.batches or 0))
    ]
    if total < LIMIT and sizes.end is not None:
        decided = [step.decided for step in steps]
        assert [size for size, _ in planned] == decided
        # But for the last one, which the end of the run may cut.
        assert [size for _, size in planned][:-1] == [step.size for step in steps][:-1]
        assert next(walked, None) is None
        last = steps[-1]
        assert sizes.end.batch == total
        assert sizes.end.sample >= last.timestamp.sample + last.size
        assert sizes.horizon.is_done(sizes.end)


@given(planned_sizes(), st.data())
def test_batches_and_samples_are_inverse(sizes: PlannedSizes, data: st.DataObject) -> None:
    total = sizes.num_batches or 0
    batch = data.draw(st.integers(0, total + 3))
    assert sizes.batch_at_sample(sizes.sample_at_batch(batch)) == batch
    end = sizes.sample_at_batch(total + 2)
    sample = data.draw(st.integers(0, end))
    reached = sizes.batch_at_sample(sample)
    assert sizes.sample_at_batch(reached) >= sample
    assert reached == 0 or sizes.sample_at_batch(reached - 1) < sample


@given(planned_sizes())
def test_stages_follow_each_other_and_differ(sizes: PlannedSizes) -> None:
    for before, after in itertools.pairwise(sizes.stages):
        assert before.end is not None
        assert before.end.batch == after.first.batch
        assert before.end.sample + after.skipped == after.first.sample
        assert before.size != after.size or after.skipped


def test_millions_of_batches_are_few_stretches() -> None:
    horizon = Horizon("3ep", dataset_num_samples=1_000_000_007)
    sizes = PlannedSizes(horizon, 300)
    assert (len(sizes.stages), sizes.num_batches) == (1, 3 * 3_333_334)
    ramp = PlannedSizes(horizon, LinearRamp(64, 1087, "50%"))
    assert len(ramp.stages) == 1024


@given(st.data())
def test_a_constant_size_is_laid_out_as_timing_does(data: st.DataObject) -> None:
    n, mode = data.draw(st.integers(1, 30)), data.draw(st.sampled_from(MODES))
    length = data.draw(st.sampled_from([Time("2.5ep"), Time("37sp"), Time("7ba")]))
    size = data.draw(st.integers(1, n if mode == "drop" else 40))
    horizon = Horizon(length, dataset_num_samples=n, batch_sizes=size, last_batch=mode)
    constant, sizes = EqualBatches(horizon, Timestamp(), size), PlannedSizes(horizon, size)
    for number in range(80):
        assert sizes.sample_at_batch(number) == constant.sample_at_batch(number)
        assert sizes.batch_at_sample(number) == constant.batch_at_sample(number)


def test_the_end_may_be_unknown() -> None:
    sizes = PlannedSizes(Horizon("2h", dataset_num_samples=100), "0ep:8 2ep:32")
    assert sizes.end is None
    assert sizes.num_batches is None
    assert [stage.batches for stage in sizes.stages] == [26, None]
    assert sizes.sample_at_batch(26 + 4 * 5) == 700
    assert sizes.batch_at_sample(700) == 46
    assert sizes.timestamp_at_batch(26) == Timestamp(epoch=2, batch=26, sample=200)


def test_it_is_a_value() -> None:
    horizon = Horizon("100sp")
    sizes = PlannedSizes(horizon, DoublingRamp(4, 16, "50%"))
    again = eval(repr(sizes), {**globals()})
    assert again == sizes
    assert hash(again) == hash(sizes)
    assert PlannedSizes(horizon, 4) != sizes
    assert sizes != "sizes"  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
def test_where_an_epoch_of_unknown_length_may_end_inside_a_batch_no_batch_is_known(
    last_batch: LastBatch,
) -> None:
    resolved = bind_run(Horizon("100sp", last_batch=last_batch), 8).horizon
    assert resolved.convert("50%", "sp") == Time("50sp")
    with pytest.raises(ConversionError, match="last_b"):
        resolved.convert("7ba", "sp")
    assert not PlannedSizes(resolved, 8).is_exact
    assert PlannedSizes(Horizon("100sp", dataset_num_samples=9), 8).is_exact


def test_an_unresolvable_one_refuses_only_what_mixes() -> None:
    policy = SizeFunction(lambda timestamp, current: 8, planned=False)
    resolved = bind_run(Horizon("2ep", dataset_num_samples=100), policy).horizon
    assert resolved.convert("1ep", "sp") == Time("100sp")
    with pytest.raises(ConversionError, match="measures"):
        resolved.convert("1ba", "sp")
    with pytest.raises(ConversionError, match="time"):
        resolved.convert("1sp", "ba")


class Hiding(BatchSizePolicy):
    """A policy of somebody else's that follows tokens and does not say so."""

    def bind(self, horizon: Horizon) -> Bound:
        hold = Hold(((horizon.axis("tok"), 1000),))
        return Bound(
            decide=lambda timestamp, state, signals: (8, state),
            holds_until=lambda timestamp, state: hold,
            is_static=True,
        )


def test_a_policy_that_hides_its_units_is_found_out() -> None:
    with pytest.raises(PlanError, match="among"):
        PlannedSizes(Horizon("100sp"), Hiding())


@pytest.mark.parametrize("duration", ["30m", "1Btok", "3ep"])
def test_sizes_that_change_for_ever_have_no_plan_where_the_end_is_unknown(duration: str) -> None:
    policy = SizeFunction(lambda timestamp, _: 3 + timestamp.batch % 4)
    with pytest.raises(PlanError, match="unknown"):
        PlannedSizes(Horizon(duration), policy)
    resolved = bind_run(Horizon(duration), policy).horizon
    with pytest.raises(ConversionError, match="change"):
        resolved.convert("100sp", "ba")


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_batch_that_no_epoch_holds_is_refused_in_runs_of_any_length(epochs: int) -> None:
    horizon = Horizon(f"{epochs}ep", dataset_num_samples=10, last_batch="drop")
    with pytest.raises(BatchSizeError, match="epoch"):
        PlannedSizes(horizon, 11)
