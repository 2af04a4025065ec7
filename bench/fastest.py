"""How long a run takes that follows the noise with a measured `c`, against constant batch sizes.

The model of McCandlish et al. 2018 (arXiv 1812.06162, section 2.2) is taken as true: a step of B
samples makes `1 / (1 + N / B)` of progress, and takes `a + b * B` seconds. The noise scale N grows
by a factor over the run. The policy sees noisy gradients; its `c` comes from `measured` on a clock
with jitter of 5 percent, 1 percent of steps 10 times as slow, and a slow start. The best constant
size is that of the closed form, which nobody knows before the run.

    python bench/fastest.py [SEEDS]
    python bench/fastest.py --overhead    # microseconds that measuring adds to a step of a run
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from stretto import Horizon, NoiseScale, Timestamp
from stretto.batching import Bound, Signals
from stretto.batching.step_cost import ladder, measured
from stretto.training.further import Further
from stretto.training.logs.recorder import Throughput

RESULTS = Path(__file__).parent / "results"
LEAST_STEPS, FIRST_NOISE = 1_600, 32.0
"""Steps that the run would take without noise, and the noise scale at its start."""
LEAST, START, MOST = 4, 16, 8192
GROUPS, DIRECTIONS = 4, 64
RATIOS = (0.5, 4, 32, 256, 2048)
"""`a / b`, in samples."""
GROWTHS = (1, 8, 64)
STATED = 3.8
"""A `c` from another machine."""


@dataclass(frozen=True)
class World:
    """What a run is like: the price of a step and how the noise grows."""

    ratio: float
    growth: float

    def constant(self, size: float) -> float:
        """Seconds of a run with a constant size, in those of a sample."""
        mean = FIRST_NOISE
        if self.growth > 1:
            mean *= (self.growth - 1) / math.log(self.growth)
        return LEAST_STEPS * (1 + mean / size) * (self.ratio + size)

    @property
    def best(self) -> tuple[float, float]:
        """The least seconds of a constant size, and that size."""
        return min((self.constant(one), one) for one in (4 * 2 ** (k / 4) for k in range(45)))

    @property
    def least(self) -> float:
        """The seconds of a run that always has the best size."""
        done = (np.arange(20_000) + 0.5) / 20_000
        noise = FIRST_NOISE * self.growth**done
        size = np.clip(np.sqrt(noise * self.ratio), LEAST, MOST)
        return float(LEAST_STEPS * np.mean((1 + noise / size) * (self.ratio + size)))

    def clock(self, seed: int) -> Callable[[int], float]:
        """Return the seconds of a step as a machine shows them."""
        chance, count = random.Random(seed), 0

        def seconds_of(size: int) -> float:
            nonlocal count
            count += 1
            seconds = (self.ratio + size) * math.exp(0.05 * chance.gauss(0, 1))
            return seconds * (20 if count <= 5 else 1) * (10 if chance.random() < 0.01 else 1)

        return seconds_of

    def run(self, bound: Bound, seed: int, cost_ratio: float | None) -> float:
        """Return the seconds of a run of a policy."""
        chance = np.random.default_rng(seed)
        state, signals = bound.start, Signals(cost_ratio=cost_ratio)
        done = seconds = 0.0
        batch = samples = 0
        while done < LEAST_STEPS:
            at = Timestamp(batch=batch, sample=samples)
            size, state = bound.decide(at, state, signals)
            noise = FIRST_NOISE * self.growth ** (done / LEAST_STEPS)
            done += 1 / (1 + noise / size)
            seconds += self.ratio + size
            batch, samples = batch + 1, samples + size
            signals = _measured(chance, noise, size)
        return seconds


def _measured(chance: np.random.Generator, noise: float, size: int) -> Signals:
    """Return unbiased terms of a step whose gradient is 1 long, from groups of its samples."""
    spread = math.sqrt(noise / DIRECTIONS / (size / GROUPS))
    gradients = chance.standard_normal((GROUPS, DIRECTIONS)) * spread
    gradients[:, 0] += 1.0
    mean = gradients.mean(0)
    whole = float(mean @ mean)
    variance = (float((gradients**2).sum(1).mean()) - whole) * size / (GROUPS - 1)
    return Signals(
        noise_numerator=variance, noise_denominator=whole - variance / size, num_samples=size
    )


def rows(seeds: int) -> Iterator[dict[str, float | list[float]]]:
    """Yield a row for each world: times over the best constant size."""
    for growth in GROWTHS:
        for ratio in RATIOS:
            world = World(ratio, growth)
            best, size = world.best
            found: dict[str, list[float]] = {
                name: [] for name in ("measured", "true", "stated", "c")
            }
            for seed in range(seeds):
                seen = measured(world.clock(seed), ladder(LEAST, MOST)).bounded_ratio()
                assert seen is not None, "this clock tells it"
                found["c"].append(math.sqrt(seen / ratio))
                for name, known in (("measured", seen), ("true", ratio), ("stated", STATED**2)):
                    bound = NoiseScale(START, MOST, c="time", minimum=LEAST).bind(Horizon("1ep"))
                    found[name].append(world.run(bound, seed, known) / best)
            yield {
                "a/b": ratio,
                "growth": growth,
                "best constant": round(size),
                "all known": world.least / best,
                "constant 16": world.constant(16) / best,
                "constant 256": world.constant(256) / best,
                **found,
            }


def table(found: list[dict[str, float | list[float]]]) -> str:
    """Return the results as text; of several seeds, the mean."""
    heads = list(found[0])
    lines = ["  ".join(f"{head:>13}" for head in heads)]
    for row in found:
        cells = (fmean(one) if isinstance(one, list) else one for one in row.values())
        lines.append("  ".join(f"{cell:13.5g}" for cell in cells))
    for name in ("measured", "true", "stated"):
        means = [fmean(row[name]) for row in found]  # type: ignore[arg-type]
        lines.append(
            f"{name}: mean {fmean(means):.3f}, worst {max(means):.3f} of the best constant"
        )
    return "\n".join(lines)


def overhead() -> float:
    """Return the microseconds of processor time that the seconds of steps add to each step."""
    further, throughput = Further(torch.device("cpu"), 1), Throughput(Timestamp())
    micro_batches, kinds = [None] * 4, set()

    def spent(work: Callable[[], object]) -> float:
        times = timeit.repeat(work, number=100_000, repeat=5, timer=time.process_time)
        return min(times) * 10

    nothing = spent(lambda: None)
    watched = spent(lambda: further.watched(7, 4, micro_batches)) - nothing  # type: ignore[arg-type]
    noted = spent(lambda: kinds.add((8, throughput.samples))) - nothing
    return watched + noted


def main() -> None:
    """Run the study and write its results."""
    if "--overhead" in sys.argv:
        print(f"{overhead():.2f} us a step")
        return
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    found = list(rows(seeds))
    text = table(found)
    print(text)
    (RESULTS / "fastest.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "fastest.txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
