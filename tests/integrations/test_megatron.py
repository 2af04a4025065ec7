"""A plan in Megatron, against the real classes that run on the CPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from tests.integrations import megatron_modules  # noqa: F401

# isort: split
import numpy as np
import torch
from megatron.core import num_microbatches_calculator as calculators
from megatron.core import parallel_state
from megatron.core.optimizer import _get_param_groups
from tests.integrations import megatron_toys as toys
from tests.integrations.megatron_toys import (
    BATCH,
    DECAY,
    MICRO,
    PEAK,
    RANKS,
    UNIT,
    constant,
    expected,
    fresh,
    group,
    optimizer,
    scheduler,
    train,
)

from stretto.batching import (
    AtLeast,
    DoublingRamp,
    Fixed,
    LinearRamp,
    MultipleOf,
    NoiseScale,
    PiecewiseConstant,
)
from stretto.config.plans import build_plan
from stretto.config.run import read_run_file
from stretto.errors import BatchSizeError, StrettoError, TrainingError
from stretto.integrations.megatron import FollowPlan, follow
from stretto.planning import Plan, plan
from stretto.schedules import WSD, Constant, Cosine, Custom, Linear, StepDecay
from stretto.timing import Horizon, Timestamp

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
RAMP = "0sp:8 160sp:16"
LR = {"lr": WSD("20ba", warmup="10ba")}
RECIPES = Path(__file__).parents[2] / "examples" / "recipes"


def planned(sizes: Any = RAMP, length: str = "100ba", **changed: Any) -> Plan:
    return plan(Horizon(length, last_batch="carry"), sizes, **{"schedules": LR, **changed})


@pytest.fixture(autouse=True)
def calculator() -> Iterator[None]:
    constant()
    yield
    calculators.unset_num_microbatches_calculator()


# The rows


def test_the_rates_of_a_ramp_in_iterations() -> None:
    steps, of = planned(), fresh(planned())
    rows, end = train(of, 0, range(100))
    assert rows == expected(steps)
    assert [sum(one.size == size for one in rows) for size in (8, 16)] == [20, 80]
    rates = [one.rates[0] for one in rows]
    full = [number for number, rate in enumerate(rates) if rate == PEAK]
    assert (full[0], full[-1]) == (10, 80)  # the decay begins with iteration 80, at its peak
    assert end == steps.num_samples
    # What Megatron logs after the last iteration.
    assert [one["lr"] for one in of.optimizer.param_groups] == [0.0]
    assert steps.values_at_end == {"lr": 0.0}


def test_megatrons_own_ramp_keeps_neither() -> None:
    constant(step_batch_size_schedule="0:8 160:16")
    rows, _ = train(scheduler(), 0, range(100))
    rates = [one.rates[0] for one in rows]
    assert rates.index(PEAK) == 20
    assert rates[-1] > PEAK / 2


def groups() -> tuple[list[dict[str, Any]], list[tuple[float, float]]]:
    """Groups as MuP, a decoupled learning rate and biases make them, and their multipliers."""
    return [
        group(),
        group(wd_mult=0.0),
        group(max_lr=PEAK / 4, min_lr=PEAK / 40),
        group(max_lr=3 * PEAK, end_wd=0.3, start_wd=0.3, wd_mult=2.0),
    ], [(PEAK, DECAY), (PEAK, 0.0), (PEAK / 4, DECAY), (3 * PEAK, 0.6)]


@pytest.mark.parametrize("base", [None, {"lr": PEAK}, {"lr": PEAK, "weight_decay": DECAY}])
def test_groups_keep_their_multipliers(base: Any) -> None:
    schedules = {"lr": Cosine(end=0.1, warmup="10ba"), "weight_decay": Linear(0.5, 1)}
    steps = planned(schedules=schedules, base=base)
    made, scales = groups()
    factors = planned(schedules=schedules)
    rows, _ = train(fresh(steps, 0, RANKS, None, *made), 0, range(100))
    for mine, right in zip(rows, expected(factors, scales), strict=True):
        assert mine.size == right.size
        assert mine.rates == pytest.approx(right.rates, rel=1e-14)
        assert mine.decays == pytest.approx(right.decays, rel=1e-14)
    assert base is not None or rows == [
        one._replace(decays=row.decays)
        for one, row in zip(expected(factors, scales), rows, strict=True)
    ]


def test_a_base_that_is_the_schedulers_is_exact() -> None:
    steps = planned(schedules={"lr": Cosine(end=0.1)}, base={"lr": PEAK})
    assert train(fresh(steps), 0, range(100))[0] == expected(steps, [(1.0, DECAY)])


class Named:
    """What Megatron matches parameters by."""

    def __init__(self, end: str) -> None:
        self.end = end

    def matches(self, _parameter: Any, name: str) -> bool:
        return name.endswith(self.end)


def test_groups_as_megatron_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    alone = lambda found, mine: found.__setitem__(0, mine)  # noqa: E731
    monkeypatch.setattr(torch.distributed, "all_gather_object", alone)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    rates = {"max_lr": PEAK / 2, "min_lr": PEAK / 100}
    overrides = {Named("bias"): {"wd_mult": 0.0}, Named("1.weight"): rates}
    made = _get_param_groups([model], SimpleNamespace(lr=PEAK, min_lr=0.0), overrides)
    assert len(made) == 3
    assert all("min_lr" in one and "max_lr" in one for one in made)
    scales = [(one["max_lr"], DECAY * one["wd_mult"]) for one in made]
    steps = planned(schedules={"lr": Cosine(end=0.1, warmup="10ba")})
    of = fresh(steps, 0, RANKS, None, *made)
    assert train(of, 0, range(100))[0] == expected(steps, scales)


def test_the_rate_of_a_cuda_graph_is_filled_in_place() -> None:
    rate = torch.tensor(PEAK)
    of = fresh(planned(), 0, RANKS, None, group(lr=rate))
    rows, _ = train(of, 0, range(100))
    assert of.optimizer.param_groups[0]["lr"] is rate
    right = [one.rates[0] for one in expected(planned())]
    assert [one.rates[0] for one in rows] == pytest.approx(right, rel=1e-6)


def test_groups_may_be_a_property() -> None:
    class Chained:
        """As Megatron's ChainedOptimizer, which makes the list anew each time."""

        parts = (group(), group(max_lr=PEAK / 2))

        @property
        def param_groups(self) -> list[dict[str, Any]]:
            return [*self.parts]

    of = scheduler(Chained())
    follow(planned(), of, 0, MICRO, RANKS)
    right = expected(planned(), [(PEAK, DECAY), (PEAK / 2, DECAY)])
    assert train(of, 0, range(100))[0] == right


