"""`Seesaw` and `IncreaseInsteadOfDecay`: a decaying learning rate as a growing batch size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from stretto.batching.coupled.coupling import CoupledSchedule, Coupling
from stretto.batching.parse import PolicyLike, as_policy
from stretto.batching.policy import BatchSizePolicy
from stretto.batching.rules import LearningRateRule, NoRule, is_learning_rate
from stretto.batching.written import COUPLED, written
from stretto.errors import BatchSizeError
from stretto.schedules import Product, Schedule


@written(COUPLED, "seesaw", "size")
@final
@dataclass(frozen=True, slots=True, repr=False)
class Seesaw(Coupling):
    """Grow the batch while the learning rate decays by only the root of what it would have.

    Wherever a schedule would divide the learning rate by `a`, divide it by `sqrt(a)` and multiply
    the batch by `a`: about the same loss at the same samples in fewer optimizer steps, for Adam
    and normalised SGD, as long as the batch stays below the critical size. Up to the peak of the
    schedule nothing changes.

    Formula: `rate(t) = base(t) * sqrt(size(t) / reference)`; with `factor` `a`, where the schedule
    has been cut by `c(t)` since its peak and `k = floor(log_a(1 / c(t)))`, `size(t) = size * a**k`
    and `base(t) = peak * a**-k` (`smooth`: the schedule itself). With `"continuous"`,
    `size(t) = floor(size / c(t))`. Source: Meterez et al. 2025, Seesaw (arXiv 2510.14717),
    algorithm 1.

    >>> from stretto import Horizon, Linear, Seesaw, plan
    >>> pair = Seesaw(Linear(1, 0), 8)
    >>> run = plan(Horizon("640sp"), pair.policy, schedules={"lr": pair.schedule})
    >>> [(stage.size, stage.batches, round(stage.values["lr"].first, 3)) for stage in run.stages]
    [(8, 40, 1.0), (16, 10, 0.707), (32, 3, 0.5), (64, 1, 0.354)]

    Args:
        decay: a schedule that falls after an optional warm-up, with times in samples, epochs,
            tokens or fractions of the run.
        size: the size until the schedule has fallen, or a warm-up of the batch: steps or a ramp,
            whose sizes are multiplied by the growth.
        factor: by how much the batch grows at once, above 1; `"continuous"`: as soon as another
            sample (or `multiple_of`) fits in.
        smooth: let the learning rate follow the curve between two steps of the size, and rise
            where the size does; left out, it moves in steps, too.
        maximum: the size beyond which the learning rate alone falls; left out, 64 times the size
            before the growth.
        multiple_of: only sizes that are multiples of this, at least one: rounded down.
        reference: the size that the schedule is meant for; left out, that of the end of the
            warm-up of the batch. Smaller sizes before have a smaller learning rate; larger ones
            need a reference as large.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, or there is no such factor; at
            binding, the schedule or the sizes do not allow it.
        ScheduleError: `decay` is not a schedule.
    """

    power = 0.5


@written(COUPLED, "increase_instead_of_decay", "size")
@final
@dataclass(frozen=True, slots=True, repr=False)
class IncreaseInsteadOfDecay(Coupling):
    """Grow the batch where the learning rate would decay, and leave the learning rate as it is.

    Wherever a schedule would divide the learning rate by `a`, multiply the batch by `a`: with SGD,
    about the same loss at the same samples in fewer optimizer steps. With Adam it grows the batch
    too fast; use `Seesaw`. From the `maximum` on it is the learning rate that decays.

    Formula: `rate(t) = base(t) * size(t) / reference`, with sizes as for `Seesaw`. Source: Smith et
    al. 2018, "Don't Decay the Learning Rate, Increase the Batch Size" (arXiv 1711.00489).

    >>> from stretto import Horizon, plan
    >>> from stretto.batching import IncreaseInsteadOfDecay
    >>> from stretto.schedules import MultiStep
    >>> pair = IncreaseInsteadOfDecay(MultiStep(["30%", "60%"], 0.2), 32, factor=5, maximum=200)
    >>> run = plan(Horizon("9600sp"), pair.policy, schedules={"lr": pair.schedule})
    >>> [(stage.size, stage.batches, round(stage.values["lr"].last, 3)) for stage in run.stages]
    [(32, 90, 1.0), (160, 18, 1.0), (200, 20, 0.25)]

    Args:
        decay: a schedule that falls after an optional warm-up, with times in samples, epochs,
            tokens or fractions of the run.
        size: the size until the schedule has fallen, or a warm-up of the batch: steps or a ramp,
            whose sizes are multiplied by the growth.
        factor: by how much the batch grows at once, above 1; `"continuous"`: as soon as another
            sample (or `multiple_of`) fits in, which is the way for a schedule that has steps.
        smooth: let the learning rate follow the curve between two steps of the size, and rise
            where the size does; left out, it moves in steps, too.
        maximum: the size beyond which the learning rate alone falls; left out, 64 times the size
            before the growth.
        multiple_of: only sizes that are multiples of this, at least one: rounded down.
        reference: the size that the schedule is meant for; left out, that of the end of the
            warm-up of the batch. Smaller sizes before have a smaller learning rate; larger ones
            need a reference as large.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, or there is no such factor; at
            binding, the schedule or the sizes do not allow it.
        ScheduleError: `decay` is not a schedule.
    """

    power = 1.0


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


def paired(
    sizes: PolicyLike | Coupling, schedules: Mapping[str, Any], rule: object = None
) -> tuple[BatchSizePolicy, dict[str, Any]]:
    """Return batch sizes and schedules, of which a pair such as `Seesaw` is both.

    Args:
        sizes: batch sizes, or a pair.
        schedules: by hyper-parameter, a schedule or several that multiply.
        rule: the learning rate rule; with one, the sizes of a pair need no schedule.

    >>> from stretto.schedules import Cosine
    >>> policy, schedules = paired(Seesaw(Cosine(), 16, maximum=64), {})
    >>> list(schedules)
    ['lr']

    Raises:
        BatchSizeError: there is another schedule of the learning rate beside a pair, or only the
            sizes of one.
    """
    rates = [name for name in schedules if is_learning_rate(name)]
    if isinstance(sizes, Coupling):
        if rates:
            raise BatchSizeError.cannot(
                f"use the schedule of {rates[0]!r} with {sizes!r}",
                why="the pair has the schedule of the learning rate",
                instead=f"leave schedules={{{rates[0]!r}: ...}} out",
            )
        return sizes.policy, {**schedules, "lr": sizes.schedule}
    policy = as_policy(sizes)
    found = [
        coupling
        for each in schedules.values()
        for one in (each if isinstance(each, (list, tuple)) else [each])
        if isinstance(one, Schedule)
        for coupling in couplings_in(one)
    ]
    if policy.is_coupled and not found and rule is None:
        raise BatchSizeError.cannot(
            f"use {policy!r} without its schedule",
            why="the learning rate would not follow these sizes",
            instead="pass the pair itself: batch_size=Seesaw(schedule, 16, maximum=256)",
        )
    return policy, dict(schedules)
