"""A learning rate that goes by the batch size: whether all else in the run goes with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stretto.batching.coupled.coupling import CoupledSchedule, Coupling
from stretto.batching.policy import BatchSizePolicy
from stretto.batching.rules import LearningRateRule, NoRule, is_learning_rate
from stretto.errors import BatchSizeError
from stretto.schedules import Product, Schedule


def couplings_in(schedule: Schedule) -> Iterator[Coupling]:
    """Yield the pairs whose schedule is `schedule`, or one of those that it multiplies.

    >>> from stretto.batching import Seesaw
    >>> pair = Seesaw(1.0, 16)
    >>> list(couplings_in(pair.schedule * 0.5)) == [pair], list(couplings_in(pair.base))
    (True, [])
    """
    if isinstance(schedule, Product):
        for one in schedule.schedules:
            yield from couplings_in(one)
    elif isinstance(schedule, CoupledSchedule) and schedule.follows_size:
        yield schedule.coupling


def check_pairs(
    schedules: Mapping[str, Schedule],
    *,
    policy: BatchSizePolicy | None = None,
    rule: LearningRateRule | None = None,
) -> None:
    """Refuse what does not go with the schedules that follow a batch size by themselves.

    Args:
        schedules: all that the run has, by name.
        policy: its batch sizes, which must be those of the same pair; None: unknown.
        rule: its learning rate rule, which would count the size twice.

    Raises:
        BatchSizeError: there is another batch size or a rule.
    """
    pairs = [(name, one) for name, each in schedules.items() for one in couplings_in(each)]
    for name, pair in pairs:
        is_rate = is_learning_rate(name)  # a rule leaves all else alone
        if is_rate and rule is not None and not isinstance(rule, NoRule):
            raise BatchSizeError.cannot(
                f"follow the batch size by {rule!r}",
                why=f"{pair!r} says itself how the learning rate goes with it",
                instead="leave the rule out",
            )
        if policy is not None and policy != pair.policy:
            raise BatchSizeError.cannot(
                f"use the schedule of {pair!r} with batch sizes of {policy!r}",
                why="its learning rate goes by the sizes of the same pair",
                instead="pass batch_size=pair.policy and schedules={'lr': pair.schedule} of "
                "one pair, or pair.base for constant batches",
            )