def test_skipped_updates_do_not_shift_the_schedule() -> None:
    assert train(fresh(planned()), 0, range(100), skip=(3, 40, 85))[0] == expected(planned())


def test_a_constant_rate_and_decay_of_megatron_stay() -> None:
    steps, of = planned(schedules={}), scheduler(lr_decay_style="constant", lr_warmup_steps=0)
    follow(steps, of, 0, MICRO, RANKS)
    assert train(of, 0, range(100))[0] == expected(steps)


# Samples in order, saved and resumed

SHARED = planned("0sp:16 800sp:32 1600sp:48")


def test_ids_are_in_order_over_ranks_and_resumed_at_100_iterations() -> None:
    """On 1, 2, 4 and 8 ranks, each resumed on another number of them."""
    samplers, rng = toys.bridge().samplers, random.Random(0)
    total = SHARED.num_samples
    assert total is not None
    at = [SHARED.sample_at_batch(one) for one in range(101)]
    whole = expected(SHARED)

    def run(steps: range, ranks: int, saved: Any = None) -> tuple[Any, Any, Any]:
        of = fresh(SHARED, at[steps.start], ranks, saved)
        own = toys.iterators(samplers, total, at[steps.start], ranks)
        rows, start = [], at[steps.start]
        for _ in steps:
            [row], after = train(of, start, range(1), MICRO * ranks)
            passes = row.size // (MICRO * ranks)
            ids = sorted(one for each in own for _ in range(passes) for one in next(each))
            assert ids == list(range(start, after))
            rows.append(row)
            start = after
        return rows, start, of.state_dict()

    for case in range(100):
        stop, [ranks, other] = rng.randrange(1, 100), rng.sample([1, 2, 4, 8], 2)
        near = range(max(0, stop - 4), stop) if case >= 8 else range(stop)
        first, end, saved = run(near, ranks)
        assert (first, end) == (whole[near.start : stop], at[stop])
        after = range(stop, 100 if case < 8 else min(100, stop + 4))
        assert run(after, other, saved)[0] == whole[stop : after.stop]


