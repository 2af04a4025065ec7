"""Which batch comes next: cut, carried or skipped at the end of an epoch, and the run's end.

Plans, the data loader and the trainer all take their batches from here, so they agree.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import NamedTuple

from stretto.batching.policy import BoundPolicy, PolicyState
from stretto.batching.signals import NO_SIGNALS, Signals
from stretto.errors import Argument, BatchSizeError, PlanError, Text
from stretto.timing import Horizon, Timestamp, TimeUnit, advance
from stretto.timing.epochs import cut, is_countable, next_epoch, outgrows_epoch, rollover


class StepPlan(NamedTuple):
    """One batch before it is run."""

    timestamp: Timestamp
    """The clock at its start."""
    size: int
    """Its samples: the decided size, cut if the epoch or the run ends inside it."""
    decided: int
    """The size that the policy decided; learning rate rules use this one."""
    skipped: int
    """Samples skipped right before it because it does not fit into the rest of the epoch
    (`last_batch="drop"`). Only when the size has just grown: otherwise the clock skips them at
    the end of the epoch's last batch."""
    ends_epochs: int
    """How many epochs end inside it or at its end."""
    state: PolicyState
    """The policy's state after deciding."""


def next_step(
    horizon: Horizon,
    policy: BoundPolicy,
    timestamp: Timestamp,
    state: PolicyState,
    signals: Signals = NO_SIGNALS,
) -> tuple[Timestamp, StepPlan | None]:
    """Decide the next batch; there is none if the run is over.

    >>> from stretto.batching import Fixed
    >>> horizon = Horizon("1ep", dataset_num_samples=20)
    >>> policy = Fixed(16).bind(horizon)
    >>> now, step = next_step(horizon, policy, Timestamp(), policy.start())
    >>> step.size
    16
    >>> now, step = next_step(horizon, policy, advance(horizon, now, step.size), step.state)
    >>> step.size, step.decided
    (4, 16)

    Returns:
        The clock at the start of the batch or at the end of the run, and the batch or None. The
        clock is `timestamp`, unless `last_batch="drop"` skips samples because the size has just
        outgrown the rest of the epoch.

    Raises:
        BatchSizeError: under `drop`, a batch is larger than an epoch.
    """
    if horizon.is_done(timestamp):
        return timestamp, None
    decided, decided_state = policy.decide(timestamp, state, signals)
    before = timestamp.sample
    if outgrows_epoch(horizon, timestamp, decided):
        if timestamp.sample_in_epoch == 0:
            raise larger_than_epoch(horizon, decided, is_coupled=policy.is_coupled)
        timestamp = next_epoch(horizon, timestamp)
        if horizon.is_done(timestamp):
            return timestamp, None
        # The batch starts at a later position, so the policy decides again.
        decided, decided_state = policy.decide(timestamp, state, signals)
        if outgrows_epoch(horizon, timestamp, decided):
            raise larger_than_epoch(horizon, decided, is_coupled=policy.is_coupled)
    size = cut(horizon, timestamp, decided)
    ends = rollover(horizon, timestamp.sample_in_epoch + size, decided).epochs
    skipped = timestamp.sample - before
    return timestamp, StepPlan(timestamp, size, decided, skipped, ends, decided_state)


def larger_than_epoch(horizon: Horizon, size: int, *, is_coupled: bool) -> BatchSizeError:
    """Return the error for a batch larger than an epoch."""
    num_samples = horizon.dataset_num_samples
    bound = Argument("at_most", num_samples, python=f"AtMost(policy, {num_samples})")
    also = ""
    if is_coupled:
        bound = Argument("maximum", num_samples)
        also = ", with no more samples than that to begin with,"
    return BatchSizeError.cannot(
        (f"take a batch of {size} samples with ", Argument("last_batch", "drop")),
        why=f"an epoch has only {num_samples}, so each would be dropped",
        instead=("write ", bound, f"{also} or ", Argument("last_batch", "carry")),
    )


def walk(
    horizon: Horizon,
    policy: BoundPolicy,
    *,
    timestamp: Timestamp | None = None,
    state: PolicyState | None = None,
) -> Generator[StepPlan, None, Timestamp]:
    """Yield every batch of the run from `timestamp` on; return the clock at its end.

    It never ends if the length of the run is a wall time or a number of tokens not known before.

    >>> from stretto.batching import DoublingRamp
    >>> horizon = Horizon("40sp")
    >>> [step.size for step in walk(horizon, DoublingRamp(4, 16, "50%").bind(horizon))]
    [4, 4, 4, 8, 16, 4]

    Args:
        horizon: the run.
        policy: the batch size policy, bound to it.
        timestamp: where to continue; by default, the start of the run.
        state: the policy's state there.

    Raises:
        PlanError: the sizes are not known before the run.
        BatchSizeError: under `drop`, a batch is larger than an epoch.
    """
    check_plannable(horizon, policy)
    now = Timestamp() if timestamp is None else timestamp
    state = policy.start() if state is None else state
    while True:
        now, step = next_step(horizon, policy, now, state)
        if step is None:
            return now
        state = step.state
        yield step
        now = advance(horizon, now, step.size)


def check_plannable(horizon: Horizon, policy: BoundPolicy) -> None:
    """Refuse a policy whose sizes are not known before the run.

    Raises:
        PlanError: it follows measurements, the wall clock, or counts that are not known before.
    """
    unknown = unknown_count(horizon, {horizon.axis(unit).unit for unit in policy.units})
    why, instead = _UNKNOWN.get(unknown or "", ("", ""))
    if unknown is None and not policy.is_static:
        why, instead = "they follow what the run measures", "run it without a plan"
        if policy.bounds is not None:
            least, most = policy.bounds
            instead += f", or plan it once with batches of {least} and once of {most}"
    if why:
        raise PlanError.cannot("know the batch sizes before the run", why=why, instead=instead)


def unknown_count(horizon: Horizon, units: Iterable[TimeUnit]) -> str | None:
    """Return in words which unit is known only during the run; None: all are known before.

    >>> unknown_count(Horizon("1ep"), [TimeUnit.SAMPLE, TimeUnit.SECOND])
    'the wall clock'
    """
    return next((_COUNTS[unit] for unit in sorted(units) if not is_countable(horizon, unit)), None)


_COUNTS = {TimeUnit.EPOCH: "epochs", TimeUnit.TOKEN: "tokens", TimeUnit.SECOND: "the wall clock"}
_UNKNOWN: dict[str, tuple[str, Text]] = {
    "epochs": (
        "they follow epochs, and the number of samples in the data set is not known",
        ("set ", Argument("dataset_num_samples"), ", or write the times in 'sp' or 'ba'"),
    ),
    "tokens": (
        "they follow tokens, and how many a sample has is not known",
        (
            "set ",
            Argument("tokens_per_sample"),
            " if all have equally many, or write the times in 'sp', 'ep' or 'ba'",
        ),
    ),
    "the wall clock": (
        "they follow the wall clock",
        "write the times in 'sp', 'ep' or 'ba'",
    ),
}
