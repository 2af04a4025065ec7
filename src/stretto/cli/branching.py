"""`stretto branch`: short branches from checkpoints of a run, at several batch sizes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, final

from stretto._location import read_plain
from stretto.batching import Fixed, as_policy
from stretto.batching.rules import is_learning_rate
from stretto.checkpoint import open_checkpoint
from stretto.checkpoint.folder import checkpoints
from stretto.checkpoint.manifest import MANIFEST
from stretto.cli.planning import add_working_folder
from stretto.config.plans import TimesAndSizes, make_loading, make_spec, prepare_checked
from stretto.config.run import Log, RunConfig, dump_run_file, read_run_file
from stretto.config.training import build_trainer
from stretto.errors import ConfigError, DataError, TrainingError
from stretto.planning import Prepared
from stretto.report.critical import Critical, compared, critical, static_plan
from stretto.run_folder import (
    LEDGER,
    METRICS,
    RUN_FILE,
    locked,
    metrics_lines,
    read_json,
    read_ledger,
    replace_file,
    write_named,
)
from stretto.timing import Time, TimeUnit, read_wall_clock
from stretto.training import Callback
from stretto.training.checkpointing.resuming import FOLDER as CHECKPOINTS
from stretto.training.logs.loggers import show_seconds
from stretto.training.loop import exit_code

LEAST_STEPS = 4
"""With fewer optimizer steps, a branch does not show how its batch size trains."""
SETTLED = 40
"""In fewer, the optimizer's averages are still those of the run's own size: with 10 steps of 8
times the batch, AdamW's loss rose by 0.014 to 0.033 more than without (bench/branches.py)."""
SHARE, NEAR = 0.25, "5%"
"""By default, all branches take this part of a run; a checkpoint is near a time within this."""
RESULT = "branch.json"
FOUND = "# found by stretto branch\n"


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

    @property
    def samples(self) -> int:
        """How many it trains on."""
        return self.point.samples + self.size