@pytest.mark.parametrize("stop", [1, 19, 20, 21, 50, 80, 99, 100])
def test_resumed_in_the_order_of_megatron_lm(stop: int) -> None:
    """It asks the calculator first; then the scheduler loads its state, which adds its steps."""
    steps = planned()
    first, consumed = train(fresh(steps), 0, range(stop))
    of = fresh(steps)
    saved = {**of.state_dict(), "num_steps": consumed}
    calculators.update_num_microbatches(consumed_samples=consumed)
    of.load_state_dict(saved)
    assert first + train(of, consumed, range(stop, 100))[0] == expected(steps)


def test_a_plan_for_other_ranks_from_a_resume_on() -> None:
    """What was trained before need not fit."""
    # 164 is reached after 20 steps of 8 and one of 4, or so: the earlier sizes fit no 8 ranks.
    sizes = "0sp:8 160sp:48"
    with pytest.raises(TrainingError, match="batch of 8 samples"):
        fresh(planned(sizes), 0, 8)
    steps = planned(sizes, resume_at=Timestamp(batch=20, sample=160), world_size=8)
    rows, _ = train(fresh(steps, 160, 8), 160, range(20, 100), 16)
    assert rows == expected(steps)[20:]


def test_a_second_training_in_the_process() -> None:
    train(fresh(planned()), 0, range(100))
    other, of = planned(12, "20ba", schedules={"lr": Linear(1, 0)}), scheduler()
    follow(other, of, 0, 3, 2)
    assert train(of, 0, range(20), 6)[0] == expected(other)


# Any plan

UNITS = st.sampled_from([1, 2, 3, 4, 8])
OWN = {"lr": PEAK, "weight_decay": DECAY}
POLICIES: list[Callable[[int, int, int, str], Any]] = [
    lambda less, more, unit, when: Fixed(more),
    lambda less, more, unit, when: PiecewiseConstant(f"0sp:{less} {when}:{more}"),
    lambda less, more, unit, when: MultipleOf(LinearRamp(less, more, when), unit),
    lambda less, more, unit, when: LinearRamp(less, more, when, increment=unit),
    lambda less, more, unit, when: AtLeast(DoublingRamp(unit, unit * 4, when), less),
    lambda less, more, unit, when: f"0%:{less} 40%:{more} 80%:{less}",
]
CURVES: list[Any] = [
    WSD("20%", warmup="10%"),
    WSD("3ba", warmup="2ba"),
    Cosine(end=0.1, warmup="2ba"),
    Cosine(warmup="24tok"),
    Linear(1, 0),
    StepDecay("25%", 0.5),
    Constant(warmup="20%"),
    0.7,
]


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int, int]:
    """A small plan over many policies, units, schedules, rules and bases; and how it is run."""
    micro, ranks = draw(UNITS), draw(UNITS)
    unit = micro * ranks
    times = unit if draw(st.integers(0, 4)) else 1  # some do not fit
    sizes = st.lists(st.integers(1, 6), min_size=2, max_size=2)
    less, more = sorted(one * times for one in draw(sizes))
    length, kind = draw(st.integers(2, 16)), draw(st.sampled_from(["ba", "sp", "tok"]))
    amount = length * {"ba": 1, "sp": more, "tok": 4 * more}[kind]
    when = draw(st.sampled_from(["3ba", f"{4 * unit}sp", f"{12 * unit}tok", "30%", "55%"]))
    policy = draw(st.sampled_from(POLICIES))(less, more, times, when)
    schedules = {"lr": draw(st.sampled_from(CURVES))}
    if draw(st.booleans()):
        schedules["weight_decay"] = draw(st.sampled_from([Linear(0.2, 1), 0.5, Cosine(end=0.3)]))
    base = {name: OWN[name] for name in schedules if draw(st.booleans())}
    rule = draw(st.sampled_from([None, {"sqrt": unit}, {"linear": 2 * unit}, lambda one: one**0.1]))
    facts: dict[str, Any] = {"last_batch": "carry"}
    if draw(st.integers(0, 3)) == 0:  # epochs, whose last batch is cut or whole
        facts = {"last_batch": "keep", "dataset_num_samples": 8 * unit}
    horizon, own = Horizon(f"{amount}{kind}", tokens_per_sample=4, **facts), {"own": 2.0}
    try:
        made = plan(horizon, policy, schedules=schedules, base=base, rule=rule, values=own)
    except StrettoError:  # such as a warm-up that is longer than the run
        reject()
    return made, micro, ranks


