"""What batch size ends soonest: from the seconds of steps and the noise scale in a run's log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, final

from stretto.batching.noise_scale import LEAST_GAIN
from stretto.batching.step_cost import MOST_ROWS, StepCost, StepSeconds
from stretto.errors import DataError
from stretto.report.run import read_metrics
from stretto.run_folder import EVENTS, complete_text, parsed_event, reading_run

_FACTS = ("machine", "optimizer", "micro_batch_size")
"""Rows of attempts that differ in one of these are not compared."""
_NEAR = 1.05
_PARTS = 5
"""A plan has so many parts of the run, each with a size of its own."""
_READ = ("step_seconds", "sample_seconds", "noise_scale", "noise_scale_low", "noise_scale_high")
_MOST = 1e15
"""No size, noise scale or number of seconds is as large."""
_BEYOND = 4
"""A size beyond those that were measured is looked at up to this factor."""


@final
@dataclass(frozen=True, slots=True)
class Advice:
    """The size that ends soonest: seconds of a step times the steps, `T(B) * (1 + B_noise / B)`.

    The time is flat around its least: a size that is wrong by a factor r costs at most
    `(r + 1 / r - 2) / 4` more (McCandlish et al. 2018, arXiv 1812.06162, section 2.2).
    """

    cost: StepCost | None
    """The price of a step; None: no line has the seconds of steps of one size."""
    noise: tuple[float, float, float] | None
    """The noise scale over the last half, and its interval; None: it is not known."""
    now: int
    """The size at the end."""
    prices: Mapping[int, float]
    """The seconds of a step by size, for the sizes that are compared."""
    history: Sequence[tuple[float, float, float]] = ()
    """For each line: the part of the run, the noise scale, and how much progress was made."""
    optimizer: str = "this optimizer"
    lost_noise: tuple[float, float] | None = None
    """If the last line has no noise scale: the last one that is known, and its part of the run."""

    @property
    def is_known(self) -> bool:
        """Whether sizes can be compared."""
        return bool(self.prices) and self.noise is not None

    def best(self, noise: float) -> int:
        """Return the size that ends soonest at a noise scale."""
        return min(self.prices, key=lambda size: self._seconds(size, noise))

    def _seconds(self, size: int, noise: float) -> float:
        """Return the seconds of a unit of progress."""
        return self.prices[size] * (1 + noise / size)

    @property
    def plan(self) -> dict[str, int]:
        """The sizes by part of the run: one, unless following the noise saves 3 percent."""
        if self.noise is None or not self.prices:
            return {}
        found = {"0%": self.best(self.noise[0])}
        if self.gain < LEAST_GAIN:
            return found
        for part in range(_PARTS):
            own = [noise for at, noise, _ in self.history if int(at * _PARTS) == part]
            size = self.best(median(own)) if own else found[max(found)]
            if part == 0 or size != found[max(found)]:
                found[f"{100 * part // _PARTS}%"] = size
        return found

    @property
    def policy(self) -> str:
        """The sizes of the plan as a run file and `Trainer` read them."""
        return " ".join(f"{at}:{size}" for at, size in self.plan.items())

    @property
    def gain(self) -> float:
        """The part of the time that the best size at each moment saves over the best constant."""
        least = sum(done * self._seconds(self.best(one), one) for _, one, done in self.history)
        each = (
            sum(done * self._seconds(size, one) for _, one, done in self.history)
            for size in self.prices
        )
        return 1 - least / min(each) if least else 0.0

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        why = "no two lines of the log follow steps of one size"
        yield f"not known: the seconds of a step; {why}" if self.cost is None else str(self.cost)
        if self.lost_noise is not None:
            scale, at = self.lost_noise
            yield f"not known: the noise scale after {at:.0%} of the run, where it was {scale:.3g}"
        elif self.noise is None:
            yield "not known: the noise scale; NoiseReport, or following NoiseScale, measures it"
        if self.noise is not None:
            scale, low, high = self.noise
            where = f"noise scale {low:.3g} to {high:.3g} over the last half"
            yield f"steps to the same progress fall like 1 + {scale:.3g}/B ({where})"
            if self.prices:
                yield from self._compared(scale, low, high)
        if self.cost is None or self.cost.unknown is not None:
            yield "stretto step-cost RUN.YAML measures several sizes"

    def _compared(self, scale: float, low: float, high: float) -> Iterator[str]:
        best, least = self.best(scale), self._seconds(self.best(scale), scale)
        ratio, *ends = (
            self._seconds(self.now, one) / self._seconds(best, one) for one in (scale, low, high)
        )
        assert self.cost is not None, "known"
        assumed = self.cost.bounded_ratio()
        if self.cost.unknown is not None and assumed is not None:
            yield f"compared with a / b = {assumed:.3g} samples, the limit of what was measured"
        yield f"batch {self.now:,}  now"
        if ratio > 1 + LEAST_GAIN:
            times = f"{ratio:.2g} ({min(*ends):.2g} to {max(*ends):.2g}) times as fast"
            yield f"batch {best:,}  about {times} to the same loss, if the learning rate follows"
        else:
            yield "no other size is 3 percent faster"
        near = [size for size in self.prices if self._seconds(size, scale) <= _NEAR * least]
        span = f"any size from {min(near):,} to {max(near):,} is within 5 percent of the best"
        yield f"{span}; following the noise would bring {self.gain:.0%} more"
        is_cut = any(row.sample_seconds for row in self.cost.rows)  # more passes fit
        if not (is_cut or min(self.cost.sizes) <= best <= max(self.cost.sizes)):
            yield f"not known: whether {best:,} fits into memory; it is beyond the measured sizes"
        yield f"not known: whether the noise scale is the right one for {self.optimizer}"


def advice_lines(folder: Path) -> list[str]:
    """Return what the logs of a run say of sizes; none if they do not tell, or are damaged."""
    with suppress(DataError), reading_run(folder):
        advice = read_advice(folder)
        return str(advice).splitlines() if advice.is_known else []
    return []


def read_advice(folder: Path) -> Advice:
    """Return what the logs of a run say; lines without a size or a sound time are left out.

    Raises:
        DataError: there are no metrics, or a line is not valid.
    """
    training = [
        line
        for line in read_metrics(folder).training
        if 1 <= line.get("batch_size", 0) < _MOST
        and all(not abs(line.get(name, 0)) >= _MOST for name in _READ)
    ]
    if not training:
        return Advice(None, None, 0, {})
    events = [one for one in map(parsed_event, complete_text(folder / EVENTS).splitlines()) if one]
    facts, since = _last_machine(events)
    lines = [line for line in training if line["ba"] > since]
    last = lines[-1] if lines else training[-1]
    if facts.get("micro_batch_size") is not None:
        lines = [
            one for one in lines if one.get("micro_batch_size") == last.get("micro_batch_size")
        ]
    rows = [
        StepSeconds(int(one["batch_size"]), one["step_seconds"], one.get("sample_seconds"))
        for one in lines
        if one.get("step_seconds", 0) > 0
    ]
    cost, now = StepCost(rows[-MOST_ROWS:]) if rows else None, int(last["batch_size"])
    noisy = [one for one in training if one.get("noise_scale", 0) > 0]
    half = [one for one in noisy if one["sp"] >= last["sp"] / 2]
    names = ("noise_scale", "noise_scale_low", "noise_scale_high")
    scale = [median([one.get(name, one["noise_scale"]) for one in half]) for name in names if half]
    ends = [one["ba"] for one in training]
    before = dict(zip(ends, [0.0, *ends], strict=False))
    return Advice(
        cost,
        (scale[0], scale[1], scale[2]) if scale else None,
        now,
        {} if cost is None else _prices(cost, now),
        [
            (
                one["dur"],
                one["noise_scale"],
                (one["ba"] - before[one["ba"]]) / (1 + one["noise_scale"] / one["batch_size"]),
            )
            for one in noisy
        ],
        str(facts.get("optimizer", "this optimizer")),
        lost_noise=(noisy[-1]["noise_scale"], noisy[-1]["dur"])
        if noisy and noisy[-1] is not training[-1]
        else None,
    )


def _prices(cost: StepCost, now: int) -> dict[int, float]:
    """Return the seconds of a step by size; none if they do not tell what a sample costs."""
    known = cost.sizes
    if cost.bounded_ratio() is None:
        return known if len(known) > 1 and now in known else {}
    least, most = max(1, min(known) // _BEYOND), max(known) * _BEYOND
    steps = {round(least * 2 ** (part / 8)) for part in range(8 * (most // least).bit_length())}
    return {size: cost.seconds(size) for size in sorted({now, *known, *steps}) if size <= most}


def _last_machine(events: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], float]:
    """Return the facts of the last attempt, and the batch since which no setting has changed."""
    facts: Mapping[str, Any] = {}
    since = 0.0
    for one in events:
        if one["event"] in ("start", "resume"):
            before, facts = facts, one.get("facts", {})
            if one.get("changes") or any(before.get(name) != facts.get(name) for name in _FACTS):
                since = one["ba"]
    return facts, since
