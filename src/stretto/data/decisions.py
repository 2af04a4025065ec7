"""`Decisions`: decides the next batch, ahead of the run or at each step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from itertools import chain, product, repeat
from typing import Any, final

from stretto.batching import NO_SIGNALS, Bound, PolicyState, Signals, checked_size
from stretto.batching.metrics import one_metric
from stretto.batching.policy import Tokens, is_same, saved_size
from stretto.data.fetch import Plans, RankShare
from stretto.errors import BatchSizeError, CheckpointError, StrettoError
from stretto.planning import PlannedBatch, Prepared, check_least, next_step
from stretto.planning.plan import plan_prepared
from stretto.planning.sizes import Had, after_batch
from stretto.timing import Timer, Timestamp, TimeUnit
from stretto.timing.batches import EqualBatches

_UNMEASURED_STEPS = 20
"""Steps without a noise measurement after which a warning is given."""


_LOUD = Signals(loss=1.0, metric=1.0, noise_numerator=1.0, noise_denominator=1.0)
"""Something of all that a policy may read."""
_KINDS = {*product([int], [int, Tokens], [int, type(None)])}
_MOST_SIZES = 2**16
"""Sizes that a checkpoint keeps: 1 MB of JSON. A plan may have more, and leads to its clock."""


@final
class Decisions:
    """Calls `stretto.planning.next_step`, ahead of the run or at each step.

    It holds no reference to the loader, so a loader that is collected stops its workers.

    Args:
        run: the run.
        timer: its clock.
    """

    def __init__(self, run: Prepared, timer: Timer) -> None:
        self._run = run
        self._horizon = run.horizon
        self._policy = run.bound_policy
        self._in_tokens = run.policy.unit is TimeUnit.TOKEN
        self._timer = timer
        self.state: PolicyState = run.bound_policy.start
        """The policy's state after the last finished batch."""
        self.signals = NO_SIGNALS
        """What that batch measured, and the evaluations after it."""
        self.measured: list[float] = []
        """The metric in each evaluation so far, for schedules; of each batch the last one."""
        self.noted: float | None = None
        """The metric that was measured while a step is open."""
        self.size: int | None = None
        """The size that was decided for it; None before the first one."""
        self.past: list[Had] | None = []
        """The batches so far; None: unknown, or too many sizes to keep."""
        self.is_elsewhere = False
        """Whether the next batch may begin elsewhere than the sizes before it lead to: after
        skipped samples, or after a batch that the end of the run may have cut."""
        self.last: PlannedBatch | None = None
        """What was decided for the last finished batch."""
        self.end: Timestamp | None = None
        """The clock at the end of the run; None until then."""
        self._unmeasured = 0 if "noise" in run.bound_policy.reads else -1
        self._followed = one_metric(run.bound_policy.reads | run.metrics)

    def plans(self, *, is_ahead: bool) -> Plans:
        """Yield the rest of the run's batches, decided ahead of the run or at each step.

        Batches that share a decision share the plan of the first.
        """
        return chain.from_iterable(self._groups(is_ahead=is_ahead))

    def _groups(self, *, is_ahead: bool) -> Iterator[Plans]:
        now, state, signals = self._timer.timestamp, self.state, self.signals
        if "cost" in self._policy.reads and signals.cost_ratio is None:
            raise BatchSizeError.cannot(
                "follow c='time'",
                why="nothing has measured the seconds of a step; only a Trainer does",
                instead="write c= the number that 'stretto step-cost' or measure_step(...).c says",
            )
        while True:
            now, plan = next_step(self._horizon, self._policy, now, state, signals)
            if plan is None:
                self.end = now
                if self._followed is not None and not self.measured:
                    said = f"the run follows {self._followed!r}, which nothing has measured; pass "
                    said += "run.finish(signals=Signals(metric=...))"
                    warnings.warn(said, RuntimeWarning, stacklevel=5)
                return
            start, count = now.sample, 1 if is_ahead else self._count_alike(plan)
            yield zip(
                repeat(plan), range(start, start + count * plan.size, plan.size), strict=False
            )
            if is_ahead:
                now, state = after_batch(self._horizon, plan), plan.state
            else:
                now, state, signals = self._timer.timestamp, self.state, self.signals

    def _count_alike(self, plan: PlannedBatch) -> int:
        """Return how many batches have the same decision, this one included.

        A static policy keeps its size, and neither the epoch nor the run ends.
        """
        now, size, horizon = plan.timestamp, plan.size, self._horizon
        hold = self._policy.holds_until(now, plan.state) if self._policy.is_static else None
        is_whole = is_same(size, plan.decided) and not plan.skipped and not plan.ends_epochs
        if hold is None or horizon.dataset_num_samples is None or not is_whole:
            return 1
        batches = EqualBatches(horizon, now, size)
        # The last batch before the end of the epoch, or of the run, may be cut or end it.
        ends = [now.sample - now.sample_in_epoch + horizon.dataset_num_samples, horizon.end_sample]
        counts = [batches.count_before(end) - 1 for end in ends if end is not None]
        for axis, tick in (*hold.limits, horizon.end):
            count = batches.count_until(axis, tick)
            # Tokens are known only when they are counted, wall time when it has passed.
            if axis.unit is TimeUnit.TOKEN or count is None:
                return 1
            counts.append(count)
        return max(1, min(counts))

    def finish(self, plan: PlannedBatch, signals: Signals, size: int, tokens: int) -> None:
        """Record the decision for the finished batch and what that batch measured."""
        if self.noted is not None and signals.metric is None:
            signals = replace(signals, metric=self.noted)
        self.noted = None
        if signals.metric is not None:
            self.measured.append(signals.metric)
        if signals.noise_numerator is not None:
            # tr(Sigma) is that of a sample. A policy in tokens follows a noise scale in tokens.
            each = tokens / size if self._in_tokens else 1
            signals = replace(
                signals,
                num_samples=size if signals.num_samples is None else signals.num_samples,
                noise_numerator=signals.noise_numerator * each,
            )
        if self.signals.cost_ratio is not None:  # it stays until another one is measured
            signals = replace(signals, cost_ratio=signals.cost_ratio or self.signals.cost_ratio)
        is_new = self.is_elsewhere or (self.last is not None and self.last.row != plan.row)
        self.last = plan
        self.is_elsewhere = plan.timestamp.sample + size == self._horizon.end_sample
        if self.past is not None and not (
            self.past and is_same(self.past[-1].size, plan.decided) and not is_new
        ):
            self.past.append(Had(plan.timestamp.batch, plan.decided, plan.timestamp.sample))
            if len(self.past) > _MOST_SIZES:
                self.past = None
        self.state, self.signals, self.size = plan.state, signals, plan.decided
        if self._unmeasured >= 0:
            self._watch(signals)

    def note(self, metric: float) -> None:
        """Record a metric that was measured after the last batch; the last one counts."""
        if self.signals.metric is not None:
            del self.measured[-1:]
        self.signals = replace(self.signals, metric=metric)
        self.measured.append(float(metric))

    def check_shares(self, run: Prepared, part: RankShare) -> None:
        """Refuse a run with a later batch that is too small to be shared.

        Args:
            run: the run, as it continues.
            part: the ranks.

        Raises:
            PlanError: a later stage has fewer samples than there are ranks. If sizes are decided
                during the run: the smallest one (at the start) or the next one has.
        """
        now, bounds = self._timer.timestamp, run.bound_policy.bounds
        is_enough = bounds is not None and bounds[0] >= part.world_size
        if run.bound_policy.unit is TimeUnit.TOKEN or (run.facts.lengths is not None and is_enough):
            return  # a batch of few long samples leaves ranks a dummy, as the end of an epoch does
        if run.sizes is not None:
            plan_prepared(
                run,
                world_size=part.world_size,
                micro_batch_size=part.micro_batch_size,
                resume_at=now,
            )
        else:
            size = self._policy.decide(now, self.state, self.signals)[0] if now.batch else None
            check_least(
                run.bound_policy,
                world_size=part.world_size,
                size=size,
                row=run.facts.group or 1,
                each=run.tokens_each,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON; signals that are not finite become text."""
        past = self.past
        return {
            "policy": {"state": dict(self.state)},
            "signals": {name: _finite(one) for name, one in asdict(self.signals).items()},
            "size": self.size,
            "past": None
            if past is None
            else [[one.first, saved_size(one.size), one.sample] for one in past],
            **({"is_elsewhere": True} if self.is_elsewhere else {}),
            **self._unit,
            **{name: [*map(_finite, self.measured)] for name in self._run.metrics},
        }

    @property
    def _unit(self) -> dict[str, str]:
        """The unit of the sizes in the policy's state, unless it is samples."""
        unit = self._run.policy.unit
        return {} if unit is TimeUnit.SAMPLE else {"unit": str(unit)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> bool:
        """Continue from a record, without the check that noise is measured.

        Returns:
            False if the record has the state of another policy, so this one starts anew.
        """
        policy, now, state = self._policy, self._timer.timestamp, saved["policy"]["state"]
        is_own = policy.accepts(state) and saved.get("unit") == self._unit.get("unit")
        if is_own:
            _check_state(policy, now, state)
        known = {one.name: saved["signals"].get(one.name) for one in fields(Signals)}
        signals = {name: value if value is None else float(value) for name, value in known.items()}
        self._unmeasured = -1
        if not self._run.metrics:  # whether there was an evaluation before is not known
            self._followed = None
        self.restart(state if is_own else policy.start, Signals(**signals))
        self.size, self.past = saved.get("size"), _past(saved.get("past"), now)
        self.is_elsewhere = bool(saved.get("is_elsewhere"))
        for name in self._run.metrics:
            self.measured[:] = map(float, saved.get(name, ()))
        return is_own or not state

    def restart(self, state: PolicyState, signals: Signals) -> None:
        """Continue from the timer's present time."""
        self.state, self.signals = state, signals
        self.last = self.end = None

    def _watch(self, signals: Signals) -> None:
        """Warn once if the sizes follow the noise and no step measures it."""
        if signals.noise_numerator is not None:
            self._unmeasured = -1
            return
        self._unmeasured += 1
        if self._unmeasured == _UNMEASURED_STEPS:
            self._unmeasured = -1
            warnings.warn(
                f"the batch sizes follow the noise, and none of {_UNMEASURED_STEPS} steps has "
                "brought any: it takes two micro-batches or ranks with a sample each; in a loop of "
                "your own, call loader.finish(step, signals=Signals(...)) with what they measured",
                RuntimeWarning,
                stacklevel=5,  # the loop that asks the loader for steps
            )


@contextmanager
def reading_state() -> Iterator[None]:
    """Turn errors from reading a record into "the checkpoint is damaged".

    Raises:
        CheckpointError: it is.
    """
    try:
        yield
    except StrettoError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"the record is damaged ({type(error).__name__}: {error})"
        raise other_order(why, "pass what StepLoader.state_dict() returned") from error


def other_order(why: str, instead: str) -> CheckpointError:
    """Return the error for a position that these data do not have."""
    return CheckpointError.cannot("continue from the saved position", why=why, instead=instead)


def _past(saved: list[Any] | None, now: Timestamp) -> list[Had] | None:
    """Return the batches so far; None if the record does not have their sizes.

    Raises:
        ValueError: they are damaged.
    """
    if saved is None:
        return [] if now.batch == 0 else None
    past = [
        Had(at, checked_size(size) if type(size) is str else size, *place)
        for at, size, *place in saved
    ]
    firsts = [one.first for one in past]
    kinds = {(type(at), type(size), type(place)) for at, size, place in past}
    in_order = sorted(set(firsts)) == firsts and firsts[:1] == [0] * bool(now.batch)
    if not (in_order and kinds <= _KINDS and all(one.size >= 1 for one in past)):
        raise ValueError(f"{saved!r} are no batch sizes")
    return past


def _finite(value: float | None) -> float | str | None:
    """Return a number as JSON keeps it."""
    return value if value is None or math.isfinite(value) else repr(value)


def _check_state(bound: Bound, now: Timestamp, state: PolicyState) -> None:
    """Refuse a damaged state of a built-in policy.

    Raises:
        ValueError: a size in it is none.
    """
    sizes = [size for size in bound.sizes(state) if size is not None]
    if any(not isinstance(size, int) or size is True or size < 1 for size in sizes):
        raise ValueError(f"{sizes!r} are no batch sizes")
    if sizes and bound.reads and "loss" not in bound.reads:  # read by a user's function
        bound.decide(now, state, _LOUD)