@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_any_plan_is_followed_or_refused_before_the_first_step(case: Any) -> None:
    steps, micro, ranks = case
    unit, batches = micro * ranks, list(steps.batches())
    constant(micro_batch_size=micro, data_parallel_size=ranks, global_batch_size=unit)
    of = scheduler()
    before = vars(of).copy()
    sizes = [size for one in batches for size in (one.size, one.decided)]
    try:
        follow(steps, of, 0, micro, ranks)
    except TrainingError:
        follows = False
    else:
        follows = True
    if not follows:
        assert any(size % unit for size in sizes)
        assert vars(of) == before
        return
    assert not any(one.size % unit for one in batches)
    lr, decay = (1.0 if name in steps.base else own for name, own in OWN.items())
    rows, _ = train(of, 0, range(len(batches)), unit)
    assert rows == expected(steps, [(lr, decay)])


# Published recipes, at full length


def gpt3() -> Plan:
    """Megatron's own words: --rampup-batch-size 16 16 5_859_375 --global-batch-size 1536."""
    ramp = "{LinearRamp: {start: 16, end: 1536, over: 5_859_375sp, increment: 16}}"
    return recipe("gpt-3-175b", "data.tokens_per_sample=2048", f"batch_size={ramp}")


def recipe(name: str, *changes: str) -> Plan:
    """A recipe that ends with a whole batch."""
    path = RECIPES / f"{name}.yaml"
    made = build_plan(read_run_file(path, list(changes)))
    assert made.num_batches is not None
    whole = made.sample_at_batch(made.num_batches - 1)
    return build_plan(read_run_file(path, [*changes, f"max_duration={whole}sp"]))


@pytest.mark.parametrize(
    ("make", "micro", "ranks"),
    [
        (gpt3, 2, 8),
        (lambda: recipe("deepseek-v3"), 4, 128),
        (lambda: recipe("olmo-1b-batch-warmup"), 8, 64),
        (lambda: build_plan(read_run_file(RECIPES / "olmo-2-7b.yaml")), 1, 512),
    ],
    ids=["gpt-3", "deepseek-v3", "olmo-1b", "olmo-2"],
)
def test_a_published_recipe_at_every_border(make: Any, micro: int, ranks: int) -> None:
    steps, rng, unit = make(), random.Random(1), micro * ranks
    last = steps.num_batches - 1
    borders = {one.first.batch + near for one in steps.stages for near in (-1, 0, 1)}
    borders |= {rng.randrange(last) for _ in range(200)}
    peak = steps.base.get("lr", PEAK)
    constant(micro_batch_size=micro, data_parallel_size=ranks, global_batch_size=unit)
    of = scheduler(optimizer(group(max_lr=peak)), max_lr=peak)
    follow(steps, of, 0, micro, ranks)
    for step in sorted(one for one in borders | {0, last} if 0 <= one <= last):
        batch = steps.at(f"{step}ba")
        [row], after = train(of, batch.timestamp.sample, range(1), unit)
        assert (row.size, row.rates) == (batch.size, (batch.values["lr"],))
        following = steps.values_at(step + 1) if step < last else steps.values_at_end
        assert of.optimizer.param_groups[0]["lr"] == following["lr"]
        assert after == steps.sample_at_batch(step + 1)
    assert after == steps.num_samples


