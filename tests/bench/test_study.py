"""How the study of batch sizes chooses the setting of a side, where the truth is known."""

from __future__ import annotations

import importlib
import math
import random
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("study")


def truth(study: Any, setting: Any) -> float:
    """Least at a rate of 4 with a warm-up of 35 percent; the two go together."""
    rate = math.log2(study.RATES[setting.rate]) - 2
    warmup = math.log2(study.WARMUPS[setting.warmup] / 0.35)
    return 1.36 + 0.006 * rate**2 - 0.005 * rate * warmup + 0.004 * warmup**2


def search(study: Any, seed: int, spread: float) -> dict[Any, float]:
    """What all tuning runs of a side give, until nothing is left to be tried."""
    chance = random.Random(seed)
    losses: dict[Any, float] = {}
    while (key := next(study.wanted(["constant-16"], (), losses), None)) is not None:
        losses[key] = truth(study, key.setting) + chance.gauss(0, spread)
    return losses


def test_without_chance_the_best_is_found_and_chosen(study: Any) -> None:
    losses = search(study, 0, 0.0)
    best = study.Setting(8, 4)
    assert study.is_tuned("constant-16", losses)
    assert study.chosen("constant-16", losses) == study.leading("constant-16", losses) == best
    assert {key.seed for key in losses} == set(study.TUNING_SEEDS)


def test_a_fitted_surface_is_nearer_to_the_best_than_the_luckiest_mean(study: Any) -> None:
    lost = {"chosen": 0.0, "leading": 0.0}
    for seed in range(40):
        losses = search(study, seed, 0.005)
        for name in lost:
            lost[name] += truth(study, getattr(study, name)("constant-16", losses)) - 1.36
    assert lost["chosen"] < 0.8 * lost["leading"]


def test_with_few_runs_nothing_is_chosen(study: Any) -> None:
    losses = search(study, 0, 0.0)
    few = dict(list(losses.items())[: study.LEAST_RUNS - 1])
    assert study.chosen("constant-16", few) is None
    assert study.best_so_far("constant-16", few) == min(few, key=few.__getitem__).setting
    assert study.best_so_far("constant-16", {}) == study.START


def runs_of(arm: str, losses: dict[int, float]) -> list[dict[str, Any]]:
    return [{"arm": arm, "seed": seed, "loss": loss} for seed, loss in losses.items()]


def test_a_difference_has_a_paired_interval_of_95_percent(study: Any) -> None:
    """By hand: 1, 2 and 3 have the mean 2 and the standard error 0.57735; Student's t is 4.3027."""
    report = importlib.import_module("study_report")
    base = runs_of("constant-16", {0: 1.0, 1: 5.0, 2: 9.0, 7: 100.0})
    mean, lower, upper = report.difference(runs_of("seesaw", {0: 2.0, 1: 7.0, 2: 12.0}), base)
    assert (mean, lower, upper) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-4)
    assert report.difference(runs_of("seesaw", {2: 10.0}), base) == (1.0, -math.inf, math.inf)


def test_the_intervals_of_the_documentation_are_those_of_the_raw_file(study: Any) -> None:
    report = importlib.import_module("study_report")
    results = study.read(study.RESULTS / "study.jsonl")
    text = "".join((BENCH.parent / name).read_text() for name in ("README.md", "docs/noise.md"))
    text = " ".join(text.split())
    final = {
        arm: [run for run in study.final_runs(results) if run["arm"] == arm] for arm in study.ARMS
    }
    said = {"constant-24", "constant-32", "seesaw-from-18", "even-warmup-seesaw", "noise-from-18"}
    for arm, runs in final.items():
        if runs and arm != "constant-16":
            found = report.difference(runs, final["constant-16"])
            times = 2 if arm in said else 1  # on both pages, or on one
            ends = f"[{found.lower:+.4f}, {found.upper:+.4f}]"
            assert text.count(ends) >= times, (arm, ends)
    beside = report.difference(final["even-warmup-seesaw"], final["constant-32"])
    assert f"[{beside.lower:+.4f}, {beside.upper:+.4f}]" in text


def test_seeds_that_were_used_with_another_setting_are_counted(study: Any) -> None:
    first = {"arm": "a", "seed": 0, "setting": [1, 1]}
    final = [{"arm": "a", "seed": seed, "setting": [2, 1]} for seed in (0, 1)]
    assert study.used_before([first, *final], final) == {"a": 1}
