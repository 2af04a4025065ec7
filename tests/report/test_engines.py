"""Settings for other engines, and what their own schedules make of a plan."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import TrainingError
from stretto.planning import Plan, plan
from stretto.report.engines import engine_settings
from stretto.schedules import WSD, Cosine, Linear
from stretto.timing import Horizon

PEAK = 1e-3
MICRO, RANKS = 2, 2
UNIT = MICRO * RANKS


def planned(sizes: Any = "0sp:8 160sp:16", length: str = "100ba", **changed: Any) -> Plan:
    usual = {"world_size": RANKS, "micro_batch_size": MICRO, "base": {"lr": PEAK}}
    schedules = {"lr": WSD("20ba", warmup="10ba")}
    horizon = Horizon.endless(length, tokens_per_sample=128)
    return plan(horizon, sizes, **{**usual, "schedules": schedules, **changed})


def moved(notes: list[str]) -> list[str]:
    """Return what the last note says, in parts."""
    return notes[-1].split("; ")[1:]


def test_settings_of_megatron() -> None:
    found, notes = engine_settings(planned(), "megatron")
    assert found == {
        "--train-iters": 100,
        "--micro-batch-size": 2,
        "--global-batch-size": 16,
        "--lr-decay-style": "constant",
        "--lr-warmup-iters": 0,
        "--min-lr": 0.0,
        "--lr": PEAK,
        "--seq-length": 128,
        "--dataloader-type": "single",
    }
    assert notes[0] == "these settings are for world_size=2"
    assert notes[1] == "without stretto, each step takes 16 samples: these settings have no ramp"
    assert moved(notes) == [
        "lr warm-up ends at iteration 5 rather than 10",
        "lr begins to fall at iteration 31 rather than 81",
        "schedules end at iteration 35 rather than 100",
    ]


STATED: dict[str, Any] = {
    "lr": 1.0,
    "weight_decay": 0.2,
    "betas": [0.9, 0.95],
    "eps": 1e-7,
    "clip_norm": 2.0,
}
PRINTED: dict[Any, dict[str, Any]] = {
    "megatron": {
        "--weight-decay": 0.2,
        "--adam-beta1": 0.9,
        "--adam-beta2": 0.95,
        "--adam-eps": 1e-7,
        "--clip-grad": 2.0,
    },
    "bridge": {
        "scheduler.start_weight_decay": 0.2,
        "scheduler.end_weight_decay": 0.2,
        "optimizer.adam_beta1": 0.9,
        "optimizer.adam_beta2": 0.95,
        "optimizer.adam_eps": 1e-7,
        "optimizer.clip_grad": 2.0,
    },
    "automodel": {
        "--optimizer.weight_decay": 0.2,
        "--optimizer.betas": "[0.9,0.95]",
        "--optimizer.eps": 1e-7,
        "--clip_grad_norm.max_norm": 2.0,
    },
}


@pytest.mark.parametrize("engine", PRINTED)
def test_what_a_file_states_of_its_optimizer_is_printed_or_named(engine: Any) -> None:
    bare = engine_settings(planned(), engine)
    found, notes = engine_settings(planned(), engine, STATED)
    assert found == {**bare[0], **PRINTED[engine]}, "of several learning rates, the plan's counts"
    assert notes == bare[1]
    fewer, notes = engine_settings(planned(), engine, {"lr": 1.0, "momentum": 0.5, "betas": 3})
    assert fewer == bare[0]
    for name in ("momentum", "weight_decay", "eps", "clip_norm"):
        assert any(note.startswith(f"{name} is") for note in notes)


def test_settings_of_bridge() -> None:
    schedules = {"lr": WSD("20ba", warmup="10ba", end=0), "weight_decay": 1.0}
    base = {"lr": PEAK, "weight_decay": 0.1}
    found, notes = engine_settings(planned(schedules=schedules, base=base), "bridge")
    assert found == {
        "train.train_iters": 100,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 16,
        "scheduler.lr_decay_style": "constant",
        "scheduler.lr_warmup_iters": 0,
        "optimizer.min_lr": 0.0,
        "optimizer.lr": PEAK,
        "scheduler.start_weight_decay": 0.1,
        "scheduler.end_weight_decay": 0.1,
        "model.seq_length": 128,
        "dataset.dataloader_type": "single",
    }
    assert moved(notes) == [
        "lr warm-up ends at iteration 20 rather than 10",
        "lr begins to fall at iteration 91 rather than 81",
        "lr ends at 0.0005 rather than 0",
    ]


def test_settings_of_automodel() -> None:
    shrinks = planned("0sp:16 160sp:8")
    found, notes = engine_settings(shrinks, "automodel")
    assert found == {
        "--step_scheduler.max_steps": 100,
        "--step_scheduler.local_batch_size": 2,
        "--step_scheduler.global_batch_size": 12,
        "--lr_scheduler.lr_decay_style": "constant",
        "--lr_scheduler.lr_warmup_steps": 0,
        "--lr_scheduler.min_lr": 0.0,
        "--optimizer.lr": PEAK,
    }
    assert notes[1:] == ["without stretto, each step takes 12 samples: these settings have no ramp"]


@pytest.mark.parametrize("engine", ["megatron", "bridge", "automodel"])
def test_one_size_moves_nothing(engine: Any) -> None:
    assert engine_settings(planned(16), engine)[1] == ["these settings are for world_size=2"]


def test_data_are_made_for_no_more_samples_than_whole_micro_batches_need() -> None:
    # 50 x 8 and 50 x 16: the mean is a whole number of micro-batches of each rank.
    found, notes = engine_settings(planned("0sp:8 400sp:16"), "bridge")
    assert found["train.global_batch_size"] == 12
    assert notes[1] == "without stretto, each step takes 12 samples: these settings have no ramp"
    # Their own ramp ends at the largest size, for which Bridge counts iterations.
    assert notes[2].startswith("with step_batch_size_schedule, schedules count 16 samples")
    found, _ = engine_settings(planned("0sp:8 408sp:16"), "bridge")
    assert found["train.global_batch_size"] == 12


def test_what_the_plan_does_not_know_is_left_out() -> None:
    horizon = Horizon.endless("100ba")
    bare = plan(horizon, "0sp:8 160sp:16", world_size=2, micro_batch_size=2)
    found, notes = engine_settings(bare, "megatron")
    assert not {"--lr", "--weight-decay", "--seq-length"} & set(found)
    assert moved(notes) == []


def test_values_of_the_users_own_are_not_said_to_move() -> None:
    """Megatron has no schedules for them."""
    own = {"mtp_weight": Linear(1, 0)}
    curves: list[Any] = [WSD("20ba", warmup="10ba"), 1.0]
    engines: list[Any] = ["megatron", "bridge"]
    for engine in engines:
        for curve in curves:
            alone = engine_settings(planned(schedules={"lr": curve}), engine)
            assert engine_settings(planned(schedules={"lr": curve}, values=own), engine) == alone


def test_a_constant_rate_is_not_said_to_end() -> None:
    notes = engine_settings(planned(schedules={"lr": 1.0}), "megatron")[1]
    assert moved(notes) == []


def test_other_schedules_are_told_in_the_words_of_the_plan() -> None:
    falls = planned(schedules={"lr": Cosine(warmup="10ba")})
    assert moved(engine_settings(falls, "bridge")[1])[0] == (
        "lr warm-up ends and begins to fall at iteration 20 rather than 10"
    )
    whole = planned(schedules={"lr": Linear(1, 0)})
    assert moved(engine_settings(whole, "bridge")[1]) == ["lr ends at 0.0001 rather than 0"]


@pytest.mark.parametrize(
    ("engine", "changed", "match"),
    [
        ("bridge", {"sizes": "0sp:16 160sp:8"}, "shrink"),
        ("megatron", {"sizes": "0sp:16 160sp:8"}, "shrink"),
        ("automodel", {"sizes": "0sp:16 160sp:10"}, "10 samples: it is not a multiple of 4"),
        ("megatron", {"sizes": "0sp:8 160sp:16", "length": "1002sp"}, "multiple of 4"),
        ("megatron", {"micro_batch_size": None}, "write one, such as micro_batch_size=4"),
        ("bridge", {"sizes": 8, "length": "804sp"}, "grow, and max_duration='800sp'"),
        ("bridge", {"schedules": {"betas.0": 0.5}, "base": {}}, "betas.0"),
        ("automodel", {"schedules": {"lr@muon": 0.5}, "base": {}}, "lr@muon"),
        ("megatron", {"length": "1h", "schedules": {"lr": 1.0}}, "only the run knows"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    engine: Any, changed: dict[str, Any], match: str
) -> None:
    with pytest.raises(TrainingError, match=match):
        engine_settings(planned(**changed), engine)


class Model:
    """The part of Megatron's `OptimizerParamScheduler` that a WSD uses, written anew."""

    def __init__(self, optimizer: Any, **given: Any) -> None:
        self.optimizer, self.at = optimizer, 0
        self.warmup, self.end, self.decay = (
            given[name] for name in ("lr_warmup_steps", "lr_decay_steps", "wsd_decay_steps")
        )
        self.step(0)

    def step(self, increment: int) -> None:
        self.at += increment
        factor = min(1.0, self.at / self.warmup)
        if self.at > self.end - self.decay:
            factor = max(0.0, (self.end - self.at) / self.decay)
        self.optimizer.param_groups[0]["lr"] = PEAK * factor


