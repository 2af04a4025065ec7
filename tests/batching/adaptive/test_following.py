"""Policies that follow measurements: where they go, and the bounds that they never leave."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto import batching
from stretto.batching import (
    AtLeast,
    AtMost,
    BatchSizePolicy,
    DoublingRamp,
    Fixed,
    Hysteresis,
    IncreaseFunction,
    LinearRamp,
    Monotone,
    MultipleOf,
    NoiseScale,
    NormTest,
    PeriodSizes,
    Plateau,
    PolicyState,
    PowerOfTwo,
    Signals,
    as_policy,
)
from stretto.batching.noise_scale import STEADY, GradientNoise
from stretto.errors import BatchSizeError, PlanError
from stretto.noise import NoiseSums
from stretto.planning import plan
from stretto.timing import Horizon, Timestamp

RUN = Horizon("1000ba")
POLICIES = [
    NoiseScale(8, 100, minimum=4, window=12),
    NoiseScale(8, 100, c=0.01, minimum=2, window=2, confidence=0.01),
    NoiseScale(8, 100, c=3.0, power=0.5, minimum=2, window=4),
    NormTest(8, 100, eta=0.01, window=2),
    Plateau("a/b", start=8, maximum=100, factor=1.3, patience=1),
    Plateau("a/b", start=8, maximum=100, factor=1e300, mode="max", threshold=0),
    PeriodSizes([("9ba", NormTest(8, 100)), ("rest", NoiseScale(4, 100, window=5))]),
    Hysteresis(PeriodSizes([("5ba", 8), ("6ba", Monotone(NormTest(8, 90))), ("rest", 16)]), 1.1),
    PowerOfTwo(Hysteresis(Monotone(NoiseScale(8, 64, window=3)), 1.5, wait="3ba")),
]
odd = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-320, 1e308, -1e308])
values = st.none() | odd | st.floats() | st.floats(0, 100)
signals = st.builds(
    Signals,
    loss=values,
    metric=values,
    noise_numerator=values,
    noise_denominator=values,
    num_samples=values,
)


def sizes_of(policy: BatchSizePolicy, seen: list[Signals]) -> tuple[list[int], PolicyState]:
    """The sizes of a run in which this was measured before each batch."""
    bound = policy.bind(RUN)
    state, sizes = bound.start, []
    for batch, measured in enumerate(seen):
        size, state = bound.decide(Timestamp(batch=batch, sample=8 * batch), state, measured)
        sizes.append(size)
    return sizes, state


def noisy(scale: float, steps: int, seed: int = 0, *, spread: float = 0.5) -> list[Signals]:
    """Measurements of a gradient whose noise scale is `scale`."""
    chance = random.Random(seed)
    return [
        Signals(
            noise_numerator=chance.gauss(scale, 0.1 * scale),
            noise_denominator=chance.gauss(1.0, spread),
        )
        for _ in range(steps)
    ]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(seen=st.lists(signals, max_size=40))
def test_bounds_are_never_left(policy: BatchSizePolicy, seen: list[Signals]) -> None:
    sizes, state = sizes_of(policy, seen)
    assert all(type(size) is int and 1 <= size <= 100 for size in sizes)
    bounds = policy.bind(RUN).bounds
    assert bounds is None or all(bounds[0] <= size <= bounds[1] for size in sizes)
    assert json.loads(json.dumps(state, allow_nan=False)) == state


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(seen=st.lists(signals, max_size=25), cut=st.integers(0, 25))
def test_a_saved_state_goes_on_to_the_last_bit(
    policy: BatchSizePolicy, seen: list[Signals], cut: int
) -> None:
    whole, last = sizes_of(policy, seen)
    first, state = sizes_of(policy, seen[:cut])
    bound = policy.bind(RUN)
    state = json.loads(json.dumps(state))
    assert bound.accepts(state)
    for batch, measured in enumerate(seen[cut:], start=len(first)):
        size, state = bound.decide(Timestamp(batch=batch, sample=8 * batch), state, measured)
        first.append(size)
    assert first == whole
    assert state == last


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_policy_is_a_value(policy: BatchSizePolicy) -> None:
    assert eval(repr(policy), vars(batching)) == policy
    assert policy.scaled(2.0).bind(RUN).reads == policy.bind(RUN).reads
    assert not policy.bind(RUN).is_static
    with pytest.raises(PlanError, match="measures"):
        plan(RUN, policy)


def test_the_size_follows_the_noise_scale_and_then_keeps_still() -> None:
    sizes, _ = sizes_of(NoiseScale(8, 1000), noisy(60.0, 400))
    assert sizes[:19] == [8] * 19
    assert sizes[-1] == pytest.approx(60, rel=0.2)
    assert sum(one != other for one, other in itertools.pairwise(sizes[100:])) <= 5
    sizes, _ = sizes_of(NoiseScale(8, 1000, c=0.5), noisy(60.0, 400))
    assert sizes[-1] == pytest.approx(30, rel=0.2)


def test_the_size_follows_a_power_of_the_noise_scale() -> None:
    seen = noisy(64.0, 300) + noisy(256.0, 400, seed=1)
    sizes, _ = sizes_of(NoiseScale(8, 1000, c=3, power=0.5), seen)
    assert sizes[299] == pytest.approx(3 * 8, rel=0.1)
    off = sizes[-1] / (3 * 16)
    assert 0 <= (off + 1 / off - 2) / 4 < 0.03  # it moves only where that saves 3 percent
    # The interval is of that power, too: it is narrower, and the size keeps as still.
    assert sum(one != other for one, other in itertools.pairwise(sizes[100:300])) <= 5


def test_an_end_of_the_interval_that_was_rounded_below_zero_has_a_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GradientNoise, "interval", (0.0, -1e-16))
    sizes, _ = sizes_of(NoiseScale(16, 64, c=3, power=0.5, minimum=8), noisy(60.0, 40))
    assert all(8 <= size <= 64 for size in sizes)


def test_the_root_of_the_noise_scale_costs_least() -> None:
    """Where a step costs as much as `c ** 2` samples; its docstring says so."""
    c, noise = 3.0, 100.0
    size = sizes_of(NoiseScale(8, 1000, c=c, power=0.5), noisy(noise, 60, spread=0.0))[0][-1]
    cost = {size: c**2 * (1 + noise / size) + size + noise for size in range(8, 1000)}
    assert min(cost, key=cost.__getitem__) == 30
    assert size == pytest.approx(30, abs=1)


def test_the_size_follows_the_noise_up_and_down_within_bounds() -> None:
    seen = noisy(200.0, 200) + noisy(5.0, 300, seed=1)
    sizes, _ = sizes_of(NoiseScale(16, 128, minimum=8, window=40), seen)
    assert max(sizes) == 128
    assert sizes[-1] == 8
    sizes, _ = sizes_of(NoiseScale(16, 128, window=40), seen)
    assert min(sizes) == 16


def test_where_the_gradient_is_lost_in_noise_the_size_moves_to_what_is_sure() -> None:
    """The denominator is not surely above zero, so that the noise scale has no upper end."""
    chance = random.Random(4)
    seen = [
        Signals(noise_numerator=chance.gauss(50, 1), noise_denominator=chance.gauss(0.2, 5.0))
        for _ in range(100)
    ]
    sizes, _ = sizes_of(NoiseScale(8, 10_000), seen)
    assert 8 < sizes[-1] < 250


def test_a_step_without_a_measurement_changes_nothing() -> None:
    policy, seen = NoiseScale(8, 1000), noisy(60.0, 60)
    sizes, state = sizes_of(policy, seen)
    mixed = [one for signal in seen for one in (signal, Signals(loss=1.0))]
    often, other = sizes_of(policy, mixed)
    assert other == state
    assert often[::2] == sizes


def test_the_norm_test_goes_to_the_smallest_size_that_passes_and_shrinks_with_it() -> None:
    seen = noisy(60.0, 300, spread=0.1) + noisy(10.0, 600, seed=1, spread=0.1)
    sizes, _ = sizes_of(NormTest(8, 1000, eta=0.5), seen)
    assert sizes[0] == 8
    assert sizes[299] == pytest.approx((1 / 0.25 - 1) * 60, rel=0.1)
    assert sizes[-1] == pytest.approx((1 / 0.25 - 1) * 10, rel=0.1)
    held, _ = sizes_of(Monotone(NormTest(8, 1000, eta=0.5)), seen)
    assert held == sorted(held)
    assert held[-1] == max(sizes)
    assert sizes_of(NormTest(8, 50, eta=0.1), noisy(60.0, 100))[0][-1] == 50
    assert set(sizes_of(NormTest(32, 1000), noisy(60.0, 100))[0]) == {32}
    assert sizes_of(NormTest(32, 1000, minimum=8), noisy(60.0, 300))[0][-1] < 20


def batch_seen(chance: np.random.Generator, size: int, scale: float, dimensions: int) -> Signals:
    """What a batch measures in micro-batches of 4: a Gaussian gradient of a known noise scale."""
    groups = np.array([4] * (size // 4) + [size % 4] * (size % 4 > 0))
    means = 1 / math.sqrt(dimensions) + chance.standard_normal((len(groups), dimensions)) * np.sqrt(
        scale / dimensions / groups[:, None]
    )
    whole = groups @ means / size
    return NoiseSums.of((means**2).sum(1), groups, float(whole @ whole)).signals(size)


def sizes_on(
    policy: BatchSizePolicy, truth: Sequence[float], seed: int, *, dimensions: int
) -> list[int]:
    """The sizes of a run whose gradient has these noise scales, one for each batch."""
    chance, bound = np.random.default_rng(seed), policy.bind(RUN)
    state, seen, sizes = bound.start, Signals(), []
    for batch, scale in enumerate(truth):
        size, state = bound.decide(Timestamp(batch=batch), state, seen)
        seen = batch_seen(chance, size, scale, dimensions)
        sizes.append(size)
    return sizes


def test_the_norm_test_settles_where_theory_says() -> None:
    """At an eta of 0.9 and a noise scale of 40: 9.4 samples. A batch that never shrinks ends at the
    largest of many noisy tests: at 14 to 23, after 1,500 steps."""
    ends = [sizes_on(NormTest(6, 4096), [40.0] * 300, seed, dimensions=50)[-1] for seed in range(5)]
    assert np.median(ends) == pytest.approx(9.4, abs=1.5)
    assert max(ends) <= 13


def test_the_size_lags_by_a_quarter_where_the_noise_scale_doubles_within_a_window() -> None:
    """`docs/guides/noise.md` has the numbers, with other windows, dimensions and more seeds."""
    window = 50
    truth = [64.0 * 2 ** max(0, batch / window - 2) for batch in range(5 * window)]
    for seed in range(2):
        sizes = sizes_on(NoiseScale(16, 4096, window=window), truth, seed, dimensions=50)
        parts = [size / scale for size, scale in zip(sizes, truth, strict=True)]
        assert 0.6 < np.median(parts[-window:]) < 0.9


def test_the_norm_test_grows_to_the_maximum_where_there_is_only_noise() -> None:
    ends = [sizes_on(NormTest(6, 64), [1e9] * 300, seed, dimensions=50)[-1] for seed in range(2)]
    assert ends == [64] * 2


def measured_in(size: int, chance: random.Random, *, scale: float = 100.0) -> Signals:
    """What a batch measures in two halves: a Gaussian gradient of noise scale `scale`."""
    dimensions, half = 50, size / 2
    spread = math.sqrt(scale / dimensions / half)
    mean = math.sqrt(1 / dimensions)
    halves = [[chance.gauss(mean, spread) for _ in range(dimensions)] for _ in range(2)]
    whole = sum(((one + two) / 2) ** 2 for one, two in zip(*halves, strict=True))
    squares = [sum(g * g for g in one) for one in halves]
    return NoiseSums.of(squares, [half, half], whole).signals(size)


@pytest.mark.parametrize("policy", [NoiseScale(64, 512), NormTest(64, 512, eta=0.6)], ids=repr)
def test_a_small_batch_now_and_then_tells_little(policy: BatchSizePolicy) -> None:
    """As the last one of each epoch, which is cut: it counts by its samples."""
    chance = random.Random(1)
    steps = [measured_in(64, chance) for _ in range(300)]
    mixed = []
    for number, step in enumerate(steps):
        mixed += [step] if number % 20 else [step, measured_in(2, chance)]
    whole, other = sizes_of(policy, steps), sizes_of(policy, mixed)
    assert other[0][-1] == pytest.approx(whole[0][-1], rel=0.1)
    assert other[0][-1] > 100
    bound = policy.bind(RUN)
    known, mixed_known = bound.log_values(whole[1]), bound.log_values(other[1])
    assert known.keys() == mixed_known.keys()
    for name, value in known.items():
        assert mixed_known[name] == pytest.approx(value, rel=0.15)


@pytest.mark.parametrize(
    ("metrics", "sizes"),
    [
        ([3.0, 2.0, 1.0, 0.5], [8, 8, 8, 8]),
        ([3.0, 3.0, 3.0, 3.0, 3.0], [8, 8, 12, 12, 18]),
        ([3.0, math.nan, math.nan, 1.0], [8, 8, 12, 12]),
        ([math.nan, math.nan, 3.0, 3.0, 2.0], [8, 12, 12, 12, 12]),
        ([3.0, 2.98, 2.96], [8, 8, 12]),
        ([300.0, 298.0, 296.0], [8, 8, 12]),  # 0.05 is a part of the best
        ([3.0, None, 3.0, None, 3.0], [8, 8, 8, 8, 12]),
        ([3.0] * 9, [8, 8, 12, 12, 18, 18, 20, 20, 20]),
        ([math.inf, 5.0, -math.inf], [8, 8, 8]),
    ],
    ids=[
        "falls",
        "stands",
        "nan",
        "nan first",
        "too little",
        "in part",
        "none",
        "maximum",
        "infinite",
    ],
)
def test_a_plateau(metrics: list[float | None], sizes: list[int]) -> None:
    policy = Plateau("a/b", start=8, maximum=20, factor=1.5, threshold=0.05)
    assert sizes_of(policy, [Signals(metric=value) for value in metrics])[0] == sizes


@pytest.mark.parametrize(("start", "is_far_below"), [(4, True), (3000, False)])
def test_where_little_is_known_it_moves_to_the_nearer_end(start: int, is_far_below: bool) -> None:
    """Beyond an end of the interval, and that wide: so far, and no further."""
    policy, average = NoiseScale(start, 4000, minimum=2, window=40), GradientNoise(40)
    bound, chance = policy.bind(RUN), random.Random(3)
    state, moved = bound.start, None
    for _ in range(300):
        seen = Signals(noise_numerator=chance.gauss(60, 6), noise_denominator=chance.gauss(1, 1.6))
        average = average.after(seen)
        before, (size, state) = state["size"], bound.decide(Timestamp(), state, seen)
        lower, upper = average.interval
        if size != before and upper > STEADY * lower:
            moved = size
            assert moved == round(lower if is_far_below else upper)
            break
    assert moved is not None


def test_a_plateau_of_a_metric_of_which_more_is_better() -> None:
    policy = Plateau("a/b", start=8, maximum=20, mode="max", patience=1)
    assert sizes_of(policy, [Signals(metric=m) for m in (0.1, 0.2, 0.2)])[0] == [8, 8, 16]
    below_zero = Plateau("a/b", start=8, maximum=20, patience=1)
    assert sizes_of(below_zero, [Signals(metric=m) for m in (-1.0, -2.0, -1.5)])[0] == [8, 8, 16]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_metric_below_zero_that_stands_still_does_not_improve(mode: Any) -> None:
    policy = Plateau("a/b", start=8, maximum=64, mode=mode, patience=1, threshold=0.1)
    assert sizes_of(policy, [Signals(metric=-1.5)] * 3)[0] == [8, 16, 32]


@pytest.mark.parametrize(
    ("policy", "reads"),
    [
        (NoiseScale(8, 64), {"noise"}),
        (AtMost(Hysteresis(Monotone(NormTest(8, 64)), 1.5), 32), {"noise"}),
        (PeriodSizes([("10%", 8), ("rest", Plateau("a/b", start=8, maximum=9))]), {"a/b"}),
        (Fixed(8), set()),
        (as_policy(lambda timestamp, current: 8), set()),
    ],
    ids=repr,
)
def test_what_is_read(policy: BatchSizePolicy, reads: set[str]) -> None:
    assert policy.bind(RUN).reads == reads


def test_numbers_of_other_libraries_go_into_a_checkpoint() -> None:
    numpy_s: Any = np.float32(30.0)
    tensor: Any = torch.tensor(1.0)
    seen = Signals(noise_numerator=numpy_s, noise_denominator=tensor, num_samples=8)
    assert seen == Signals(noise_numerator=30.0, noise_denominator=1.0, num_samples=8.0)
    for policy in (NoiseScale(8, 64), NormTest(8, 64)):
        json.dumps(sizes_of(policy, [seen] * 3)[1])
    plateau = Plateau("a/b", start=8, maximum=64)
    json.dumps(sizes_of(plateau, [Signals(metric=tensor)])[1])
    with pytest.raises(BatchSizeError, match="metric"):
        Signals(metric=[1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "policy",
    [NoiseScale(32, 64), NormTest(32, 64), Plateau("a/b", start=32, maximum=64)],
    ids=lambda policy: type(policy).__name__,
)
def test_a_resumed_run_is_within_its_own_bounds(policy: BatchSizePolicy) -> None:
    bound = policy.bind(RUN)
    size, _ = bound.decide(Timestamp(), {**bound.start, "size": 8}, Signals())
    assert (size, bound.bounds) == (32, (32, 64))


def test_a_policy_of_two_signals_over_a_long_run_stays_near_the_truth() -> None:
    """Over many runs the size that is reached is not biased by when it stops moving."""
    reached = [sizes_of(NoiseScale(8, 1000), noisy(60.0, 150, seed))[0][-1] for seed in range(30)]
    assert sum(reached) / len(reached) == pytest.approx(60, rel=0.15)


@pytest.mark.parametrize(
    ("at_64", "with_a_lower_maximum"),
    [
        (NoiseScale(8, 64, window=2), NoiseScale(8, 48, window=2)),
        (NormTest(8, 64, window=2), NormTest(8, 48, window=2)),
        (Plateau("a/b", start=8, maximum=64), Plateau("a/b", start=8, maximum=48)),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_a_lower_maximum_holds_from_the_first_batch_after_a_resume(
    at_64: BatchSizePolicy, with_a_lower_maximum: BatchSizePolicy
) -> None:
    """Whoever has run out of memory lowers it and goes on."""
    loud = Signals(metric=1.0, noise_numerator=1e6, noise_denominator=1.0)
    sizes, state = sizes_of(at_64, [loud] * 40)
    assert sizes[-1] == 64
    bound = with_a_lower_maximum.bind(RUN)
    assert bound.accepts(state)
    size, _ = bound.decide(Timestamp(batch=40, sample=320), state, Signals())
    assert size == 48


def test_a_raised_minimum_holds_from_the_first_batch_after_a_resume() -> None:
    sizes, state = sizes_of(NoiseScale(8, 64, minimum=4, window=2), noisy(4.0, 40))
    assert sizes[-1] < 16
    size, _ = NoiseScale(32, 64, minimum=16).bind(RUN).decide(Timestamp(), state, Signals())
    assert size == 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoiseScale(8, 64, c=10**400), "above"),
        (lambda: NoiseScale(8, 64, c=math.inf), "above"),
        (lambda: NoiseScale(8, 64, c=-(10**400)), "above"),
        (lambda: NoiseScale(8, 64, power=1.5), "most"),
        (lambda: NoiseScale(8, 64, power=0), "most"),
        (lambda: NoiseScale(8, 64, power=True), "most"),
        (lambda: NormTest(8, 64, eta=10**400), "below"),
        (
            lambda: Plateau("a/b", start=8, maximum=64, threshold=10**400),
            "below",
        ),
        (lambda: Plateau("a/b", start=8, maximum=64, factor=10**400), "above"),
        (lambda: Plateau("a/b", start=8, maximum=64, factor=0), "above"),
    ],
)
def test_numbers_that_no_float_holds_are_refused_like_others(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(BatchSizeError, match=message):
        make()


def test_a_wrapper_goes_by_what_is_decided_and_bounds_go_around_it() -> None:
    rounded = PowerOfTwo(NoiseScale(100, 100), "up")
    assert sizes_of(rounded, [Signals()])[0] == [128]
    assert rounded.bind(RUN).bounds == (128, 128)
    assert MultipleOf(NoiseScale(10, 100), 16).bind(RUN).bounds == (16, 96)
    assert MultipleOf(NoiseScale(40, 100), 32).bind(RUN).bounds == (32, 96)
    assert sizes_of(AtMost(rounded, 64), [Signals()])[0] == [64]


@pytest.mark.parametrize(
    ("policy", "bounds"),
    [
        (Fixed(8), (8, 8)),
        (as_policy("0sp:64 200sp:4 9ep:16"), (4, 64)),
        (LinearRamp(8, 32, "50ba", increment=8), (8, 32)),
        (DoublingRamp(8, 32, "50ba"), (8, 32)),
        (NoiseScale(8, 64, minimum=2), (2, 64)),
        (NormTest(8, 64), (8, 64)),
        (Monotone(Plateau("a/b", start=8, maximum=64)), (8, 64)),
        (AtMost(AtLeast(NoiseScale(8, 64, minimum=2), 4), 32), (4, 32)),
        # Its first call may increase the size that it starts from.
        (IncreaseFunction(lambda epoch, size: 8, 8, 64), None),
        (as_policy(lambda timestamp, current: 8), None),
        (AtLeast(as_policy(lambda timestamp, current: 8), 8), None),
        (PeriodSizes([("10%", 2), ("rest", NoiseScale(8, 64))]), (2, 64)),
        (PeriodSizes([("10%", lambda timestamp, current: 8), ("rest", NoiseScale(8, 64))]), None),
    ],
    ids=repr,
)
def test_the_bounds_of_what_may_be_decided(
    policy: BatchSizePolicy, bounds: tuple[int, int] | None
) -> None:
    assert policy.bind(RUN).bounds == bounds


def test_a_plateau_that_goes_on_with_another_metric_has_nothing_to_beat() -> None:
    before = Plateau("a/loss", start=8, maximum=64, patience=1).bind(RUN)
    state = before.start
    for metric in (0.5, 0.9):
        size, state = before.decide(Timestamp(), state, Signals(metric=metric))
    assert size == 16
    after = Plateau("a/accuracy", start=8, maximum=64, patience=1, mode="max").bind(RUN)
    assert after.accepts(state)
    sizes = []
    for metric in (0.3, 0.2):
        size, state = after.decide(Timestamp(), state, Signals(metric=metric))
        sizes.append(size)
    assert sizes == [16, 32], "0.3 is the best so far, and 0.2 is not"


@pytest.mark.parametrize(
    "around",
    [
        lambda policy: policy,  # alone
        lambda policy: AtMost(policy, 64),
        Monotone,
        lambda policy: Hysteresis(policy, 1.5),
        lambda policy: PeriodSizes([("rest", policy)]),
    ],
)
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (NoiseScale(8, 100), {"noise_scale", "noise_scale_low", "noise_scale_high"}),
        (Plateau("a/b", start=8, maximum=9), set()),
    ],
)
def test_what_is_followed_is_logged(policy: Any, expected: set[str], around: Any) -> None:
    bound = around(policy).bind(RUN)
    state = bound.start
    assert bound.log_values(state) == {}
    for batch in range(60):
        seen = Signals(noise_numerator=30 + batch % 2, noise_denominator=1.0)
        _, state = bound.decide(Timestamp(batch=batch), state, seen)
    logged = bound.log_values(state)
    assert set(logged) == expected
    if "noise_scale" in logged:
        assert logged["noise_scale_low"] < logged["noise_scale"] < logged["noise_scale_high"]
        assert logged["noise_scale"] == pytest.approx(30.5, rel=0.01)