# Refusals


def refused(text: str, steps: Plan, of: Any = None, consumed: Any = 0, **changed: Any) -> None:
    given = {"micro_batch_size": MICRO, "data_parallel_size": RANKS, **changed}
    before = calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    with pytest.raises((TrainingError, BatchSizeError), match=text):
        follow(steps, of or scheduler(), consumed, **given)
    assert calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR is before


def test_plans_that_no_engine_can_run() -> None:
    horizon = Horizon("10ba", last_batch="carry")
    by_time = Custom(lambda now: 1.0, reads="sec")
    cases = {
        "where it ends": plan(Horizon("1h"), 8, schedules=LR | {"lr": 1.0}),
        "ends; write max_duration in 'ba' or 'sp'$": plan(Horizon.endless("2ep"), 8),
        "may cut a step": plan(Horizon("10ba"), 8, schedules={"lr": 1.0}),
        "or leave out samples": plan(
            Horizon("2ep", dataset_num_samples=20, last_batch="drop"), 8, schedules={"lr": 1.0}
        ),
        "it is for 4 ranks": planned(world_size=4),
        "micro-batches of 4": planned(micro_batch_size=4),
        "a batch of 10 samples": planned("0sp:8 160sp:10"),
        "a batch of 2 samples.*max_duration='160sp'": planned(8, "162sp", schedules={"lr": 1.0}),
        "follow betas.1": planned(schedules={**LR, "betas.1": 0.9}),
        "follow lr@head": planned(schedules={**LR, "lr@head": 0.9}),
        "follow betas.1 of": planned(rule={"betas.1": {"half_life": 8}}),
        "known before the run": plan(horizon, 8, schedules={"lr": by_time}),
        "learning rate of the scheduler": planned(schedules={}),
    }
    for text, steps in cases.items():
        refused(text, steps)
    with pytest.raises(StrettoError):
        plan(horizon, NoiseScale(8, 64), schedules=LR)
    tokens = Horizon("64sp", tokens_per_sample=4, dataset_num_samples=64, last_batch="carry")
    rows = plan(tokens, 8, schedules={"lr": 1.0}, sequence_length="0tok:4 128tok:8")
    refused("rows of them, differ in length", rows)


@pytest.mark.parametrize("wrong", [0, -2, True, "2", 2.0, None])
@pytest.mark.parametrize("name", ["micro_batch_size", "data_parallel_size"])
def test_numbers_that_are_none(name: str, wrong: Any) -> None:
    refused(name, planned(), **{name: wrong})


@pytest.mark.parametrize("wrong", [-1, "0", None, 0.0, 8.5, True, False])
def test_a_position_that_is_none(wrong: Any) -> None:
    refused("consumed_samples", planned(), consumed=wrong)


def test_positions() -> None:
    steps, end = planned(), planned().num_samples
    assert end is not None
    refused("no step of the plan begins there", steps, consumed=164)
    refused(f"at sample {end + 16:,}", steps, consumed=end + 16)
    of = fresh(steps, end)
    assert of.optimizer.param_groups[0]["lr"] == 0
    assert calculators.get_num_microbatches() == 4
    with pytest.raises(TrainingError, match="no step of the plan begins there"):
        calculators.update_num_microbatches(164)


