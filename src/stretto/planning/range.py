"""`plan_range`: what is known beforehand of a run that decides its batch sizes as it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

from stretto.batching import BatchSizePolicy, PolicyLike, RuleLike, as_policy, as_rule, check_pairs
from stretto.errors import PlanError, cannot
from stretto.planning.clock import unplannable
from stretto.planning.plan import Plan, plan
from stretto.planning.sizes import resolve_horizon
from stretto.planning.stages import check_least
from stretto.schedules import ScheduleLike, as_schedule
from stretto.timing import Horizon, TimeLike, Trigger, parse_trigger


@final
@dataclass(frozen=True, slots=True, eq=False)
class PlanRange:
    """A run that decides its sizes as it goes, at the ends of what it may decide. A frozen value.

    Made by `plan_range`. Every batch of the run has a size between those of the two plans, so it
    has at most the batches of one and at least those of the other.

    >>> from stretto.batching import NoiseScale
    >>> planned = plan_range(Horizon("640sp"), NoiseScale(8, 32))
    >>> planned.least.num_batches, planned.largest.num_batches
    (80, 20)
    """

    policy: BatchSizePolicy
    least: Plan
    """The run if all its batches had the least size that the policy may decide."""
    largest: Plan
    """The run if all its batches had the largest."""

    @property
    def sizes(self) -> tuple[int, int]:
        """The least and the largest size that the policy may decide, in samples."""
        return self.least.stages[0].size, self.largest.stages[0].size

    @property
    def num_batches(self) -> tuple[int, int] | None:
        """The fewest and the most batches that the run may have; None where only it can tell."""
        fewest, most = self.largest.num_batches, self.least.num_batches
        if not self.least.is_exact and fewest != most:
            return None
        return None if fewest is None or most is None else (fewest, most)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but may not be meant, a line each."""
        both = [line for line in self.least.warnings if line in self.largest.warnings]
        return (*both, *self._own(self.least, both), *self._own(self.largest, both))

    @staticmethod
    def _own(planned: Plan, both: list[str]) -> Iterator[str]:
        size = planned.stages[0].size
        yield from (f"at {size:,}: {line}" for line in planned.warnings if line not in both)

    def to_json(self) -> dict[str, object]:
        """Return both plans as plain values that JSON keeps exactly.

        >>> from stretto.batching import NoiseScale
        >>> sorted(plan_range(Horizon("640sp"), NoiseScale(8, 32)).to_json())
        ['batch_size', 'largest', 'least']
        """
        return {
            "batch_size": repr(self.policy),
            "least": self.least.to_json(),
            "largest": self.largest.to_json(),
        }

    def table(self) -> str:
        """Return the range as text of at most 100 columns."""
        from stretto.planning.table import range_table

        return range_table(self)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        least, largest = self.sizes
        return f"<PlanRange of {self.least.horizon.max_duration}: batches of {least} to {largest}>"


def plan_range(
    horizon: Horizon,
    policy: PolicyLike,
    *,
    world_size: int = 1,
    micro_batch_size: int | None = None,
    schedules: Mapping[str, ScheduleLike] | None = None,
    base: Mapping[str, float] | None = None,
    rule: RuleLike | None = None,
    triggers: Mapping[str, Trigger | TimeLike] | None = None,
    tracks_tokens: bool = True,
) -> PlanRange:
    """Plan the ends of a run whose policy decides from measurements: its least and largest sizes.

    What could not work is refused, as by `plan`.

    >>> from stretto.batching import NoiseScale
    >>> planned = plan_range(Horizon("2ep", dataset_num_samples=1000), NoiseScale(8, 64))
    >>> planned.sizes, planned.num_batches
    ((8, 64), (32, 250))

    Args:
        horizon: as for `plan`, like all that follow.
        policy: the batch sizes, which the run decides.
        world_size: how many ranks share a batch.
        micro_batch_size: the most samples that a rank takes at once.
        schedules: a schedule for each hyper-parameter.
        base: what the schedules' factors multiply.
        rule: how learning rates follow the batch size.
        triggers: names and times of what happens now and then.
        tracks_tokens: whether the data can count the tokens of a batch.

    Raises:
        PlanError: the sizes are known before the run, so `plan` tells more; or not even their
            bounds are (see `decided_between`); or the ranks cannot share the least of them.
        BatchSizeError: the policy cannot be followed on this run, or not with these schedules.
        ConversionError: a time needs a fact that is not known, such as the batch size.
        ScheduleError: a schedule does not fit into the run.
    """
    policy = as_policy(policy)
    read = {name: as_schedule(schedule) for name, schedule in (schedules or {}).items()}
    rule = None if rule is None else as_rule(rule)
    check_pairs(read, policy=policy, rule=rule)
    bounds = decided_between(horizon, policy)
    if bounds is None:
        is_known = _is_known(horizon, policy)
        raise PlanError(
            cannot(
                f"plan a range of sizes for {policy!r}",
                why="they are known before the run"
                if is_known
                else "it does not say between which they are",
                instead="write plan(...) with the same arguments"
                if is_known
                else "run it without a plan, or give it a property 'bounds'",
            )
        )
    check_least(policy.bind(horizon.with_batch_sizes(None)), world_size=world_size)
    unknown = resolve_horizon(horizon, policy)
    for schedule in read.values():
        schedule.bind(unknown)
    for trigger in (triggers or {}).values():
        parse_trigger(trigger).bind(unknown)
    end = partial(
        plan,
        horizon,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        schedules=read,
        base=base,
        rule=rule,
        triggers=triggers,
        tracks_tokens=tracks_tokens,
    )
    return PlanRange(policy, end(bounds[0]), end(bounds[1]))


def decided_between(horizon: Horizon, policy: PolicyLike) -> tuple[int, int] | None:
    """Return the least and the largest size of a policy of which no more is known before the run.

    None where every size is, or not even the bounds are.

    >>> from stretto.batching import NoiseScale
    >>> decided_between(Horizon("1ep"), NoiseScale(8, 64)), decided_between(Horizon("1ep"), 8)
    ((8, 64), None)
    """
    policy = as_policy(policy)
    run = horizon.with_batch_sizes(None)
    return None if _is_known(run, policy) else policy.bind(run).bounds


def _is_known(horizon: Horizon, policy: BatchSizePolicy) -> bool:
    """Return whether every size is known before the run, or what is missing is a fact of it."""
    run = horizon.with_batch_sizes(None)
    bound = policy.bind(run)
    return bound.is_coupled or unplannable(run, bound) is None