def schedulers() -> list[Any]:
    """Return the model, and the class of each Megatron Core on the path, cut from its source."""
    found: list[Any] = [Model]
    for folder in sys.path:
        path = Path(folder) / "megatron" / "core" / "optimizer_param_scheduler.py"
        if path.is_file():
            line = "from megatron.core.utils import log_single_rank"
            source = path.read_text().replace(line, "log_single_rank = lambda *_: None")
            space = {"__name__": "optimizer_param_scheduler"}
            exec(compile(source, path, "exec"), space)
            found.append(space["OptimizerParamScheduler"])
    return found


SCHEDULERS = schedulers()


def rates(scheduler: Any, steps: Plan, warmup: int, decay: int, each: int) -> list[float]:
    """Return the rate of each iteration, and after many more than the plan has."""
    count = steps.num_batches or 0
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])
    of = scheduler(
        optimizer=optimizer,
        init_lr=0.0,
        max_lr=PEAK,
        min_lr=0.0,
        lr_warmup_steps=warmup * each,
        lr_decay_steps=count * each,
        lr_decay_style="WSD",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=count * each,
        wd_incr_style="constant",
        wsd_decay_steps=decay * each,
        lr_wsd_decay_style="linear",
    )
    found = []
    for number in range(12 * count):
        found.append(optimizer.param_groups[0]["lr"])
        of.step(steps.sample_at_batch(number + 1) - steps.sample_at_batch(number))
    return found


