"""Seconds to a loss of a tiny GPT: `NoiseScale(c="time")` and advice, against constant batch sizes.

Every run is one of `fastest_gpt_runs`, by `Trainer` on a made clock. A step of B samples takes
`a / b + B`. Each constant size, and the policy at each price, has its learning rate and warm-up
tuned by the same nine runs on a seed that serves for nothing else. Fresh seeds are then run with
the setting that was best for each loss. A constant needs no clock: from steps and samples to a
loss, its time at every price follows.

The noise is averaged over 20 steps. With 100, the default until this study showed it to be late,
the policy was within 1.10 in 12 of 18 on seeds 0 to 4, tuned on 100: mean 1.049, worst 1.403.

Each run is a line of `bench/results/fastest_gpt.jsonl`: start the command again, and it goes on.

    python bench/fastest_gpt.py             # everything, about an hour on one core
    python bench/fastest_gpt.py policy-32   # the runs of one side, beside other processes
    python bench/fastest_gpt.py --report    # the table of what there is
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import torch
from fastest_gpt_runs import LOSSES, Setting, train

from stretto import NoiseScale
from stretto.batching.noise_scale import student
from stretto.report import read_advice
from stretto.training.algorithms import NoiseReport

RESULTS = Path(__file__).parent / "results"
RUNS = RESULTS / "fastest_gpt.jsonl"
SIZES = (8, 16, 32, 64, 128, 256, 512)
PRICES = (2, 8, 32, 128, 512, 2048)
"""`a / b`, in samples."""
RATES = (1.6e-2, 8e-3, 4e-3)
WARMUPS = (12_000, 4_000, 24_000)
SETTINGS = tuple(Setting(rate, warmup) for rate in RATES for warmup in WARMUPS)
BEHIND = dict(zip(LOSSES, (1.7, 1.3, 1.1), strict=True))
"""A run that takes so many times as long as the best to a loss is not tuned further."""
LOGGED, MICRO_BATCH = 64, 16
"""The run whose log gives the advice."""
ADVISED_SEED = 5
TUNING_SEED, SEEDS = 101, tuple(range(5, 10))


class Arm(NamedTuple):
    """One side: a constant size, or the policy at a price."""

    kind: str
    value: int

    def policy(self, c: float | Literal["time"] = "time") -> NoiseScale | int:
        """Return the batch size as `Trainer` takes it."""
        if self.kind == "constant":
            return self.value
        return NoiseScale(16, 512, c=c, power=0.5, minimum=8)

    def __str__(self) -> str:
        return f"{self.kind}-{self.value}"

    @property
    def ratio(self) -> int:
        """The price by which settings are compared; for a constant size, any."""
        return 0 if self.kind == "constant" else self.value

    def time(self, steps: float, samples: float, price: float | None = None) -> float:
        """Return the time of so many steps, in that of a sample."""
        return (self.ratio if price is None else price) * steps + samples


CONSTANTS = tuple(Arm("constant", size) for size in SIZES)
POLICIES = tuple(Arm("policy", price) for price in PRICES)
ARMS = (*CONSTANTS, *POLICIES)


class Key(NamedTuple):
    """What tells one run from the others."""

    arm: Arm
    setting: Setting
    seed: int


Found = dict[Key, dict[str, Any]]


def load() -> Found:
    """Return the runs that are done."""
    lines = RUNS.read_text().splitlines() if RUNS.exists() else []
    rows = map(json.loads, lines)
    return {Key(Arm(*row["arm"]), Setting(*row["setting"]), row["seed"]): row for row in rows}


def add(found: Found, key: Key, policy: NoiseScale | int, **options: Any) -> None:
    """Train a run, and keep its result."""
    ratio = max(key.arm.ratio, 1)
    result = train(policy, key.setting, seed=key.seed, ratio=ratio, **options)
    keep(found, key, {**options, **result})


def keep(found: Found, key: Key, row: Mapping[str, Any]) -> None:
    """Write a line."""
    found[key] = {**key._asdict(), **row}
    with RUNS.open("a") as file:
        file.write(json.dumps(found[key]) + "\n")
    print(key.arm, *key.setting, key.seed, row.get("reached", row), flush=True)


def time_of(found: Found, key: Key, loss: float, price: float | None = None) -> float:
    """Return the time of a run to a loss; infinity if it did not get there."""
    at = found.get(key, {}).get("reached", {}).get(str(loss))
    if at is None:
        return math.inf
    steps, samples = at
    return key.arm.time(steps, samples, price)


def tuned(found: Found, arm: Arm) -> dict[float, Setting]:
    """Return the best setting for each loss that was reached, by the tuning seed."""
    best: dict[float, Setting] = {}
    for loss in LOSSES:
        times = {one: time_of(found, Key(arm, one, TUNING_SEED), loss) for one in SETTINGS}
        if min(times.values()) < math.inf:
            best[loss] = min(times, key=times.__getitem__)
    return best


def tune(found: Found, arm: Arm, setting: Setting) -> None:
    """Try a setting; a run ends when it is too far behind the best one so far."""
    key = Key(arm, setting, TUNING_SEED)
    if key not in found:
        others = [Key(arm, one, TUNING_SEED) for one in SETTINGS]
        # The clock of a constant size has a ratio of 1.
        best = {
            loss: min(time_of(found, one, loss, max(arm.ratio, 1)) for one in others)
            for loss in LOSSES
        }
        late = {loss: BEHIND[loss] * one for loss, one in best.items() if one < math.inf}
        # The same number as measuring again would give, within some percent, and half the work.
        first = found.get(Key(arm, SETTINGS[0], TUNING_SEED), {})
        c: float | Literal["time"] = first.get("c") or "time"
        add(found, key, arm.policy(c), most=late)


def confirm(found: Found, arm: Arm, seed: int) -> None:
    """Run a fresh seed with the setting of each loss."""
    chosen = tuned(found, arm)
    for setting in dict.fromkeys(chosen.values()):
        if Key(arm, setting, seed) not in found:
            until = min(loss for loss, one in chosen.items() if one == setting)
            add(found, Key(arm, setting, seed), arm.policy(), until=until)


def advise(found: Found, price: int, loss: float, seed: int) -> None:
    """Keep what the log of a run with batches of 64 advises, at the moment it reaches a loss."""
    setting = tuned(found, Arm("constant", LOGGED))[loss]
    key = Key(Arm(f"advice at {loss}", price), setting, seed)
    if key in found:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        options: dict[str, Any] = {"micro_batch_size": MICRO_BATCH, "callbacks": (NoiseReport(),)}
        train(LOGGED, setting, seed=seed, ratio=price, until=loss, folder=folder, **options)
        advice = read_advice(folder)
    assert advice.cost is not None, "steps of one size"
    assert advice.noise is not None, "it is reported"
    line = advice.cost.line
    row = {
        "size": advice.best(advice.noise[0]) if advice.is_known else None,
        "noise": advice.noise,
        "ratio": line and line.a / line.b,
        "interval": line and line.interval,
        "unknown": advice.cost.unknown,
    }
    keep(found, key, row)


def best_constant(found: Found, price: int, loss: float) -> Arm:
    """Return the constant size that took the least time, in the mean over fresh seeds."""
    return min(CONSTANTS, key=lambda one: fmean(times_of(found, one, loss, price)))


def times_of(found: Found, arm: Arm, loss: float, price: float) -> list[float]:
    """Return the time of each fresh seed, with the setting that was tuned."""
    setting = tuned(found, arm).get(loss, SETTINGS[0])
    return [time_of(found, Key(arm, setting, seed), loss, price) for seed in SEEDS]


def between(times: Mapping[int, float], size: int) -> float:
    """Return the time of a size, along the line of logarithms between its neighbours."""
    low = max((one for one in times if one <= size), default=min(times))
    high = min((one for one in times if one >= size), default=max(times))
    if low >= high:
        return times[low]
    part = math.log(size / low) / math.log(high / low)
    return math.exp((1 - part) * math.log(times[low]) + part * math.log(times[high]))


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios and its 95 percent interval."""
    logs = [math.log(one) for one in ratios]
    reach = student(0.95, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(fmean(logs)), math.exp(fmean(logs) - reach), math.exp(fmean(logs) + reach)


def compared(found: Found, price: int, loss: float) -> dict[str, Any]:
    """Return how the policy and the advice did at a price and a loss."""
    own = {one.value: times_of(found, one, loss, price) for one in CONSTANTS}
    means = {size: fmean(times) for size, times in own.items()}
    best = best_constant(found, price, loss).value
    policy = Arm("policy", price)
    times = times_of(found, policy, loss, price)
    runs = [found[Key(policy, tuned(found, policy)[loss], seed)] for seed in SEEDS]
    measuring = fmean(run["measuring"] for run in runs)
    advice = Arm(f"advice at {loss}", price), ADVISED_SEED
    rows = [row for key, row in found.items() if (key.arm, key.seed) == advice]
    worth = [between(means, row["size"]) / means[best] for row in rows if row["size"]]
    ratio, low, high = interval([a / b for a, b in zip(times, own[best], strict=True)])
    return {
        "loss": loss,
        "a / b": price,
        **{f"{size}": means[size] / means[best] for size in SIZES},
        "policy": ratio,
        "from": low,
        "to": high,
        "+measured": (fmean(times) + measuring) / means[best],
        "c / true": fmean(run["c"] for run in runs) / math.sqrt(price),
        "noise": fmean(row["noise"][0] for row in rows),
        "advised": fmean(row["size"] or math.nan for row in rows),
        "advice": fmean(worth) if len(worth) == len(rows) else math.nan,
    }


def fitted(found: Found, loss: float) -> str:
    """Return how well the steps of the constant sizes fit `S (1 + N / B)`."""
    steps = {one.value: fmean(times_of(found, one, loss, 1)) / (1 + one.value) for one in CONSTANTS}

    def off(noise: float) -> tuple[float, float, float]:
        least = fmean(found / (1 + noise / size) for size, found in steps.items())
        errors = (least * (1 + noise / size) / found - 1 for size, found in steps.items())
        return math.sqrt(fmean(one * one for one in errors)), noise, least

    error, noise, least = min(off(2 ** (part / 16)) for part in range(200))
    return f"steps to {loss} fit {least:.0f} (1 + {noise:.0f} / B) with {error:.1%} rms"


def report(found: Found) -> str:
    """Return the results as text."""
    rows = [compared(found, price, loss) for loss in LOSSES for price in PRICES]
    lines = [
        (
            "Mean time to a loss over that of the best constant size: of constants, of the policy "
            "with its 95 percent interval, and of the advised size (between its neighbours)."
        ),
        " ".join(f"{head:>9}" for head in rows[0]),
    ]
    lines += [" ".join(f"{cell:9.4g}" for cell in row.values()) for row in rows]
    policy, high, advice = ([row[name] for row in rows] for name in ("policy", "to", "advice"))
    lines += [
        (
            f"policy: mean {math.exp(fmean(map(math.log, policy))):.3f}, worst {max(policy):.3f} "
            f"of the best constant; upper end of the interval {max(high):.3f} at most; "
            f"within 1.10 in {sum(one <= 1.1 for one in policy)} of {len(rows)}, "
            f"the upper end within 1.20 in {sum(one <= 1.2 for one in high)}"
        ),
        (
            f"advice: within 10 percent of the best constant in "
            f"{sum(one <= 1.1 for one in advice)} of {len(rows)}, worst {max(advice):.3f}"
        ),
        "left out of the times: +measured is with what measuring c takes, once a run",
        *(fitted(found, loss) for loss in LOSSES),
        "settings, as rate and warm-up, for each loss:",
    ]
    for arm in ARMS:
        chosen = (f"{rate:g} {warmup:,}" for rate, warmup in tuned(found, arm).values())
        lines.append(f"{arm.kind:>9} {arm.value:5} " + "; ".join(chosen))
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, and write the table."""
    torch.set_num_threads(1)
    found = load()
    arms = [one for one in ARMS if str(one) in sys.argv] or ARMS
    if "--report" not in sys.argv:
        for setting, arm in itertools.product(SETTINGS, arms):
            tune(found, arm, setting)
        for seed, arm in itertools.product(SEEDS, arms):
            confirm(found, arm, seed)
    if len(arms) < len(ARMS):
        return
    if "--report" not in sys.argv:
        for price, loss in itertools.product(PRICES, LOSSES):
            advise(found, price, loss, ADVISED_SEED)
    text = report(found)
    print(text)
    (RESULTS / "fastest_gpt.txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
