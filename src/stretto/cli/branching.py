"""`stretto branch`: short branches from checkpoints of a run, at several batch sizes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, final

from stretto.batching import Fixed, as_policy
from stretto.batching.rules import is_learning_rate
from stretto.checkpoint import open_checkpoint
from stretto.checkpoint.folder import checkpoints
from stretto.checkpoint.manifest import MANIFEST
from stretto.cli.planning import add_working_folder
from stretto.config.plans import TimesAndSizes, prepare_checked
from stretto.config.run import Log, RunConfig, dump_run_file, read_run_file
from stretto.config.training import build_trainer
from stretto.errors import ConfigError, DataError, TrainingError
from stretto.planning import Prepared
from stretto.report.critical import Critical, compared, critical, static_plan
from stretto.run_folder import (
    RUN_FILE,
    locked,
    metrics_lines,
    read_json,
    read_ledger,
    replace_file,
    unwritable,
)
from stretto.timing import Time, TimeUnit, read_wall_clock
from stretto.training import Callback
from stretto.training.checkpointing.resuming import FOLDER as CHECKPOINTS
from stretto.training.logs.loggers import show_seconds
from stretto.training.loop import exit_code

if TYPE_CHECKING:
    from stretto.data import Step
    from stretto.training import Run

LEAST_STEPS = 4
"""With fewer optimizer steps, a branch does not show how its batch size trains."""
RESULT = "branch.json"
Results = Mapping["Branch", Mapping[str, Any] | None]
"""What each branch has found; None: it has not ended."""


class Point(NamedTuple):
    """A checkpoint that branches start from."""

    at: str
    """The time in the run, as it was asked for."""
    path: Path
    sample: int
    size: int
    """The batch size of the run there."""
    samples: int
    """How many a branch trains on, before a last batch shows the loss."""
    sizes: tuple[int, ...]


class Branch(NamedTuple):
    """A run that continues from a checkpoint with another batch size, for a while."""

    point: Point
    size: int
    order: int
    """The number of the order of the samples; 0 is the run's own."""