def numbers(text: str, pattern: str) -> tuple[str, ...]:
    """Return the numbers in a note; none if it says nothing of it."""
    found = re.search(pattern, text)
    return () if found is None else tuple(one.replace(",", "") for one in found.groups())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_iterations_are_those_of_their_scheduler(data: st.DataObject) -> None:
    draw = data.draw
    warmup, decay = draw(st.integers(3, 12)), draw(st.integers(3, 12))
    count = warmup + decay + draw(st.integers(1, 20))
    sizes = sorted(
        {UNIT * one for one in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))}
    )
    apart = [draw(st.integers(1, 120)) for _ in sizes[1:]]
    at = [sum(apart[:number]) for number in range(len(sizes))]
    text = " ".join(f"{sample}sp:{size}" for sample, size in zip(at, sizes, strict=True))
    schedules = {"lr": WSD(f"{decay}ba", warmup=f"{warmup}ba", end=0)}
    steps = planned(text, f"{count}ba", schedules=schedules)
    largest = max(stage.size for stage in steps.stages)
    for engine, each in (("megatron", UNIT), ("bridge", largest)):
        if len(steps.stages) == 1 or {stage.size for stage in steps.stages} == {largest}:
            assert "without" not in str(engine_settings(steps, engine)[1])  # type: ignore[arg-type]
            continue
        said = "; ".join(engine_settings(steps, engine)[1])  # type: ignore[arg-type]
        for scheduler in SCHEDULERS:
            theirs = rates(scheduler, steps, warmup, decay, each)
            full = next((i for i, rate in enumerate(theirs) if rate >= PEAK * (1 - 1e-9)), None)
            if full is None:
                continue  # one step jumps over the whole peak
            below = next(i for i, rate in enumerate(theirs) if i > full and rate < PEAK)
            over = next(i for i, rate in enumerate(theirs) if i > full and rate == 0)
            words = r"warm-up ends at iteration ([\d,]+) rather than ([\d,]+)"
            assert numbers(said, words) == (str(full), str(warmup))
            words = r"begins to fall at iteration ([\d,]+) rather than ([\d,]+)"
            assert numbers(said, words) == (str(below), str(count - decay + 1))
            if over < count:
                words = r"schedules end at iteration ([\d,]+) rather than ([\d,]+)"
                assert numbers(said, words) == (str(over), str(count))
            else:
                (last,) = numbers(said, r"lr ends at ([\d.e-]+) rather than 0") or ("0",)
                # The plan's rate at the last whole iteration that they have passed.
                step = PEAK * max(1 / decay, 1 / warmup)
                assert float(last) - step <= theirs[count] <= float(last) + step
