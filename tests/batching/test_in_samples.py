"""Sizes in tokens over equal samples: the longest interval with at most so many tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.batching import (
    AtLeast,
    AtMost,
    BatchSizePolicy,
    Bound,
    DecayGrowth,
    DoublingRamp,
    Fixed,
    Hysteresis,
    IncreaseFunction,
    LinearRamp,
    LinearRule,
    Monotone,
    MultipleOf,
    NoiseScale,
    PeriodSizes,
    PiecewiseConstant,
    Plateau,
    PowerOfTwo,
    Signals,
    SizeFunction,
    SquareRootRule,
    StagedRamp,
    Tokens,
    as_policy,
)
from stretto.batching.wrappers import InSamples
from stretto.data import DataSpec, StepLoader
from stretto.errors import BatchSizeError, PlanError
from stretto.planning import bind_run, check_least, plan
from stretto.planning.sizes import PlannedSizes, bind_sizes, next_step, walk
from stretto.schedules import Cosine, Linear
from stretto.timing import Horizon, LastBatch, Timestamp, TimeUnit, advance

Size: TypeAlias = Callable[[int], Any]
Make: TypeAlias = Callable[[Size], BatchSizePolicy]
"""Makes a policy from sizes in either unit."""

_numbers = st.integers(1, 40)
_rising = st.lists(_numbers, min_size=2, max_size=4, unique=True).map(sorted)
_over = st.sampled_from(["20%", "50%", "333sp", "0.7ep"])
_equal: st.SearchStrategy[Any] = st.sampled_from(["time", "batches"])


@st.composite
def _whole(draw: st.DrawFn) -> Make:
    """Draw a policy whose sizes in tokens are whole samples at every time."""
    ends, over, equal, step = draw(_rising), draw(_over), draw(_equal), draw(st.integers(1, 9))
    one, two, *_ = ends

    def grows(size: Size) -> BatchSizePolicy:
        return IncreaseFunction(lambda epoch, _: size(step * epoch), size(one), size(60))

    def asked(size: Size) -> BatchSizePolicy:
        return SizeFunction(lambda at, _: size(at.sample // 99 % step + 1), size(one), every="9%")

    made: list[Make] = [
        lambda size: Fixed(size(one)),
        lambda size: PiecewiseConstant({"0ep": size(two), "100sp": size(one), "50%": size(step)}),
        lambda size: LinearRamp(
            size(one), size(one + step * two), over, increment=size(step), equal=equal
        ),
        lambda size: StagedRamp([size(end) for end in ends], over, equal=equal),
        lambda size: DoublingRamp(size(one), size(two), over, equal=equal),
        grows,
        asked,
    ]
    return draw(st.sampled_from(made))


@st.composite
def _fine(draw: st.DrawFn) -> Make:
    """Draw a policy that also decides parts of a sample."""
    (one, two, *_), over = draw(_rising), draw(_over)
    factor: Any = draw(st.sampled_from([2.0, 1.5, "continuous"]))
    made: list[Make] = [
        lambda size: LinearRamp(size(one), size(two), over),
        lambda size: DecayGrowth(Linear(1, 0.1), size(one), factor),
        lambda size: DecayGrowth(Cosine(), StagedRamp([size(one), size(two)], over), factor),
    ]
    return draw(st.sampled_from(made))


@st.composite
def policies(draw: st.DrawFn) -> Make:
    whole, other, bound = draw(_whole()), draw(_whole() | _fine()), draw(st.integers(2, 20))
    made: list[Make] = [
        whole,
        other,
        lambda size: AtMost(other(size), size(bound)),
        lambda size: AtLeast(other(size), size(bound)),
        lambda size: Monotone(other(size)),
        lambda size: Hysteresis(whole(size), 1.5),
        lambda size: MultipleOf(other(size), size(bound)),
        lambda size: MultipleOf(whole(size), size(bound), "up"),
        lambda size: PeriodSizes([("30%", whole(size)), ("rest", other(size))]),
    ]
    return draw(st.sampled_from(made))


def walked(horizon: Horizon, policy: BatchSizePolicy) -> list[tuple[Timestamp, int]]:
    bound = bind_sizes(horizon, policy)
    now, state = Timestamp(), bound.start
    found: list[tuple[Timestamp, int]] = []
    while True:
        now, step = next_step(horizon, bound, now, state)
        if step is None:
            return found
        found.append((now, step.size))
        state, now = step.state, advance(horizon, now, step.size)


@settings(max_examples=100)
@given(policies(), st.integers(1, 5000), st.sampled_from(["keep", "drop", "carry"]))
def test_whole_samples_are_walked_as_in_samples(
    make: Make, each: int, last_batch: LastBatch
) -> None:
    horizon = Horizon("2ep", dataset_num_samples=900, tokens_per_sample=each, last_batch=last_batch)
    in_samples, in_tokens = make(int), make(lambda number: Tokens(number * each))
    assert (in_samples.unit, in_tokens.unit) == ("sp", "tok")
    batches = walked(horizon, in_samples)
    assert walked(horizon, in_tokens) == batches
    stages = PlannedSizes(horizon, in_tokens).stages
    assert sum(stage.batches or 0 for stage in stages) == len(batches)


@settings(max_examples=50)
@given(policies(), st.integers(100, 5000), st.integers(1, 50))
def test_any_amount_is_rounded_down_last(make: Make, each: int, factor: int) -> None:
    """The sizes are those of the policy in tokens, each as many samples as fit in."""
    horizon = Horizon("1ep", dataset_num_samples=900, tokens_per_sample=each)
    policy = make(lambda number: Tokens(number * (each + factor)))
    bound = policy.bind(horizon)
    state = bound.start
    for at, size in walked(horizon, policy)[:-1]:
        tokens, state = bound.decide(at, state, Signals())
        assert size == tokens // each


def run(policy: BatchSizePolicy, each: int, signals: list[Signals]) -> list[int]:
    data = DataSpec(list(range(40_000)), tokens_per_sample=each)
    loader = StepLoader(data, policy, max_duration="1ep")
    found = []
    for step, seen in zip(loader, signals, strict=False):
        found.append(step.batch_size)
        loader.finish(step, signals=seen)
    return found


@pytest.mark.parametrize("each", [1, 7, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_followed_in_tokens(each: int, seed: int) -> None:
    """As a policy in samples of one token each would, of whose sizes a sample holds so many."""
    chance = random.Random(seed)
    signals = [
        Signals(noise_numerator=chance.uniform(50, 70) * (1 + at / 60), noise_denominator=1.0)
        for at in range(200)
    ]
    sizes = run(NoiseScale(Tokens(8 * each), Tokens(256 * each), window=20), each, signals)
    bound = NoiseScale(8 * each, 256 * each, window=20).bind(Horizon("1ep"))
    expected, state, before = [], bound.start, Signals()
    for seen in signals:
        size, state = bound.decide(Timestamp(), state, before)
        expected.append(size // each)
        numerator = (seen.noise_numerator or 0.0) * each
        before = replace(seen, noise_numerator=numerator, num_samples=size // each)
    assert sizes == expected
    assert len(set(sizes)) > 3
    in_samples = run(NoiseScale(8, 256, window=20), each, signals)
    assert sizes[-1] == pytest.approx(in_samples[-1], rel=0.1)
    assert each > 1 or sizes == in_samples


@pytest.mark.parametrize("each", [1, 7, 4096])
def test_a_plateau_decides_alike(each: int) -> None:
    signals = [Signals(metric=one) for one in (3.0, 2.0, 2.0, 2.1, 1.0, 1.5, 1.6, 1.7, 1.8, 1.9)]
    make: Make = lambda size: Plateau("a/b", start=size(8), maximum=size(60))  # noqa: E731
    in_samples = run(make(int), each, signals)
    assert in_samples == [8, 8, 8, 8, 16, 16, 16, 32, 32, 60]
    assert run(make(lambda number: Tokens(number * each)), each, signals) == in_samples


def test_what_is_rounded_down_is_said() -> None:
    horizon = Horizon("1ep", dataset_num_samples=900, tokens_per_sample=4096)
    planned = plan(horizon, DoublingRamp("16Ktok", "100Ktok", "50%"))
    assert [stage.size for stage in planned.stages] == [3, 7, 15, 24]
    [line] = planned.warnings
    assert "4,096 tokens" in line
    assert "16Ktok is 3 samples, 100Ktok is 24 samples" in line
    assert repr(planned.policy) == "DoublingRamp('16Ktok', '100Ktok', '0.5dur')"
    assert not plan(horizon, DoublingRamp("8192tok", "40_960tok", "50%")).warnings
    stepped = LinearRamp("8192tok", "38192tok", "50%", increment="6Ktok")
    [line] = plan(horizon, MultipleOf(PeriodSizes([("1ep", stepped)]), "5Ktok")).warnings
    assert line.endswith(": 38192tok is 9 samples")


@pytest.mark.parametrize(
    "policy",
    [
        "4Ktok",
        "0ep:8_192tok 50%:4Ktok",
        Fixed("1tok"),
        PowerOfTwo(Fixed("5Ktok")),
        LinearRamp("1tok", "9Ktok", "1ep"),
    ],
    ids=repr,
)
def test_less_than_a_sample_is_refused_before_the_run(policy: object) -> None:
    horizon = Horizon("1ep", dataset_num_samples=900, tokens_per_sample=5000)
    with pytest.raises(BatchSizeError, match="less than one sample of 5,000 tokens"):
        bind_run(horizon, as_policy(policy))


def test_a_single_sample_has_no_noise() -> None:
    horizon = Horizon("1ep", dataset_num_samples=900, tokens_per_sample=4096)
    with pytest.raises(BatchSizeError, match="write 8192tok or more"):
        bind_run(horizon, NoiseScale("5Ktok", "64Ktok"))


def test_unknown_samples_are_refused_in_plan_and_run() -> None:
    horizon = Horizon("1ep", dataset_num_samples=900)
    with pytest.raises(PlanError, match=r"tokens_per_sample.*lengths"):
        plan(horizon, "64Ktok")
    with pytest.raises(PlanError, match=r"tokens_per_sample.*lengths"):
        StepLoader(list(range(100)), "64Ktok", max_duration="1ep")


@given(st.integers(1, 10**6), st.integers(1, 10**9), st.integers(1, 10**6))
def test_rules_convert_exactly(each: int, reference: int, size: int) -> None:
    facts = Horizon("1ep", dataset_num_samples=900, tokens_per_sample=each)
    for kind, expected in ((LinearRule, 1.0), (SquareRootRule, 0.5)):
        rule = bind_run(facts, 8, rule=kind(Tokens(reference))).rules["lr"]
        assert rule is not None
        assert rule(size) == pytest.approx((size * each / reference) ** expected, rel=1e-15)
    same = bind_run(facts, Fixed(Tokens(8 * each)), rule=LinearRule(256)).rules["lr"]
    assert same == LinearRule(256)


def test_a_rule_in_another_unit_is_refused() -> None:
    with pytest.raises(BatchSizeError, match="reference is in tokens"):
        bind_run(Horizon("1ep", dataset_num_samples=900), 8, rule={"sqrt": "4Mtok"})


def test_it_decides_in_samples() -> None:
    assert InSamples(as_policy("64Ktok"), 4096).unit == "sp"
    assert InSamples(as_policy("64Ktok"), 4096).end_size() == 15


def test_a_resume_in_another_unit_starts_the_policy_anew() -> None:
    data = DataSpec(list(range(4_000)), tokens_per_sample=10)
    in_tokens = NoiseScale("80tok", "2560tok", window=4)
    loader = StepLoader(data, in_tokens, max_duration="1ep")
    for numerator, step in zip(range(300, 340), loader, strict=False):
        loader.finish(step, signals=Signals(noise_numerator=float(numerator), noise_denominator=5))
    saved = loader.state_dict()
    size = next(loader).batch_size
    assert 8 < size < 256
    for policy, expected in ((in_tokens, size), (NoiseScale(8, 256, window=4), 8)):
        again = StepLoader(data, policy, max_duration="1ep")
        again.load_state_dict(json.loads(json.dumps(saved)))
        assert next(again).batch_size == expected
        assert again.has_dropped_state == (expected == 8)


def test_a_policy_that_is_bound_alone_says_its_unit() -> None:
    horizon = Horizon("1ep", dataset_num_samples=900, tokens_per_sample=4096)
    bound = AtMost(Fixed("64Ktok"), "32Ktok").bind(horizon)
    assert bound.unit == "tok"
    with pytest.raises(PlanError, match="in tokens"):
        next(walk(horizon, bound))


class Mine(BatchSizePolicy):
    unit = TimeUnit.TOKEN

    def bind(self, horizon: Horizon) -> Bound:
        return Bound(decide=lambda at, state, _: (9000 + at.batch, state), is_static=True)


def test_a_policy_of_yours_may_decide_in_tokens() -> None:
    @dataclass(frozen=True)
    class Around(BatchSizePolicy):
        inner: Mine
        size: int

        def bind(self, horizon: Horizon) -> Bound:
            return self.inner.bind(horizon)

    horizon = Horizon("1ep", dataset_num_samples=9, tokens_per_sample=4096)
    for policy in (Mine(), AtMost(Mine(), "1Mtok"), Around(Mine(), 8)):
        assert policy.unit == "tok"
        assert [stage.size for stage in plan(horizon, policy).stages] == [2]
    with pytest.raises(BatchSizeError, match="in tokens and 8 in samples"):
        AtMost(Mine(), 8)


@settings(max_examples=60, deadline=None)
@given(
    _whole() | _fine(), st.integers(1, 50), st.integers(0, 9), st.sampled_from(["keep", "carry"])
)
def test_equal_lengths_are_walked_as_equal_samples(
    make: Make, each: int, odd: int, last_batch: LastBatch
) -> None:
    policy = make(lambda number: Tokens(number * (each + odd)))
    samples = list(range(900))
    known = DataSpec(samples, tokens_per_sample=each).horizon("2ep", last_batch)
    stated = DataSpec(samples, lengths=[each] * 900).horizon("2ep", last_batch)
    assert walked(stated, policy) == walked(known, policy)


def test_advice_for_sizes_in_tokens_is_in_tokens_and_works() -> None:
    data = Horizon("2ep", dataset_num_samples=96, tokens_per_sample=16)
    policy = as_policy("32tok")
    with pytest.raises(PlanError, match=r"AtLeast\(policy, '64tok'\)"):
        plan(data, policy, world_size=4)
    assert plan(data, AtLeast(policy, "64tok"), world_size=4).num_batches == 48
    with pytest.raises(PlanError, match=r"96tok or 192tok, or MultipleOf\(policy, '96tok'\)"):
        plan(data, policy, world_size=2, micro_batch_size=3, even=True)
    rounded = MultipleOf(policy, "96tok")
    assert plan(data, rounded, world_size=2, micro_batch_size=3, even=True).num_batches == 32
    with pytest.raises(PlanError, match=r"AtLeast\(policy, '64tok'\)"):
        check_least(bind_sizes(data, NoiseScale("32tok", "1Ktok")), world_size=4, each=16)


def test_a_ramp_without_stages_says_its_end_in_its_unit() -> None:
    line, *_ = LinearRamp("64Ktok", "64Ktok", "10%").warnings(Horizon("1ep"), 8)
    assert line.endswith("it starts at its end, 64Ktok")