@final
class Branches:
    """The branches of a run, and the folder of what they have found.

    Raises:
        ConfigError: the run, or what is asked for, does not allow them; nothing is trained.
    """

    def __init__(
        self, run: Path, overrides: Sequence[str], folder: Path | None, *, orders: int, limit: float
    ) -> None:
        add_working_folder()
        self.run, self.orders, self.tolerance = run, orders, limit
        self.folder = run.with_name(f"{run.name}-branches") if folder is None else folder
        is_run = any((self.folder / name).exists() for name in (LEDGER, METRICS))
        self._need(not is_run, f"{self.folder} is a run", "write another --folder")
        self._need((run / RUN_FILE).is_file(), f"it has no {RUN_FILE}", "train it with a run file")
        self._own = read_run_file(run / RUN_FILE)
        self.config = read_run_file(run / RUN_FILE, overrides)
        self._times, self._prepared = self._check()
        self.num_samples = self._prepared.horizon.end_sample or 0

    def _need(self, is_given: object, why: str, instead: str) -> None:
        if not is_given:
            raise ConfigError.cannot(f"branch from {self.run}", why=why, instead=instead)

    def _check(self) -> tuple[TimesAndSizes, Prepared]:
        """Check that the run can have branches."""
        config, need, ranks = self.config, self._need, os.environ.get("WORLD_SIZE", "1")
        need(ranks == "1", f"there are {ranks} ranks", "start it without torchrun")
        need(self.orders > 0, "there is no order of the samples", "write --seeds 3")
        need(self.tolerance > 0, "its tolerance is not above 0", "write --tolerance 0.01")
        is_own = config.batch_size == self._own.batch_size
        need(is_own, "batch_size is what branches change", "write --sizes 32,64 instead")
        why, instead = "batches of other sizes drop other samples", "add last_batch=carry"
        need(config.last_batch != "drop", why, instead)
        times, prepared = prepare_checked(self.config_of(1, 0), resumes=True)
        why = "no rule says how the learning rate follows the batch size"
        instead = "add 'rule={sqrt: 64}' (usual with Adam) or 'rule={linear: 64}' (with SGD), with "
        instead += "the batch size that the learning rate is for"
        need(any(map(is_learning_rate, times.rules)), why, instead)
        for name in ("max_duration", *prepared.schedules, *prepared.values):
            is_same = not prepared.reads[name] & {TimeUnit.BATCH, TimeUnit.SECOND}
            why = f"{name} reads batches or seconds, which differ between sizes"
            need(is_same, why, "add it in another unit, such as max_duration=640sp")
        is_known = prepared.horizon.end_sample is not None
        need(is_known, "the number of its samples is not known", "set max_duration in 'sp'")
        if self.orders > 1:
            spec, loading = make_spec(config), make_loading(config)
            has_orders = spec.is_map_style and spec.order(loading).shuffle
            need(has_orders, "its data have a single order", "write --seeds 1")
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
        return self._prepared.horizon.convert(Time(time), "dur").amount * self.num_samples

    def part(self, samples: float) -> str:
        """Return samples as a part of the run, rounded up."""
        return f"{math.ceil(samples / self.num_samples * 1000) / 10:g}%"

    def cost(self, branches: Iterable[Branch]) -> str:
        """Return how many samples branches train on, beside their part of the run."""
        samples = sum(one.samples for one in branches)
        return f"{samples:,} samples ({self.part(samples)} of the run)"

    def points(self, times: str, sizes: str, length: str | None) -> list[Point]:
        """Return the checkpoints that are nearest to some times, with the sizes to try at each.

        Without a length, all branches together take `SHARE` of the run.
        """
        need, found, names = self._need, dict[int, Point](), times.split(",")
        kept = {  # samples before it, and the size of the last batch
            (loader["clock"]["sample"], loader["size"]): path
            for path in checkpoints(self.run / CHECKPOINTS)
            for loader in [open_checkpoint(path, verify=False).records["loader"]]
        }
        keep_some = "train with 'checkpoint: {every: 10%, keep: 10}'"
        need(kept, "it has no checkpoint", keep_some)
        for at in names:
            wanted = self.samples_of(at)
            sample, size = min(kept, key=lambda one: abs(one[0] - wanted))
            tried = self._sizes(sizes, size)
            grain, share = math.lcm(*tried), SHARE * self.num_samples / len(names) / self.orders
            asked = (share - sum(tried)) / len(tried) if length is None else self.samples_of(length)
            there = ", ".join(self.part(one) for one, _ in kept)
            why = f"no checkpoint is within {NEAR} of {at}; there are {there}"
            is_near = abs(sample - wanted) <= self.samples_of(NEAR)
            need(is_near, why, f"name one of these, or {keep_some}")
            had, least = max(int(asked), 0), LEAST_STEPS * grain
            why = f"a branch has {had:,} samples, fewer than {LEAST_STEPS} times {grain:,}"
            need(had >= least, why, f"write --for {self.part(least)}, or smaller sizes")
            whole = math.floor if length is None else math.ceil
            samples = whole(asked / (2 * grain)) * 2 * grain
            why = f"the run ends before {at} and {samples + tried[-1]:,} samples"
            is_inside = sample + samples + tried[-1] <= self.num_samples
            need(is_inside, why, "write an earlier --at, or a shorter --for")
            need(sample not in found, f"{times} has a point twice", "name each once")
            found[sample] = Point(at.strip(), kept[sample, size], sample, size, samples, tried)
        return [found[sample] for sample in sorted(found)]

    def _sizes(self, texts: str, size: Any) -> tuple[int, ...]:
        """Return sizes: numbers, or multiples of the run's own, such as 2x."""
        need, least = self._need, self.config.micro_batch_size
        need(isinstance(size, int), "its batches are in tokens", "use one with batches in samples")
        rules = [rule for name, rule in self._times.rules.items() if is_learning_rate(name)]
        is_own = self._own.rule is not None or all(math.isclose(rule(size), 1) for rule in rules)
        why = f"it had no rule, and this one changes its own learning rate at batches of {size}"
        need(is_own, why, f"write {size} in the rule")
        found = set[int]()
        for text in map(str.strip, texts.split(",")):
            one = Fraction(0)
            with suppress(ValueError, ZeroDivisionError):
                one = Fraction(text.removesuffix("x")) * (size if text.endswith("x") else 1)
            why = f"{text!r} is no whole batch size; the run has batches of {size} there"
            need(one >= 1 and one.denominator == 1, why, "write --sizes 1x,2x,4x or --sizes 32,64")
            found.add(int(one))
        need(len(found) > 1, "one size cannot be compared", "write --sizes 1x,2x,4x")
        fits = not isinstance(least, int) or min(found) >= min(least, size)
        why = f"a batch of {min(found)} is smaller than the micro-batch, which is {least}"
        need(fits, why, f"add micro_batch_size={min(found)}")
        return tuple(sorted(found))

    def place(self, one: Branch) -> Path:
        """Return the folder of a branch."""
        name = f"{one.point.sample:012d}-{one.size}-{one.order}-{self.key(one)[:8]}"
        return self.folder / name

    def key(self, one: Branch) -> str:
        """Return what the result of a branch depends on, as a digest."""
        text = dump_run_file(self.config_of(one.size, one.order)) + f"{one.point.samples}"
        return hashlib.sha256(read_plain(one.point.path / MANIFEST) + text.encode()).hexdigest()

    def result(self, one: Branch) -> Mapping[str, Any] | None:
        """Return what a branch has found with these settings; None: it has not ended."""
        found = read_json(self.place(one) / RESULT)
        return found if isinstance(found, dict) and found.get("key") == self.key(one) else None

    def train_missing(self, branches: Sequence[Branch], until: float) -> Iterator[str]:
        """Yield what it costs; train what is missing and no other process trains, in time."""
        guess, missing = 0.0, [one for one in branches if self.result(one) is None]
        with suppress(DataError, ValueError):
            *_, last = metrics_lines(self.run)
            guess = last["sec"] / last["sp"]  # of a sample, in the run
        seconds = show_seconds(sum(guess * one.samples for one in missing)) if guess else "?"
        yield f"{len(missing)} branches to train: {self.cost(missing)}, {seconds} at the run's pace"
        for one in missing:
            with ExitStack() as stack:
                try:
                    stack.enter_context(locked(self.place(one)))
                except TrainingError as error:
                    if error.__cause__ is None:
                        continue  # another process trains it
                    raise
                if self.result(one) is None:
                    if time.monotonic() + guess * one.point.samples > until:
                        return
                    found = {"key": self.key(one), **self._trained(one)}
                    guess = max(guess, found["each"])
                    replace_file(self.place(one) / RESULT, json.dumps(found) + "\n")

    def _trained(self, one: Branch) -> dict[str, Any]:
        """Train a branch as `stretto train --resume` does."""
        end = one.point.sample + one.point.samples
        watch, config = Watch(end), self.config_of(one.size, one.order)
        trainer = build_trainer(config, callbacks=[watch], resumes=True)
        trainer.run.loader.may_reorder = one.order > 0
        trainer.resume(one.point.path)
        trainer.fit(on_signal="return", even_if_stopped=True)
        if code := exit_code(trainer.stop_reason or ""):
            raise SystemExit(code)
        why = f"a callback has ended it at {trainer.timer.get('sp')} ({trainer.stop_reason})"
        self._need(watch.losses[-1][0] == end, why, "add callbacks=[], or the others")
        losses = [(at, float(loss() if callable(loss) else loss)) for at, loss in watch.losses]
        loss = smoothed(losses, end - one.point.samples // 2, end)
        seconds = (watch.ended - watch.began) / 1e9  # without the first batch
        return {"loss": loss, "each": seconds / one.point.samples}

    def lines(
        self, at: str, sizes: str, length: str | None, most: str | None, plain: dict[str, Any]
    ) -> Iterator[str]:
        """Train the branches that are missing, and yield what they cost and the report.

        Args:
            at: the points, as on the command line; so are `sizes`, `length` and `most`.
            sizes: the batch sizes at each.
            length: how long each branch trains; None: all together take `SHARE` of the run.
            most: begin no branch that would end later; None: there is no limit.
            plain: filled with the numbers of the report.

        Raises:
            ConfigError: the run, or what is asked for, does not allow them; nothing is trained.
            SystemExit: a signal has stopped a branch.
        """
        seconds = math.inf if most is None else float(read_wall_clock(most).amount)
        until, points = time.monotonic() + seconds, self.points(at, sizes, length)
        branches = [Branch(p, s, n) for n in range(self.orders) for p in points for s in p.sizes]
        for size in {one.size for one in branches}:
            prepare_checked(self.config_of(size, 0), resumes=True)  # refuses
        yield from self.train_missing(branches, until)
        yield from self.report(branches, plain)

    def report(self, branches: Sequence[Branch], plain: dict[str, Any]) -> Iterator[str]:
        """Yield the lines of the report, and fill `plain`; write the run file of the plan."""
        done = {one: found for one in branches if (found := self.result(one)) is not None}
        each = {
            size: median(found["each"] for one, found in done.items() if one.size == size)
            for size in {one.size for one in done}
        }
        yield f"{'at':>6} {'size':>8} {'loss':>9} {'excess':>18} {'s/sample':>10}"
        known, points = dict[str, Critical](), {one.point.at: one.point for one in branches}
        for at, point in points.items():
            had = [n for n in range(self.orders) if all((point, s, n) in done for s in point.sizes)]
            if not had:
                yield f"{at}: not known yet"
                continue
            rows = compared(
                {s: [done[Branch(point, s, n)]["loss"] for n in had] for s in point.sizes}
            )
            why = f"batches of {point.sizes[0]}, the smallest, diverged at {at}"
            self._need(math.isfinite(rows[0].loss), why, "write smaller sizes, or a lower rate")
            for row in rows:
                line = f"{self.part(point.sample):>6} {row.size:>8,} {row.loss:>9.4f}"
                yield f"{line} {row.shown:>18} {each[row.size]:>10.2e}"
            known[at] = critical(rows, self.tolerance)
            plain[at] = {"tried": [row.plain for row in rows], "critical": known[at]._asdict()}
            yield f"{at}: {known[at]}"
            if (steps := point.samples // (most := point.sizes[-1])) < SETTLED:
                yield f"{at}: {steps} steps of {most:,} show the switch more than the size"
        if len(known) == len(points):
            plain["plan"] = plan = static_plan(known, next(iter(points.values())).size)
            yield from self._advice(plan, each)
        seconds = show_seconds(sum(found["each"] * one.samples for one, found in done.items()))
        yield f"{len(done)} of {len(branches)} branches are done: {self.cost(done)}, {seconds}"
        missing = [f"{p.at} with {s} (order {n})" for p, s, n in branches if (p, s, n) not in done]
        plain |= {"done": len(done), "missing": missing, "cost": self.cost(done)}
        if missing:
            yield f"missing: {', '.join(missing)}; the same command goes on"

    def _advice(self, plan: Mapping[str, int], each: Mapping[int, float]) -> Iterator[str]:
        """Yield the plan, and what it would save; write it."""
        policy = as_policy(plan if len(plan) > 1 else plan["0%"])
        text = FOUND + dump_run_file(replace(self.config, batch_size=policy, folder=None))
        write_named(self.folder / RUN_FILE, text, f"{FOUND}.*")
        if len(plan) > 1:
            yield f"batch_size: {{{', '.join(f'{at}: {size}' for at, size in plan.items())}}}"
        else:
            yield f"constant, {plan['0%']}: no growth is shown at these points"
        yield f"wrote {self.folder / RUN_FILE}"
        planned, own, end = Counter[int](), Counter[int](), self.num_samples
        for at, size in reversed([*plan.items()]):
            planned[size] += end - int(self.samples_of(at))
            end = int(self.samples_of(at))
        last = plan["0%"]  # of an empty ledger
        for row in read_ledger(self.run):
            own[last := row.counts["decided_size"]] += row.counts["size"]
        own[last] += self.num_samples - own.total()
        if {*own, *planned} <= each.keys():
            before, after = (sum(each[n] * one[n] for n in one) for one in (own, planned))
            saved = f"{before - after:,.0f} of {before:,.0f}, as fast as the branches were"
        else:
            saved = "not known; no branch had all sizes of the run and the plan"
        yield f"seconds saved here: {saved}"


@final
class Watch(Callback):
    """Keeps the losses of a branch, and ends it after the batch that begins at `end`."""

    def __init__(self, end: int) -> None:
        self._end = end
        self.losses: list[tuple[int, Any]] = [(-1, 0.0)]
        """Where each batch begins, and its loss or a function that reads it."""
        self.began = self.ended = 0
        """Nanoseconds after the first batch, and after the last."""

    def on_batch_end(self, run: Any, step: Any) -> None:
        """Keep the loss."""
        self.losses.append((step.timestamp.sample, run.latest_loss))
        self.ended = run.timer.timestamp.run_nanoseconds
        self.began = self.began or self.ended
        if step.timestamp.sample >= self._end:
            run.stop("the branch has ended")


def smoothed(losses: Sequence[tuple[int, float]], start: int, end: int) -> float:
    """Return the mean loss of the weights from `start` to `end`, by the trapezoidal rule.

    A batch's loss is that of the weights before it. So without the batch that begins at `end`,
    larger batches would show older weights, and a loss that falls would count against them.

    >>> smoothed([(0, 9.0), (8, 4.0), (16, 3.0), (24, 2.0)], 8, 24)
    3.0
    """
    shares = [
        (0.5 if at in (start, end) else 1.0, loss) for at, loss in losses if start <= at <= end
    ]
    return sum(share * loss for share, loss in shares) / sum(share for share, _ in shares)