def test_schedulers_that_say_something_else() -> None:
    warm_up = {"lr_decay_style": "constant", "lr_warmup_steps": 5}
    rising = {"start_wd": 0.0, "wd_incr_style": "linear"}
    ends = planned(schedules={"lr": Cosine(end=0.1)})
    absolute = planned(schedules={"lr": Cosine()}, base={"lr": 3e-4})
    refused("a SimpleNamespace: it is no Opt", planned(), SimpleNamespace(get_lr=None))
    refused(
        "learning rate of the scheduler",
        planned(schedules={}),
        scheduler(**warm_up),
    )
    refused("keep its weight decay", planned(), scheduler(**rising))
    refused(r"lr=0.0003 \(--lr 0.0003\)", absolute)
    zero = planned(schedules={**LR, "weight_decay": 1.0}, base={"weight_decay": 0.0})
    refused("without this base", zero, scheduler(start_wd=0.0, end_wd=0.0))
    refused("write min_lr=0, or a schedule", planned(), scheduler(min_lr=1e-5))
    refused("min_lr=0.0002", ends, scheduler(optimizer(group(), group(min_lr=2e-4))))
    follow(ends, scheduler(optimizer(group(min_lr=PEAK / 10)), min_lr=PEAK / 10), 0, MICRO, RANKS)


def test_a_checkpoint_that_changes_the_base_is_refused_at_the_next_step() -> None:
    of = fresh(planned(base={"lr": PEAK}))
    with pytest.raises(TrainingError, match=r"max_lr of the scheduler is 0\.002"):
        of.load_state_dict({**of.state_dict(), "max_lr": 2e-3})


def test_calculators_that_ramp_or_differ() -> None:
    constant(step_batch_size_schedule="0:8 160:16")
    refused("replace StepBatchsizeNumMicroBatchesCalculator: .*no ramp", planned())
    constant()
    refused("pass micro_batch_size=2 and data_parallel_size=2", planned(), micro_batch_size=1)
    constant(micro_batch_size=4)
    refused("micro-batches of 4, 8 on all ranks", planned())
    constant(data_parallel_size=4)
    refused("micro-batches of 2, 8 on all ranks", planned())
    calculators.unset_num_microbatches_calculator()
    fresh(planned())


def test_other_ranks_than_those_of_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a calculator, as in a loop on Megatron Core, or after another training."""
    calculators.unset_num_microbatches_calculator()
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "_MPU_DATA_PARALLEL_WORLD_SIZE", 4)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 1)
    refused("pass data_parallel_size=4", planned(16, schedules={"lr": 1.0}))
    follow(planned(16, schedules={"lr": 1.0}), scheduler(), 0, MICRO, 4)


def test_settings_may_be_a_mapping() -> None:
    refused("write train_iters=100", planned(), settings=({"train_iters": 90},))


def test_what_is_no_plan() -> None:
    wrong: Any = "run.yaml"
    refused(r"follow 'run\.yaml': .*build_plan", wrong)


@pytest.mark.parametrize("kind", [torch.tensor, np.int64], ids=["tensor", "numpy"])
def test_a_position_of_another_library_is_not_shared_with_the_scheduler(kind: Any) -> None:
    """A tensor that the scheduler adds to in place would move the loop's own count."""
    consumed, of = kind(160), scheduler()
    follow(planned(), of, consumed, MICRO, RANKS)
    calculators.update_num_microbatches(consumed)
    of.step(16)
    assert consumed == 160
    assert type(of.state_dict()["num_steps"]) is int
    assert type(calculators.get_num_microbatches()) is int
    with pytest.raises(TrainingError, match="consumed_samples=None"):
        calculators.update_num_microbatches(None)


