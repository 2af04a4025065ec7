"""`PlannedSteps`: a plan in a training loop that is not ours, such as Megatron's.

Such an engine asks how many micro-batches its next step has, and its `OptimizerParamScheduler` sets
the learning rate and the weight decay of each group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, cast, final

from stretto.batching.policy import checked_number
from stretto.integrations.shared import refuse
from stretto.planning import Plan

_LIMITS = {"lr": "max_lr", "weight_decay": "end_wd"}
"""What the engine's scheduler sets, and the setting of a group that its schedule multiplies."""


@final
class PlannedSteps:
    """The steps of a plan, checked for an engine that runs each in whole micro-batches.

    Args:
        plan: the plan of the whole run.
        micro_batch_size: the samples of a micro-batch.
        data_parallel_size: the ranks that share a batch.

    Raises:
        TrainingError: the engine cannot follow the plan.
        BatchSizeError: a number is not one of samples or ranks.
    """

    plan: Plan
    micro_batch_size: int
    unit: int
    """The samples of one micro-batch of each rank."""
    num_batches: int
    """The number of steps of the whole run."""
    whole: str
    """How a run is written that ends before the last batch of the plan, which may be cut."""

    def __init__(self, plan: Plan, micro_batch_size: int, data_parallel_size: int) -> None:
        micro = checked_number(micro_batch_size, "micro_batch_size")
        instead = "pass what plan(...) or build_plan(read_run_file('run.yaml')) returns"
        refuse((not isinstance(plan, Plan), f"follow {plan!r}", "it is no Plan", instead))
        self.unit = micro * checked_number(data_parallel_size, "data_parallel_size")
        _check_plan(plan, micro_batch_size, data_parallel_size)
        self.plan, self.micro_batch_size = plan, micro
        self.num_batches = cast(int, plan.num_batches)
        self.whole = f"max_duration='{plan.sample_at_batch(self.num_batches - 1)}sp'"

    def sizes_from(self, step: int) -> tuple[int, ...]:
        """Return the sizes of all steps from one on, in order, without repetitions.

        Raises:
            TrainingError: a size is not a multiple of the unit.
        """
        ahead = [one for one in self.plan.stages if one.first.batch + (one.batches or 0) > step]
        sizes = tuple(size for one in ahead for size in (one.size, *one.cut_sizes))
        for size in dict.fromkeys(sizes):
            self._check(size)
        return sizes

    @property
    def mean_size(self) -> int:
        """The least multiple of the unit with which as many steps read as many samples.

        Engines make data for so many samples in each step. With more, Megatron shuffles more epochs
        into one another, so some samples repeat too early.
        """
        total = self.plan.num_samples or 0
        return -(-total // (self.num_batches * self.unit)) * self.unit

    def check_growth(self, step: int) -> None:
        """Refuse sizes that shrink from a step on: Megatron's loop asserts that they grow.

        Raises:
            TrainingError: a size is smaller than one before.
        """
        sizes = [*self.sizes_from(step)]
        why = "Megatron's loop asserts that it grows"
        instead = f"write sizes that grow, and {self.whole} if only the last batch is cut"
        refuse((sizes != sorted(sizes), "let the batch size shrink", why, instead))

    def num_micro_batches(self, step: int) -> int:
        """Return how many micro-batches each rank has in a step.

        Raises:
            TrainingError: its size is not a multiple of the unit.
        """
        size = self.plan.sample_at_batch(step + 1) - self.plan.sample_at_batch(step)
        self._check(size)
        return size // self.unit

    def _check(self, size: int) -> None:
        why = f"it is not a multiple of {self.unit}, one micro-batch of each rank"
        instead = f"write multiples of {self.unit}, and {self.whole} if only the last batch is cut"
        refuse((size % self.unit, f"train on a batch of {size} samples", why, instead))

    def values(self, step: int) -> dict[str, float]:
        """Return the values of a step; after the last, those of the end."""
        is_over = step >= self.num_batches
        return (self.plan.values_at_end or {}) if is_over else self.plan.values_at(step)

    def drive(self, scheduler: Any, step_of: Callable[[int], int]) -> None:
        """Make an `OptimizerParamScheduler` of the engine read the plan, and set the values.

        Groups keep their multipliers: a value is a factor of `max_lr` or `end_wd` of the group.
        A plan with a base has absolute values, which are divided by the base first.

        Args:
            scheduler: the engine's. Its `step` sets the values of all groups.
            step_of: returns the number of a step for what the scheduler counts in `num_steps`.

        Raises:
            TrainingError: the scheduler or a group says something else than the plan.
        """
        _check_scheduler(self.plan, scheduler)
        # The scheduler asks for each group.
        values = lru_cache(maxsize=4)(lambda count: self.values(step_of(count)))

        def value(name: str, group: Any = None) -> float:
            scale = _scale(self.plan, name, scheduler, group or {})
            return values(scheduler.num_steps).get(name, 1.0) * scale

        scheduler.get_lr, scheduler.get_wd = (partial(value, name) for name in _LIMITS)
        scheduler.step(0)


def setting(name: str, value: object) -> str:
    """Return how a setting is written, in Python and as an argument.

    >>> setting("train_iters", 100)
    'write train_iters=100 (--train-iters 100)'
    """
    return f"write {name}={value} (--{name.replace('_', '-')} {value})"


def _own(name: str, scheduler: Any, group: Any) -> float:
    """Return a setting of a group; that of the scheduler if the group has none."""
    return float(getattr(scheduler, name) if group.get(name) is None else group[name])


def _scale(plan: Plan, name: str, scheduler: Any, group: Any) -> float:
    """Return the factor of a group for a value of the plan.

    Raises:
        TrainingError: the base of the plan is not the scheduler's. A checkpoint may change that.
    """
    limit, base = _LIMITS[name], plan.base.get(name, 1.0)
    if name in plan.base and not base == (known := getattr(scheduler, limit)) != 0:
        why = f"the plan's base is {base} and {limit} of the scheduler is {known}"
        instead = setting(name, base) if base else "make the plan without this base"
        refuse((True, f"follow {name} of the plan", why, instead))
    return _own(limit, scheduler, group) / base


def _check_plan(plan: Plan, micro: int, ranks: int) -> None:
    """Refuse a plan whose steps an engine cannot run."""
    what, end, theirs = "follow this plan", plan.end, (plan.world_size, plan.micro_batch_size)
    skips = not plan.is_exact or (end is not None and plan.num_samples != end.sample)
    differ = plan.horizon.lengths is not None or any(one.row > 1 for one in plan.stages)
    is_other = theirs[0] not in (1, ranks) or theirs[1] not in (None, micro)
    why = f"it is for {theirs[0]} ranks with micro-batches of {theirs[1]}"
    length, known = "write max_duration in 'ba' or 'sp'", plan.values_at_end or {}
    carry = "write last_batch='carry', as Horizon.endless does"
    others = ", ".join(one for one in plan.scheduled if one not in _LIMITS or one not in known)
    sets = "the engine sets lr and weight_decay of all groups, to values known before the run"
    refuse(
        (end is None, what, "only the run knows where it ends", length),
        (differ, what, "its samples, or rows of them, differ in length", "write sizes in samples"),
        (skips, what, "the end of an epoch may cut a step or leave out samples", carry),
        (is_other, what, why, f"plan for {ranks} ranks with micro-batches of {micro}"),
        (others, f"follow {others} of the plan", sets, "leave it out"),
    )


def _check_scheduler(plan: Plan, scheduler: Any) -> None:
    """Refuse settings of a scheduler that a plan would replace without a word."""
    end, scheduled = plan.values_at_end or {}, plan.scheduled
    groups = [{}, *scheduler.optimizer.param_groups]
    moves = scheduler.lr_decay_style != "constant" or scheduler.lr_warmup_steps > 0
    limits = ("start_wd", "end_wd")
    rises = any(len({_own(name, scheduler, one) for name in limits}) > 1 for one in groups)
    own, lr = "it counts steps of one batch size", "write schedules={'lr': ...} in the plan"
    decay = "write schedules={'weight_decay': ...} in the plan, or an equal start_wd"
    refuse(
        ("lr" not in scheduled and moves, "keep the learning rate of the scheduler", own, lr),
        ("weight_decay" not in scheduled and rises, "keep its weight decay", own, decay),
    )
    for group in groups:
        _scale(plan, "weight_decay", scheduler, group)
        last = end.get("lr", 1.0) * _scale(plan, "lr", scheduler, group)
        least = _own("min_lr", scheduler, group)
        why = f"the plan ends at a learning rate of {last:.4g}"
        instead = "write min_lr=0, or a schedule that ends there, such as Cosine(end=0.1)"
        refuse((last < least * (1 - 1e-9), f"follow min_lr={least:.4g}", why, instead))
