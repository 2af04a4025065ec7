"""The table and the picture of the study of batch sizes."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from study_arms import ARMS, BASELINE, LARGEST, RATES, WARMUPS, Setting

from stretto._optional import import_optional
from stretto.batching.noise_scale import student
from stretto.report.pictures import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, STYLE, short

CONFIDENCE = 0.95
COLOURS = (INK, MUTED, "#b0b0b0", ORANGE, BLUE, "#56b4e9", GREEN, PURPLE)


class Difference(NamedTuple):
    """How much more a side loses than another, and where the true difference lies."""

    mean: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.lower:+.4f}, {self.upper:+.4f}]"


def difference(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> Difference:
    """Return the mean difference over the seeds that both have, with its 95 percent interval.

    Paired, by Student's distribution: with one seed, both sides begin with the same weights and
    read the data in the same order. With fewer than two such seeds the interval has no ends.
    """
    other = {run["seed"]: run["loss"] for run in base}
    pairs = [run["loss"] - other[run["seed"]] for run in runs if run["seed"] in other]
    if len(pairs) < 2:
        return Difference(pairs[0] if pairs else math.nan, -math.inf, math.inf)
    mean, error = statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
    reach = student(CONFIDENCE, len(pairs) - 1) * error
    return Difference(mean, mean - reach, mean + reach)


def table(
    final: Sequence[Mapping[str, Any]],
    tried: Sequence[Mapping[str, Any]],
    best: Mapping[str, Setting | None],
    used_before: Mapping[str, int],
) -> str:
    """Return the results as text: the sides with their seeds, then all that was tried.

    Args:
        final: the runs with the seeds that were not tuned on.
        tried: the runs of the tuning.
        best: the setting that was chosen for each side; None: its search has not ended.
        used_before: with how many of its final seeds each side had been run in other settings.
    """
    by_arm = _by_arm(final)
    base = by_arm.get(BASELINE, [])
    lines = [_columns("", "learning", "", "", "fewer", "validation loss", "minus the baseline")]
    lines += [
        _columns("", "rate", "warm-up", "steps", "steps", "mean (sd)", "[95 % interval]")
        + "  seeds  (used before)"
    ]
    for arm, runs in by_arm.items():
        lines += [
            f"{_row(ARMS[arm].title, runs, base)}{used_before.get(arm, 0) or '':>15}".rstrip()
        ]
    lines += [
        "",
        "Used before: seeds with which the side was also run in settings that were given up later.",
        "",
        "Tuned on three seeds that are none of these: validation loss by rate and warm-up,",
        "with the first seed, and where that is among the best with the second and the third;",
        "chosen by a quadratic of both that is fitted to all of a side's runs.",
    ]
    for arm, runs in _by_arm(tried).items():
        lines += ["", *_grid(ARMS[arm].title, runs, best.get(arm))]
    lines += ["", f"No batch goes beyond {LARGEST}, nor beyond what its side says."]
    return "\n".join(lines) + "\n"


def _by_arm(runs: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs:
        found[run["arm"]].append(run)
    return {arm: found[arm] for arm in ARMS if arm in found}


def _row(title: str, runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> str:
    losses, steps = [run["loss"] for run in runs], statistics.mean(run["steps"] for run in runs)
    fewer = more = ""
    if base:
        most = statistics.mean(run["steps"] for run in base)
        fewer = f"{1 - steps / most:.1%}"
        more = "" if runs[0]["arm"] == BASELINE else str(difference(runs, base))
    mean = f"{statistics.mean(losses):.4f} ({_deviation(losses):.4f})"
    rate, warmup = f"{runs[0]['learning_rate']:.2g}", f"{runs[0]['warmup']:.0%}"
    return f"{_columns(title, rate, warmup, f'{steps:,.0f}', fewer, mean, more)}{len(runs):>7d}"


def _columns(  # noqa: PLR0917 (a row, from left to right)
    title: str, rate: str, warmup: str, steps: str, fewer: str, loss: str, more: str
) -> str:
    return f"{title:37s}{rate:>9s}{warmup:>9s}{steps:>8s}{fewer:>8s}{loss:>18s}{more:>29s}"


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def _grid(title: str, runs: Sequence[Mapping[str, Any]], best: Setting | None) -> list[str]:
    losses: dict[Setting, list[float]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run["seed"]):
        losses[Setting(*run["setting"])].append(run["loss"])
    rates = sorted({setting.rate for setting in losses})
    warmups = sorted({setting.warmup for setting in losses})
    head = "".join(f"{WARMUPS[warmup]:>28.0%}" for warmup in warmups)
    state = "the search goes on"
    if best:
        at_edge = best.rate in (0, len(RATES) - 1) or best.warmup in (0, len(WARMUPS) - 1)
        state = f"{RATES[best.rate]:g} and {WARMUPS[best.warmup]:.0%} chosen"
        state += ", at the edge of what may be tried" if at_edge else ""
    lines = [f"{title}: times the base rate, and warm-up ({state})", f"{'':>8s}{head}"]
    for rate in rates:
        cells = [losses.get(Setting(rate, warmup), []) for warmup in warmups]
        shown = "".join(f"{' / '.join(f'{loss:.4f}' for loss in cell):>28s}" for cell in cells)
        lines.append(f"{RATES[rate]:>8g}{shown}")
    return lines


def picture(final: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the validation loss over steps and over tokens, the mean of the seeds."""
    with import_optional("matplotlib", "plot").rc_context(STYLE):
        figure = import_optional("matplotlib.figure", "plot").Figure(
            figsize=(10, 5.2), layout="constrained"
        )
        panels = figure.subplots(1, 2, sharey=True)
        drawn = [(arm, runs) for arm, runs in _by_arm(final).items() if ARMS[arm].is_drawn]
        for colour, (arm, runs) in zip(COLOURS[: len(drawn)], drawn, strict=True):
            points = list(zip(*(run["curve"] for run in runs), strict=False))
            loss = [statistics.mean(at[2] for at in each) for each in points]
            for panel, number in zip(panels, (0, 1), strict=True):
                where = [statistics.mean(at[number] for at in each) for each in points]
                panel.plot(where, loss, color=colour, label=ARMS[arm].title)
        for panel, name in zip(panels, ("optimizer steps", "tokens"), strict=True):
            panel.set_xlabel(name)
            panel.set_xlim(left=0)
            panel.xaxis.set_major_formatter(lambda value, _: short(value))
        last = [run["curve"][-1][2] for run in final]
        if last:
            panels[0].set_ylim(min(last) - 0.02, min(last) + 0.5)
            lines = panels[0].get_legend_handles_labels()
            figure.legend(*lines, loc="outside lower center", ncols=3)
        panels[0].set_ylabel("validation loss, nats per byte")
        figure.suptitle("Batches that grow, and constant ones", x=0.012, ha="left")
        figure.savefig(path, dpi=150)
