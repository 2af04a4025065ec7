"""Batch sizes that follow the gradient against constant ones: loss, steps and samples.

Run `python bench/study.py`. A byte-level GPT (2 layers, width 64, 64 bytes of context) learns the
packaged text from 4 million bytes, once with each side of `study_arms.py`. Every side has its
learning rate and its warm-up tuned by the same search, on three seeds that serve for nothing else;
then it is trained with 10 others: about 30 runs a side of a minute or two on one core.

Each result is a line of `bench/results/study.jsonl`, written when it is there: start the command
again, and it goes on; `--runs 10` stops after ten. `--report` writes the table `study.txt` and the
picture `study.png` of what there is. `--quick` runs a hundredth of it and saves nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import processor
from study_arms import ARMS, LENGTH, RATES, START, WARMUPS, Setting, train
from study_report import picture, table

RESULTS = Path(__file__).parent / "results"
NUM_SAMPLES = 62_500
TUNING_SEED = 100
FURTHER_TUNING_SEEDS = (101, 102)
NEAR = 0.03
"""Within so much of the best a setting has a say in which one is chosen."""
LEAST_RUNS = 12
FINALISTS = 3
"""How many settings of a side are tried with those: neighbours differ by less than seeds do."""
TUNING_SEEDS = (TUNING_SEED, *FURTHER_TUNING_SEEDS)
SEEDS = tuple(range(10))
QUICK = ("constant-16", "warmup-seesaw", "noise-from-16-0.6")


STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1), (1, 1), (-1, -1), (2, 0), (-2, 0), (1, 2))
"""Where the search looks around the best setting, in positions of the grid, in this order. Without
the last one it stopped at constant 16 where 0.01 of loss were still to be had."""


class Key(NamedTuple):
    """What tells one run from the others."""

    arm: str
    setting: Setting
    seed: int

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Key:
        """Return the key of a result."""
        return cls(result["arm"], Setting(*result["setting"]), result["seed"])


Losses = Mapping[Key, float]


def next_setting(
    losses: Mapping[Setting, float], start: Setting = START, leading: Setting | None = None
) -> Setting | None:
    """Return what to try next: the start, then the neighbours of the best; None: none is left.

    Neighbours are the four in the grid, the learning rates next to those (one seed alone is off by
    about as much as neighbours differ), and a higher one with a longer warm-up or a much longer
    one, or a lower one with a shorter: those go together. Those of the setting that leads with all
    tuning seeds come after those of the best with the first.

    >>> next_setting({}), next_setting({Setting(): 1.5})
    (Setting(rate=4, warmup=2), Setting(rate=3, warmup=2))
    """
    if not losses:
        return start
    best = min(losses, key=losses.__getitem__)
    for middle in (best, leading or best):
        for rate, warmup in STEPS:
            near = Setting(middle.rate + rate, middle.warmup + warmup)
            exists = 0 <= near.rate < len(RATES) and 0 <= near.warmup < len(WARMUPS)
            if exists and near not in losses:
                return near
    return None


def tuning(arm: str, losses: Losses) -> dict[Setting, float]:
    """Return the losses of the settings of a side that were tried with the first seed."""
    return {
        key.setting: loss
        for key, loss in losses.items()
        if (key.arm, key.seed) == (arm, TUNING_SEED)
    }


def leading(arm: str, losses: Losses) -> Setting | None:
    """Return the setting with the least mean over all tuning seeds; None where none has them."""
    means = {
        setting: sum(losses[Key(arm, setting, seed)] for seed in TUNING_SEEDS)
        for setting in tuning(arm, losses)
        if all(Key(arm, setting, seed) in losses for seed in TUNING_SEEDS)
    }
    return min(means, key=means.__getitem__) if means else None


def to_try(arm: str, losses: Losses) -> Setting | None:
    """Return the setting of a side to try next with the first seed; None: none is left."""
    return next_setting(tuning(arm, losses), ARMS[arm].start, leading(arm, losses))


def finalists(arm: str, losses: Losses) -> list[Setting]:
    """Return the settings for the further seeds, best first; none while the search goes on."""
    tried = tuning(arm, losses)
    return [] if to_try(arm, losses) else sorted(tried, key=tried.__getitem__)[:FINALISTS]


def is_tuned(arm: str, losses: Losses) -> bool:
    """Return whether no setting near the leading one is left to be tried."""
    chosen = finalists(arm, losses)
    return bool(chosen) and all(
        Key(arm, setting, seed) in losses for setting in chosen for seed in TUNING_SEEDS
    )


def chosen(arm: str, losses: Losses) -> Setting | None:
    """Return the setting of a side that all its tuning runs together speak for; None: too few.

    Of those that were tried the one where a quadratic of the two logarithms, rate and warm-up, with
    a constant for each seed is least, fitted to the runs within `NEAR` of the best (a response
    surface; Box and Wilson 1951, "On the experimental attainment of optimum conditions"). Seeds
    differ by more than neighbours do, so the least of 20 means of three is the luckiest one.
    """
    runs = {
        key: loss for key, loss in losses.items() if key.arm == arm and key.seed in TUNING_SEEDS
    }
    near = {key: loss for key, loss in runs.items() if loss < min(runs.values()) + NEAR}
    if len(near) < LEAST_RUNS:
        return None
    seeds = sorted({key.seed for key in near})
    rows = [[*_surface(key.setting), *(float(key.seed == seed) for seed in seeds)] for key in near]
    factors = torch.linalg.lstsq(
        torch.tensor(rows, dtype=torch.float64),
        torch.tensor([*near.values()], dtype=torch.float64)[:, None],
        driver="gelsd",  # which takes what the runs do not tell for zero
    ).solution[:, 0]
    return min(
        {key.setting: None for key in near},
        key=lambda setting: sum(
            factor * term for factor, term in zip(factors.tolist(), _surface(setting), strict=False)
        ),
    )


def _surface(setting: Setting) -> tuple[float, ...]:
    """The terms of a quadratic around the middle of the grid, without a constant."""
    rate = math.log2(RATES[setting.rate]) - 2
    warmup = math.log2(WARMUPS[setting.warmup]) + 1.5
    return rate, warmup, rate * rate, rate * warmup, warmup * warmup


def best_so_far(arm: str, losses: Losses) -> Setting:
    """Return the setting that is chosen; else the best with the first seed; else the start."""
    tried = tuning(arm, losses)
    return chosen(arm, losses) or min(tried, key=tried.__getitem__, default=ARMS[arm].start)


def wanted(arms: Sequence[str], seeds: Sequence[int], losses: Losses) -> Iterator[Key]:
    """Yield the runs that are missing and can be done now, a turn of each side."""
    # The side with the fewest runs first, so that all are about as far.
    for arm in sorted(arms, key=lambda arm: len(tuning(arm, losses))):
        setting = to_try(arm, losses)
        if setting is not None:
            yield Key(arm, setting, TUNING_SEED)
    for seed in FURTHER_TUNING_SEEDS:
        for arm in arms:
            for setting in finalists(arm, losses):
                key = Key(arm, setting, seed)
                if key not in losses:
                    yield key
    for seed in seeds:
        for arm in arms:
            best = chosen(arm, losses)
            if best and is_tuned(arm, losses) and Key(arm, best, seed) not in losses:
                yield Key(arm, best, seed)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results there are; a line that a stopped run left unfinished is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run(
    path: Path,
    arms: Sequence[str],
    seeds: Sequence[int],
    *,
    num_samples: int,
    most: int,
    every: str = "5%",
    compiled: bool = True,
) -> None:
    """Train up to `most` runs, and append each result to `path`."""
    for _ in range(most):
        losses = {Key.of(result): result["loss"] for result in read(path)}
        key = next(wanted(arms, seeds, losses), None)
        if key is None:
            return
        found = train(
            key.arm,
            key.setting,
            seed=key.seed,
            num_samples=num_samples,
            measure_every=every,
            compiled=compiled,
        )
        result = {**key._asdict(), "tokens": num_samples * LENGTH, **found, **machine()}
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(
            f"{key.arm:14s} seed {key.seed:3d}  learning rate {found['learning_rate']:.2g}, "
            f"warm-up {found['warmup']:.0%}: {found['loss']:.4f} after {found['steps']:,} steps "
            f"({found['seconds']:.0f} s)",
            flush=True,
        )


def machine() -> dict[str, Any]:
    """Return what it ran on."""
    return {
        "torch": torch.__version__,
        "processor": processor(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def report(path: Path, folder: Path) -> str:
    """Write the table and the picture of all results, and return the table."""
    results = read(path)
    losses = {Key.of(result): result["loss"] for result in results}
    best = {arm: best_so_far(arm, losses) if is_tuned(arm, losses) else None for arm in ARMS}
    final = final_runs(results)
    tried = [result for result in results if result["seed"] in TUNING_SEEDS]
    text = table(final, tried, best, used_before(results, final))
    (folder / "study.txt").write_text(text)
    picture(final, folder / "study.png")
    return text


def final_runs(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the runs of each side's best setting with the seeds that were not tuned on."""
    losses = {Key.of(result): result["loss"] for result in results}
    shown = {arm: best_so_far(arm, losses) for arm in ARMS}
    return [
        result
        for result in results
        if result["seed"] not in TUNING_SEEDS
        and Setting(*result["setting"]) == shown.get(result["arm"])
    ]


