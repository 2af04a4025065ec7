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
