"""What a run has left in its folder: its metrics, and its ledger beside its plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, final

from stretto.planning import Plan, PlannedBatch
from stretto.run_folder import LEDGER, METRICS, LedgerRow, metrics_lines, read_ledger, unreadable


@final
@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The lines of `metrics.jsonl`: training and evaluations."""

    training: tuple[Mapping[str, float], ...]
    """Lines with the loss, batch size, learning rate and throughput since the last line."""
    evaluations: tuple[Mapping[str, float], ...]
    """Lines with `<name>/loss` and `<name>/<metric>`."""

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of evaluated metrics, in order of appearance."""
        names = (name for line in self.evaluations for name in line if "/" in name)
        return tuple(dict.fromkeys(names))

    @property
    def references(self) -> dict[str, float]:
        """Metrics that never change: baselines, such as the entropy of the text.

        Two evaluations must agree on them to a millionth.
        """
        found = {}
        for name in self.measured:
            values = [line[name] for line in self.evaluations if name in line]
            if not all(map(math.isfinite, values)):
                continue
            low, high = min(values), max(values)
            if len(values) > 1 and high - low <= 1e-6 * abs(high):
                found[name] = values[-1]
        return found


def read_metrics(folder: Path | str) -> RunMetrics:
    """Return the metrics of the run in `folder`.

    It ignores an incomplete last line, which a killed or running run leaves.

    Raises:
        DataError: there are no metrics, or a line is not valid.
    """
    folder = Path(folder)
    lines = list(metrics_lines(folder))
    if not lines:
        raise unreadable(folder / METRICS, "it holds no line yet")
    training = tuple(line for line in lines if "loss" in line)
    evaluations = tuple(line for line in lines if any("/" in name for name in line))
    if not (training or evaluations):
        raise unreadable(folder / METRICS, "no line of it holds a loss")
    return RunMetrics(training, evaluations)


FIRST = 10
"""The most differences that a comparison lists."""


class Difference(NamedTuple):
    """A difference between a run and its plan."""

    batch: int
    what: str
    planned: float | str
    done: float | str

    def __str__(self) -> str:
        return f"batch {self.batch:,}: {self.what} {self.done}, planned {self.planned}"


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """A run against its plan, batch for batch."""

    batches: int
    """Number of batches in the run."""
    planned: int | None
    """Number of batches in the plan; None if unknown."""
    differences: tuple[Difference, ...]
    """The first few."""
    compared: tuple[str, ...]
    """What was compared."""

    @property
    def agrees(self) -> bool:
        """Whether every batch of the run is as planned."""
        return not self.differences

    def __str__(self) -> str:
        if self.differences:
            listed = "\n".join(f"  {difference}" for difference in self.differences)
            return f"the run left its plan:\n{listed}"
        what = f"({', '.join(self.compared)})"
        if self.planned is None or self.batches == self.planned:
            return f"all {self.batches:,} batches as planned {what}"
        return (
            f"the first {self.batches:,} of {self.planned:,} batches as planned {what}; "
            "the run is not at its end"
        )


def compare(plan: Plan, folder: Path | str, *, since: int = 0) -> Comparison:
    """Compare the run in `folder` with `plan`: sizes, clock and hyper-parameters.

    Counts must be equal. Hyper-parameters may differ in the last digits, because a plan multiplies
    base, schedule and rule in another order than an optimizer does. Tokens are compared if the plan
    has them.

    Args:
        plan: the plan.
        folder: the run folder.
        since: the batch from which hyper-parameters are compared; those before had another plan.

    Raises:
        DataError: there is no ledger in the folder, or it is invalid.
    """
    differences: list[Difference] = []
    batches, names = 0, ["size", "epoch", "sample", "micro_batches"]
    if plan.horizon.tokens(0, 1):
        names += ["token", "tokens"]
    for row, planned in zip_longest(read_ledger(folder), plan.batches()):
        if row is None or len(differences) >= FIRST:
            break
        if planned is None:
            differences.append(Difference(batches, "size", "no batch", row.counts["size"]))
            batches += 1
            continue
        if batches == 0:
            names += [name for name in row.values if name in planned.values]
        start = planned.timestamp.sample
        expected = _expected(planned, plan.horizon.tokens(start, start + planned.size))
        those = names if batches >= since else [name for name in names if name in row.counts]
        differences += _differences(row, expected, those, batches)
        batches += 1
    if batches == 0:
        raise unreadable(Path(folder) / LEDGER, "it holds no batch")
    return Comparison(batches, plan.num_batches, tuple(differences[:FIRST]), tuple(names))


def _expected(planned: PlannedBatch, tokens: int) -> dict[str, float]:
    """Return the expected row of the ledger for a planned batch."""
    at = planned.timestamp
    return {
        "batch": at.batch,
        "epoch": at.epoch,
        "sample": at.sample,
        "token": at.token,
        "size": planned.size,
        "tokens": tokens,
        **({} if planned.accumulation is None else {"micro_batches": planned.accumulation}),
        **planned.values,
    }


def _differences(
    row: LedgerRow, expected: Mapping[str, float], names: Sequence[str], number: int
) -> Iterator[Difference]:
    done = {**row.counts, **row.values}
    for name in ("batch", *(name for name in names if name in expected)):
        equal = done[name] == expected[name]
        if name in row.values:
            equal = math.isclose(done[name], expected[name], rel_tol=1e-12, abs_tol=1e-300)
        if not equal:
            yield Difference(number, name, expected[name], done[name])
