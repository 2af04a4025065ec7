"""`Decisions`: the batch that comes next, decided at the step; quick while a decision stands."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import final

from stretto.batching import NO_SIGNALS, BoundPolicy, PolicyState, Signals
from stretto.planning import StepPlan, next_step, walk
from stretto.timing import Horizon, Timer, Timestamp
from stretto.timing.epochs import end_tick, repeats_before

_UNMEASURED_STEPS = 20
"""After so many steps that bring none, missing signals are told."""


@final
class Decisions:
    """Takes the decisions of `stretto.planning.next_step`, ahead of the run or at each step.

    Most batches are like the one before. As long as the policy's decision stands, and neither the
    epoch nor the run ends, the next plan is the last one at a later time: 1 us instead of 4.

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
        axis, tick = end_tick(horizon)
        self._run_limit = (axis.read, tick)
        self._limits: tuple[tuple[Callable[[Timestamp], int], int], ...] = ()
        self._last: StepPlan | None = None
        self.end: Timestamp | None = None
        """The clock at the end of the run, once it is reached."""
        self._unmeasured = 0 if "noise" in policy.reads else -1

    def ahead(self) -> Iterator[StepPlan]:
        """Yield the batches of the run from here on, as far ahead as they are asked for."""
        self.end = yield from walk(
            self._horizon, self._policy, timestamp=self._timer.timestamp, state=self.state
        )

    def at_each_step(self) -> Iterator[StepPlan]:
        """Yield the batches of the run, each decided when it is asked for."""
        timer = self._timer
        while True:
            plan = self._next(timer.timestamp)
            if plan is None:
                return
            yield plan

    def finish(self, plan: StepPlan, signals: Signals, size: int) -> None:
        """Note what was decided for the batch that is finished, and what its samples measured."""
        if signals.noise_numerator is not None and signals.num_samples is None:
            signals = replace(signals, num_samples=size)
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
        self._last = self.end = None

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

    def _next(self, timestamp: Timestamp) -> StepPlan | None:
        last = self._last
        if last is not None:
            for read, tick in self._limits:
                if read(timestamp) >= tick:
                    break
            else:
                _, size, decided, _, _, state = last
                return tuple.__new__(StepPlan, (timestamp, size, decided, 0, 0, state))
        now, plan = next_step(self._horizon, self._policy, timestamp, self.state, self.signals)
        if plan is None:
            self.end = now
        else:
            self._remember(plan)
        return plan

    def _remember(self, plan: StepPlan) -> None:
        """Note until when the plan's batch can be repeated, if at all."""
        timestamp, size, decided, _, ends_epochs, state = plan
        hold = self._policy.holds_until(timestamp, state)
        self._last = None
        if hold is None or size != decided or ends_epochs:
            return
        limits = [self._run_limit, *((axis.read, tick) for axis, tick in hold.limits)]
        sample = repeats_before(self._horizon, timestamp, decided)
        if sample is not None:
            limits.insert(0, (attrgetter("sample"), sample))
        self._last, self._limits = plan, tuple(limits)