def arguments(**changed: Any) -> SimpleNamespace:
    """The arguments of Megatron-LM, as far as they are read."""
    values = {
        "train_iters": 100,
        "train_samples": None,
        "global_batch_size": BATCH,
        "rampup_batch_size": None,
        "step_batch_size_schedule": None,
        "decrease_batch_size_if_needed": False,
        "phase_transition_iterations": None,
        "hybrid_context_parallel": False,
        "dataloader_type": "single",
        "seq_length": 2048,
        "iteration": 0,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_vp_stage": 1,
    }
    return SimpleNamespace(**{**values, **changed})


CASES: list[tuple[str, dict[str, Any]]] = [
    ("use rampup_batch_size=.*leave it out", {"rampup_batch_size": [8, 8, 160]}),
    ("use step_batch_size_schedule", {"step_batch_size_schedule": "0:8 160:16"}),
    ("use decrease_batch_size_if_needed", {"decrease_batch_size_if_needed": True}),
    (r"write train_iters=100 \(--train-iters 100\)", {"train_iters": 90}),
    (
        r"use train_samples=1440: .*write train_iters=100",
        {"train_samples": 1440, "train_iters": 90},
    ),
    ("use perform_rl_step", {"perform_rl_step": True}),  # train() makes a calculator of its own
    ("dataloader_type='batch'", {"dataloader_type": "batch"}),
    (r"write global_batch_size=16 \(--global-batch-size 16\)", {"global_batch_size": 12}),
    ("at its sample, the plan has 0", {"iteration": 7}),
]


@pytest.mark.parametrize(("text", "changed"), CASES, ids=[next(iter(one)) for _, one in CASES])
def test_arguments_of_megatron_lm(
    text: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("megatron.training.global_vars")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fresh(planned())  # nothing is set yet
    constant()
    vars(module)["_GLOBAL_ARGS"] = arguments(**changed)
    refused(text, planned())
    vars(module)["_GLOBAL_ARGS"] = arguments()
    follow(planned(), scheduler(), 0, MICRO, RANKS)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("asserts that it grows", planned("0sp:16 160sp:8")),
        ("asserts that it grows.*max_duration='160sp'", planned(8, "164sp", schedules={"lr": 1.0})),
        (
            "write seq_length=4096",
            plan(Horizon("100ba", tokens_per_sample=4096, last_batch="carry"), 8, schedules=LR),
        ),
    ],
    ids=["shrinks", "cut", "length"],
)
def test_plans_that_the_loop_of_megatron_cannot_run(text: str, steps: Plan) -> None:
    asked = {"train_iters": steps.num_batches, "iteration": 0, "seq_length": 2048}
    follow(steps, scheduler(), 0, MICRO, RANKS, settings=())
    constant()
    refused(text, steps, settings=(SimpleNamespace(**asked),))


def test_data_are_no_more_than_the_plan_reads() -> None:
    """Megatron shuffles all epochs of its data but the last together."""
    steps = planned("0sp:8 160sp:64", "100ba", schedules={"lr": 1.0})
    assert steps.num_samples == 20 * 8 + 80 * 64
    asked = arguments(global_batch_size=8)
    refused(r"write global_batch_size=56 ", steps, settings=(asked,))
    follow(steps, scheduler(), 0, MICRO, RANKS, settings=(arguments(global_batch_size=56),))


