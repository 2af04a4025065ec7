"""`Decisions`: the batch that comes next, decided at the step; quick while a decision stands."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import final

from stretto.batching import BoundPolicy, PolicyState, Signals
from stretto.batching.equal import end_tick
from stretto.planning import StepPlan, next_step
from stretto.timing import Horizon, Timestamp


@final
class Decisions:
    """Takes the decisions of `stretto.planning.next_step`, one batch at a time.

    Most batches are like the one before. As long as the policy's decision stands, and neither the
    epoch nor the run ends, the next plan is the last one at a later time: 1 us instead of 4.

    Args:
        horizon: the run.
        policy: the batch size policy, bound to it.
    """

    def __init__(self, horizon: Horizon, policy: BoundPolicy) -> None:
        self._horizon = horizon
        self._policy = policy
        axis, tick = end_tick(horizon)
        self._run_limit = (axis.read, tick)
        self._limits: tuple[tuple[Callable[[Timestamp], int], int], ...] = ()
        self._last: StepPlan | None = None
        self.end: Timestamp | None = None
        """The clock at the end of the run, once it is reached."""

    def next(self, timestamp: Timestamp, state: PolicyState, signals: Signals) -> StepPlan | None:
        """Decide the batch that starts at `timestamp`; None where the run is over.

        The calls follow the run, and `state` is the one of the decision before.
        """
        last = self._last
        if last is not None:
            for read, tick in self._limits:
                if read(timestamp) >= tick:
                    break
            else:
                _, size, decided, _, _, state = last
                return tuple.__new__(StepPlan, (timestamp, size, decided, 0, 0, state))
        now, plan = next_step(self._horizon, self._policy, timestamp, state, signals)
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
        horizon, last_sample = self._horizon, []
        if horizon.dataset_num_samples is not None:
            epoch_end = timestamp.sample - timestamp.sample_in_epoch + horizon.dataset_num_samples
            # Under `drop` the epoch also ends where no second batch would fit.
            last_sample.append(epoch_end - (2 if horizon.last_batch == "drop" else 1) * decided - 1)
        if horizon.end_sample is not None and horizon.last_batch != "drop":
            last_sample.append(horizon.end_sample - decided)
        if last_sample:
            limits.insert(0, (attrgetter("sample"), min(last_sample) + 1))
        self._last, self._limits = plan, tuple(limits)