@final
class Branches:
    """The branches of a run that are asked for, and the folder of what they have found.

    Raises:
        ConfigError: the run, or what is asked for, does not allow them; nothing is trained.
    """

    def __init__(
        self, run: Path, overrides: Sequence[str], folder: Path | None, *, orders: int
    ) -> None:
        add_working_folder()
        self.run, self.orders = run, orders
        self.folder = run.with_name(f"{run.name}-branches") if folder is None else folder
        self._need((run / RUN_FILE).is_file(), f"it has no {RUN_FILE}", "train it with a run file")
        self.config = read_run_file(run / RUN_FILE, overrides)
        self._times, self._prepared = self._check()
        self.num_samples = self._prepared.horizon.end_sample or 0

    def _need(self, is_given: object, why: str, instead: str) -> None:
        if not is_given:
            raise ConfigError.cannot(f"branch from {self.run}", why=why, instead=instead)

    def _check(self) -> tuple[TimesAndSizes, Prepared]:
        """Check that the run can have branches."""
        config, need, own = self.config, self._need, read_run_file(self.run / RUN_FILE)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        need(ranks == 1, f"there are {ranks} ranks", "start it without torchrun")
        need(self.orders > 0, "there is no order of the samples", "write --seeds 3")
        instead = "leave the pair or the batch size out, and write --sizes 32,64"
        need(config.batch_size == own.batch_size, "the sizes are those of --sizes", instead)
        why = "with 'last_batch: drop', batches of other sizes drop other samples"
        need(config.last_batch != "drop", why, "add last_batch=carry to the command")
        times, prepared = prepare_checked(self.config_of(1, 0), resumes=True)
        why = "no rule says how the learning rate follows the batch size"
        instead = (
            "add 'rule={sqrt: 64}' (usual with Adam) or 'rule={linear: 64}' (with SGD) to the "
        )
        instead += "command, with the batch size that the learning rate is for"
        need(any(map(is_learning_rate, times.rules)), why, instead)
        for name in ("max_duration", *prepared.schedules, *prepared.values):
            is_same = not prepared.reads[name] & {TimeUnit.BATCH, TimeUnit.SECOND}
            why = f"{name} reads batches or seconds, which differ between sizes"
            need(is_same, why, "add it in another unit, such as max_duration=640sp")
        is_known = prepared.horizon.end_sample is not None
        need(is_known, "the number of its samples is not known", "set max_duration in 'sp'")
        has_orders = prepared.facts.dataset_num_samples and config.loading.shuffle is not False
        need(has_orders or self.orders == 1, "its data have one order", "write --seeds 1")
        return times, prepared

    def config_of(self, size: int, order: int) -> RunConfig:
        """Return the run of a branch: it evaluates, saves and reports nothing on its way."""
        return replace(
            self.config,
            batch_size=Fixed(size),
            last_batch="carry",  # the end of an epoch would cut other batches at other sizes
            seed=(self.config.seed + order * 1_000_003) % 2**63,
            stepping=replace(self.config.stepping, non_finite="ignore"),  # a size may diverge
            evaluate=[],
            checkpoint=None,
            log=Log(every=Time("1dur"), loggers=[], console=False),
            folder=None,
        )

    def samples_of(self, time: str) -> Fraction:
        """Return a time of the run in samples."""
        part = self._prepared.horizon.convert(Time(time), TimeUnit.DURATION)
        return part.amount * self.num_samples

    def part(self, samples: float) -> str:
        """Return samples as a part of the run, rounded up."""
        return f"{math.ceil(samples / self.num_samples * 1000) / 10:g}%"

    def points(self, times: str, sizes: str, length: str) -> list[Point]:
        """Return the checkpoints that are nearest to some times, with the sizes to try at each."""
        asked, found = self.samples_of(length), list[Point]()
        loaders = {
            path: open_checkpoint(path, verify=False).records["loader"]
            for path in checkpoints(self.run / CHECKPOINTS)
        }
        kept = {path: one["clock"]["sample"] for path, one in loaders.items()}
        for at in times.split(","):
            distances = {path: abs(one - self.samples_of(at)) for path, one in kept.items()}
            path = min(kept, key=distances.__getitem__, default=Path())
            there = ", ".join(map(self.part, kept.values())) or "none"
            why = f"no checkpoint is within {length} of {at}; there are {there}"
            instead = "name one of these, or train with 'checkpoint: {every: 10%, keep: 10}'"
            self._need(distances.get(path, math.inf) <= asked, why, instead)
            tried, size = self._sizes(sizes, loaders[path]["size"]), loaders[path]["size"]
            grain = math.lcm(*tried)
            why = f"{length} are {int(asked):,} samples, fewer than {LEAST_STEPS} of {grain:,}"
            instead = f"write --for {self.part(LEAST_STEPS * grain)}, or smaller sizes"
            self._need(asked >= LEAST_STEPS * grain, why, instead)
            samples = math.ceil(asked / (2 * grain)) * 2 * grain
            is_inside = kept[path] + samples + tried[-1] <= self.num_samples
            why = f"the run ends before {at} and {samples + tried[-1]:,} samples"
            self._need(is_inside, why, "write an earlier --at, or a shorter --for")
            found.append(Point(at.strip(), path, kept[path], size, samples, tried))
        places = {point.sample for point in found}
        self._need(len(places) == len(found), f"{times} has a point twice", "name each once")
        return sorted(found, key=lambda point: point.sample)

    def _sizes(self, texts: str, size: object) -> tuple[int, ...]:
        """Return sizes: numbers, or multiples of the run's own, such as 2x."""
        is_plain, least = isinstance(size, int), self.config.micro_batch_size
        self._need(is_plain, "its batches are amounts in tokens", "use one with sizes in samples")
        assert isinstance(size, int), "needed"
        if read_run_file(self.run / RUN_FILE).rule is None:  # what the run did is the measure
            factors = [one(size) for key, one in self._times.rules.items() if is_learning_rate(key)]
            why = f"it had no rule, and this one changes its own rate at batches of {size}"
            is_own = all(math.isclose(one, 1) for one in factors)
            self._need(is_own, why, f"write {size} in the rule")
        found = set[int]()
        for text in map(str.strip, texts.split(",")):
            one = Fraction(0)
            with suppress(ValueError, ZeroDivisionError):
                one = Fraction(text.removesuffix("x")) * (size if text.endswith("x") else 1)
            is_whole = one >= 1 and one.denominator == 1
            why = f"{text!r} is no whole size where the run has batches of {size}"
            self._need(is_whole, why, "write --sizes 1x,2x,4x or --sizes 32,64")
            found.add(int(one))
        fits = not isinstance(least, int) or min(found) >= min(least, size)
        why = f"a batch of {min(found)} is smaller than the micro-batch, which is {least}"
        self._need(fits, why, f"add micro_batch_size={min(found)} to the command")
        self._need(len(found) > 1, "one size cannot be compared", "write --sizes 1x,2x,4x")
        return tuple(sorted(found))

    def key(self, branch: Branch) -> str:
        """Return what the result of a branch depends on, as a digest."""
        manifest = (branch.point.path / MANIFEST).read_text()
        text = dump_run_file(self.config_of(branch.size, branch.order)) + manifest
        return hashlib.sha256(f"{text}{branch.point.samples}".encode()).hexdigest()

    def place(self, branch: Branch) -> Path:
        """Return the folder of a branch."""
        return self.folder / f"{branch.point.sample:012d}-{branch.size}-{branch.order}"

    def results(self, branches: Sequence[Branch]) -> Results:
        """Return what the branches have found with these settings."""
        read = {one: read_json(self.place(one) / RESULT) for one in branches}
        return {
            one: found if found is not None and found["key"] == self.key(one) else None
            for one, found in read.items()
        }

    def train_missing(self, branches: Sequence[Branch], until: float) -> None:
        """Train branches without a result that no other process trains, while there is time."""
        guess = 0.0
        with suppress(DataError, ValueError):
            *_, last = metrics_lines(self.run)
            guess = last["sec"] / last["sp"]  # of a sample, in the run
        for one in branches:
            try:
                self.place(one).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unwritable(self.place(one), error) from error
            with ExitStack() as stack:
                try:
                    stack.enter_context(locked(self.place(one)))
                except TrainingError:
                    continue  # another process trains it
                if self.results([one])[one] is not None:
                    continue
                if time.monotonic() + guess * one.point.samples > until:
                    return
                found = self._trained(one)
                guess = max(guess, found["each"])
                replace_file(
                    self.place(one) / RESULT, json.dumps({"key": self.key(one), **found}) + "\n"
                )

    def _trained(self, one: Branch) -> dict[str, float]:
        """Train a branch as `stretto train --resume` does."""
        end = one.point.sample + one.point.samples
        watch = Watch(end)
        trainer = build_trainer(
            self.config_of(one.size, one.order), callbacks=[watch], resumes=True
        )
        trainer.run.loader.may_reorder = one.order > 0
        trainer.resume(one.point.path)
        trainer.fit(on_signal="return", even_if_stopped=True)
        if code := exit_code(trainer.stop_reason or ""):
            raise SystemExit(code)
        why = f"a callback has ended it at {trainer.timer.get('sp')} ({trainer.stop_reason})"
        self._need(watch.began == end, why, "add callbacks=[] to the command, or the others")
        loss = smoothed(watch.losses, end - one.point.samples // 2, end)
        (first, began), (last, ended) = watch.clock[0], watch.clock[-1]
        samples, each = last - one.point.sample, (ended - began) / 1e9 / (last - first)
        return {"loss": loss, "samples": samples, "seconds": each * samples, "each": each}

    def report(self, results: Results, tolerance: float) -> Iterator[str]:
        """Yield the lines of the report; write the run file with the plan that follows."""
        done = {one: found for one, found in results.items() if found is not None}
        sizes = sorted({one.size for one in done})
        each = {n: median(one["each"] for b, one in done.items() if b.size == n) for n in sizes}
        yield f"{'at':>6} {'size':>8} {'loss':>9} {'excess':>18} {'s/sample':>10}"
        found, points = dict[str, Critical](), list(dict.fromkeys(one.point for one in results))
        for point in points:
            had = [n for n in range(self.orders) if all((point, s, n) in done for s in point.sizes)]
            if not had:
                yield f"{point.at}: not known yet"
                continue
            losses = {s: [done[Branch(point, s, n)]["loss"] for n in had] for s in point.sizes}
            why = f"batches of {point.sizes[0]} diverged at {point.at}"
            is_finite = all(map(math.isfinite, losses[point.sizes[0]]))
            self._need(is_finite, why, "write smaller sizes, or a lower learning rate")
            for row in (rows := compared(losses)):
                reach = f" +- {row.reach:.4f}" if 0 < row.reach < math.inf else ""
                line = f"{self.part(point.sample):>6} {row.size:>8,} {row.loss:>9.4f} "
                yield f"{line}{f'{row.excess:+.4f}{reach}':>18} {each[row.size]:>10.2e}"
            found[point.at] = critical(rows, tolerance)
            yield f"{point.at}: {found[point.at]}"
        if len(found) == len(points):
            yield from self._advice(static_plan(found, points[0].size), each)
        samples, seconds = (
            sum(one[key] for one in done.values()) for key in ("samples", "seconds")
        )
        cost = f"{samples:,} samples ({self.part(samples)} of the run), {show_seconds(seconds)}"
        yield f"{len(done)} of {len(results)} branches are done: {cost}"
        if missing := [
            f"{b.point.at} with {b.size} (order {b.order})" for b in results if b not in done
        ]:
            yield f"missing: {', '.join(missing)}; the same command goes on"

    def _advice(self, plan: Mapping[str, int], each: Mapping[int, float]) -> Iterator[str]:
        """Yield the plan, and what it would save; write it."""
        whole = as_policy(plan if len(plan) > 1 else plan["0%"])
        text = dump_run_file(replace(self.config, batch_size=whole, folder=None))
        replace_file(self.folder / RUN_FILE, text)
        if len(plan) > 1:
            yield f"batch_size: {{{', '.join(f'{at}: {size}' for at, size in plan.items())}}}"
        else:
            yield f"constant, {plan['0%']}: no growth is shown, and nothing was measured earlier"
        yield f"wrote {self.folder / RUN_FILE}"
        planned, own, begun = Counter[int](), Counter[int](), self.num_samples
        for at, size in reversed([*plan.items()]):
            planned[size] += begun - int(self.samples_of(at))
            begun = int(self.samples_of(at))
        for row in read_ledger(self.run):
            own[last := row.counts["decided_size"]] += row.counts["size"]
        own[last] += self.num_samples - own.total()
        if {*own, *planned} <= each.keys():
            before, after = (sum(each[n] * one[n] for n in one) for one in (own, planned))
            yield f"seconds saved here: {before - after:,.0f} of {before:,.0f}, as fast as branches"
        else:
            yield "seconds saved here: not known; no branch had all sizes of the run and the plan"


@final
class Watch(Callback):
    """Keeps the losses of a branch, and ends it after the batch that begins at `end`."""

    def __init__(self, end: int) -> None:
        self._end, self.began = end, -1
        self._losses: list[tuple[int, Any]] = []
        self.clock: list[tuple[int, int]] = []
        """Samples and nanoseconds after each batch."""

    def on_batch_end(self, run: Run, step: Step) -> None:
        """Keep the loss, which is read late."""
        now, self.began = run.timer.timestamp, step.timestamp.sample
        self._losses.append((self.began, run.latest_loss))
        self.clock.append((now.sample, now.run_nanoseconds))
        if self.began >= self._end:
            run.stop("the branch has ended")

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Where each batch begins, and its loss."""
        return [(at, float(loss() if callable(loss) else loss)) for at, loss in self._losses]


def smoothed(losses: Sequence[tuple[int, float]], start: int, end: int) -> float:
    """Return the mean loss of the weights from `start` to `end`, by the trapezoidal rule.

    A batch's loss is that of the weights before it. So without the batch that begins at `end`,
    larger batches would show older weights, and a loss that falls would count against them.

    >>> smoothed([(0, 9.0), (8, 4.0), (16, 3.0), (24, 2.0)], 8, 24)
    3.0
    """
    inside = {at: loss for at, loss in losses if start <= at <= end}
    shares = {at: 0.5 if at in (start, end) else 1.0 for at in inside}
    return sum(shares[at] * loss for at, loss in inside.items()) / sum(shares.values())


def branch(
    run: Path,
    overrides: Sequence[str],
    folder: Path | None,
    asked: Mapping[str, str],
    *,
    at_once: int,
    tolerance: float,
) -> Iterator[str]:
    """Train the branches that are missing, and yield the lines of the report.

    Args:
        run: the folder of the run.
        overrides: `key=value` for what changes in its run file.
        folder: where the branches are kept; None: beside the run.
        asked: the options `at`, `sizes`, `for`, `seeds`, and `most` if there is a limit.
        at_once: how many processes train them.
        tolerance: the largest excess of the loss.

    Raises:
        ConfigError: the run, or what is asked for, does not allow them; nothing is trained.
        SystemExit: some are missing; the code is 1.
    """
    most = float(read_wall_clock(asked["most"]).amount) if "most" in asked else math.inf
    until, seeds = time.monotonic() + most, int(asked["seeds"])
    branches = Branches(run, overrides, folder, orders=seeds)
    points = branches.points(asked["at"], asked["sizes"], asked["for"])
    every = [Branch(p, size, n) for n in range(seeds) for p in points for size in p.sizes]
    for one in every:
        prepare_checked(branches.config_of(one.size, one.order), resumes=True)  # refuses
    options = [f"--{name}={text}" for name, text in asked.items()]
    options += [f"--folder={branches.folder}", "--quiet"]
    command = [sys.executable, "-m", "stretto", "branch", str(run), *overrides, *options]
    copies = [subprocess.Popen(command) for _ in range(at_once - 1)]  # noqa: S603  ourselves
    try:
        branches.train_missing(every, until)
        for copy in copies:
            copy.wait()
    finally:
        for copy in copies:
            copy.terminate()
    results = branches.results(every)
    yield from branches.report(results, tolerance)
    if None in results.values():
        raise SystemExit(1)