@pytest.mark.parametrize(
    ("stages", "group", "passes", "fits"),
    [
        (2, None, 2, True),
        (2, None, 3, False),
        (4, None, 2, False),
        (2, 4, 6, True),
        (2, 4, 5, False),
        (2, 4, 3, False),
    ],
)
def test_interleaved_pipelines(
    stages: int, group: int | None, passes: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule of megatron/core/pipeline_parallel/schedules.py, for every stage of the plan."""
    steps = planned(f"0sp:{4 * stages * 4} 160sp:{UNIT * passes}", schedules={"lr": 1.0})
    given = arguments(
        global_batch_size=1024,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=group,
        train_iters=None,
    )

    def attempt(**how: Any) -> None:
        constant()
        if fits:
            follow(steps, scheduler(), 0, MICRO, RANKS, **how)
        else:
            refused("their groups are of", steps, **how)

    attempt(settings=(given,))
    # A loop on Megatron Core: its parallel state.
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", stages)
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 2)
    monkeypatch.setattr(parallel_state, "_MPU_DATA_PARALLEL_WORLD_SIZE", RANKS)
    attempt(settings=(SimpleNamespace(microbatch_group_size_per_vp_stage=group),))


@pytest.mark.parametrize(
    ("graphs", "stages", "fits"),
    [
        ({"cuda_graph_impl": "full_iteration"}, 1, False),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, 1, False),
        ({"cuda_graph_impl": "transformer_engine"}, 2, False),
        ({"cuda_graph_impl": "transformer_engine"}, 1, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": None}, 2, True),
    ],
)
def test_cuda_graphs_of_one_batch_size(graphs: dict[str, Any], stages: int, fits: bool) -> None:
    """A graph of a whole step replays the micro-batches that it was captured with."""
    given = arguments(pipeline_model_parallel_size=stages, train_iters=None, **graphs)
    follow(planned(8), scheduler(), 0, MICRO, RANKS, settings=(given,))
    constant()
    if fits:
        follow(planned(), scheduler(), 0, MICRO, RANKS, settings=(given,))
    else:
        refused("capture CUDA graphs", planned(), settings=(given,))


# Megatron-Bridge


def context(steps: Plan, of: Any, **changed: Any) -> Any:
    """What Bridge gives to a callback."""
    names = ("dataloader_type", "max_steps", "seq_length", "step", "consumed_train_samples")
    values = {"step": 0, "consumed_train_samples": 0, "seq_length": 2048, **changed}
    own = {name: values.pop(name, None) for name in names}
    given = {"train_iters": steps.num_batches, "train_samples": None, "global_batch_size": BATCH}
    train_config = SimpleNamespace(micro_batch_size=MICRO, **{**given, **values})
    model = SimpleNamespace(
        seq_length=own["seq_length"],
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
    )
    config = SimpleNamespace(
        train=train_config,
        dataset=SimpleNamespace(dataloader_type=own["dataloader_type"]),
        model=model,
        scheduler=SimpleNamespace(max_steps=own["max_steps"]),
        data_parallel_size=RANKS,
    )
    place = {name: own[name] for name in ("step", "consumed_train_samples")}
    state = SimpleNamespace(cfg=config, train_state=SimpleNamespace(**place))
    made = toys.bridge().callbacks.CallbackContext
    return made(state=state, model=[], optimizer=of.optimizer, scheduler=of)


def test_bridge_follows_a_plan() -> None:
    callbacks, of = toys.bridge().callbacks, scheduler()
    manager = callbacks.normalize_callbacks([FollowPlan(planned())])
    assert callbacks.should_fire(manager, "on_data_init_start")
    manager.fire("on_data_init_start", context(planned(), of))
    manager.fire("on_train_start", context(planned(), of))
    assert train(of, 0, range(100))[0] == expected(planned())


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("write train_iters=100", {"train_iters": 90}),
        ("write max_steps=100", {"max_steps": 200}),
        ("write train_iters=100", {"train_samples": 1440, "train_iters": 90}),
        ("dataloader_type='batch'", {"dataloader_type": "batch"}),
        ("use rampup_batch_size", {"rampup_batch_size": [8, 8, 160]}),
        ("write global_batch_size=16", {"global_batch_size": 8}),
        ("at its sample, the plan has 20", {"consumed_train_samples": 160, "step": 10}),
        ("no step of the plan begins", {"consumed_train_samples": 164, "step": 21}),
    ],
)
def test_configurations_of_bridge(text: str, changed: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match=text):
        FollowPlan(planned()).on_data_init_start(context(planned(), scheduler(), **changed))


def test_an_older_bridge_does_not_train_without_the_plan() -> None:
    with pytest.raises(TrainingError, match=r"megatron-bridge>=0\.6\.2"):
        FollowPlan(planned()).on_train_start(context(planned(), scheduler()))