def used_before(
    results: Sequence[Mapping[str, Any]], final: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """Return with how many of its final seeds each side was run in other settings, too."""
    shown = {(run["arm"], run["seed"]) for run in final}
    others = {
        (run["arm"], run["seed"])
        for run in results
        if (run["arm"], run["seed"]) in shown and run not in final
    }
    return Counter(arm for arm, _ in others)


def main() -> None:
    """Train what is missing, and report."""
    parser = argparse.ArgumentParser(description="batch sizes that follow the gradient, or do not")
    parser.add_argument("--quick", action="store_true", help="a minute, and nothing is saved")
    parser.add_argument("--runs", type=int, default=10**6, help="stop after so many")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="only these sides")
    parser.add_argument("--report", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "study.jsonl"
            arms = arguments.arms or QUICK
            run(
                path,
                arms,
                (0, 1),
                num_samples=640,
                most=arguments.runs,
                every="50%",
                compiled=False,
            )
            print(report(path, Path(name)))
        return
    os.nice(19 - os.nice(0))
    path = RESULTS / "study.jsonl"
    if not arguments.report:
        arms = arguments.arms or list(ARMS)
        run(path, arms, SEEDS, num_samples=NUM_SAMPLES, most=arguments.runs)
    print(report(path, RESULTS))


if __name__ == "__main__":
    main()
