"""`Decisions`: the batch that comes next, decided at the step; quick while a decision stands."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from typing import final

from stretto.batching import NO_SIGNALS, BoundPolicy, PolicyState, Signals
from stretto.data.fetching.feed import Plans
from stretto.planning import StepPlan, next_step, walk
from stretto.timing import Horizon, Timer, Timestamp, TimeUnit
from stretto.timing.epochs import end_tick, equal_batches, repeats_before

_UNMEASURED_STEPS = 20
"""After so many steps that bring none, missing signals are told."""


@final
class Decisions:
    """Takes the decisions of `stretto.planning.next_step`, ahead of the run or at each step.

    Most batches are like the one before. While a static policy keeps its size, and neither the
    epoch nor the run ends, all of them share one plan: the first one's.

    It knows nothing of the loader, so that a loader which is dropped takes its workers with it.

    Args:
        horizon: the run.
        policy: the batch size policy, bound to it.
        timer: where the run stands.
    """

    def __init__(self, horizon: Horizon, policy: BoundPolicy, timer: Timer) -> None:
        self._horizon = horizon
        self._policy = policy
        self._timer = timer
        self.state: PolicyState = policy.start()
        """The policy's state after the last batch that was finished."""
        self.signals = NO_SIGNALS
        """What that batch measured."""
        self.size: int | None = None
        """The size that was decided for it; None before the first one."""
        self.last: StepPlan | None = None
        """What was decided for the last batch that was finished."""
        self.end: Timestamp | None = None
        """The clock at the end of the run, once it is reached."""
        self._unmeasured = 0 if "noise" in policy.reads else -1

    def ahead(self) -> Plans:
        """Yield the batches of the run from here on, as far ahead as they are asked for."""
        timestamp = self._timer.timestamp
        plans = walk(self._horizon, self._policy, timestamp=timestamp, state=self.state)
        while True:
            try:
                plan = next(plans)
            except StopIteration as stop:
                self.end = stop.value
                return
            yield plan, plan.timestamp.sample

    def at_each_step(self) -> Plans:
        """Yield the batches of the run, each decided when it is asked for."""
        return chain.from_iterable(self._alike())

    def _alike(self) -> Iterator[Plans]:
        """Yield batches that need only one decision, until there is none."""
        while True:
            now, plan = next_step(
                self._horizon, self._policy, self._timer.timestamp, self.state, self.signals
            )
            if plan is None:
                self.end = now
                return
            start, size = plan.timestamp.sample, plan.size
            stop = start + self._count(plan) * size
            yield zip(repeat(plan), range(start, stop, size), strict=False)

    def finish(self, plan: StepPlan, signals: Signals, size: int) -> None:
        """Note what was decided for the batch that is finished, and what its samples measured."""
        if signals.noise_numerator is not None and signals.num_samples is None:
            signals = replace(signals, num_samples=size)
        self.last = plan
        self.state, self.signals, self.size = plan.state, signals, plan.decided
        if self._unmeasured >= 0:
            self._watch(signals)

    def decide(self) -> int:
        """Return the size that comes next."""
        return self._policy.decide(self._timer.timestamp, self.state, self.signals)[0]

    def told(self) -> Mapping[str, float]:
        """Return what the policy went by when it decided that batch, by name."""
        return self._policy.told(self.state)

    def resume(self, state: PolicyState, signals: Signals) -> None:
        """Go on from a record; whether noise is measured, that run has found out."""
        self._unmeasured = -1
        self.restart(state, signals)

    def restart(self, state: PolicyState, signals: Signals) -> None:
        """Go on from where the timer stands now."""
        self.state, self.signals = state, signals
        self.last = self.end = None

    def _watch(self, signals: Signals) -> None:
        """Warn once where the sizes are to follow what no step brings."""
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

    def _count(self, plan: StepPlan) -> int:
        """How many batches like this one follow each other, itself included."""
        timestamp, size, decided, skipped, ends_epochs, state = plan
        horizon, hold = self._horizon, self._policy.holds_until(timestamp, state)
        last = repeats_before(horizon, timestamp, size)
        is_whole = size == decided and not skipped and not ends_epochs
        if hold is None or horizon.dataset_num_samples is None or last is None or not is_whole:
            return 1
        counts = [-(-(last - timestamp.sample) // size)]
        batches = equal_batches(horizon, timestamp, size)
        for axis, tick in (*hold.limits, end_tick(horizon)):
            count = batches.count_until(axis, tick)
            # Tokens are known only when they are counted, wall time when it has passed.
            if axis.unit is TimeUnit.TOKEN or count is None:
                return 1
            counts.append(count)
        return max(1, min(counts)) if self._policy.is_static else 1
