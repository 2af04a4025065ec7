"""Where each batch of a run begins: cut, carried or skipped at the end of an epoch.

Plans, the data loader and the trainer all take their batches from here, so they agree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, final

from stretto.batching import BatchSizePolicy, Hold, PolicyLike, Tokens, as_policy
from stretto.batching.pack import num_passes
from stretto.batching.policy import NO_SIGNALS, Bound, PolicyState, Signals
from stretto.batching.wrappers import InSamples
from stretto.errors import BatchSizeError, ConversionError, PlanError, fact_text
from stretto.schedules.fields import fill
from stretto.timing import Horizon, Timestamp, TimeUnit, advance
from stretto.timing.epochs import (
    cut,
    is_countable,
    next_epoch,
    outgrows_epoch,
)
from stretto.timing.horizon import EqualBatches

_NO_VALUES: Mapping[str, float] = MappingProxyType({})


class PlannedBatch(NamedTuple):
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
    accumulation: int | None = 1
    """Micro-batches of each rank; only in a plan."""
    values: Mapping[str, float] = _NO_VALUES
    """The hyper-parameters; only in a plan."""
    row: int = 1
    """How many samples are joined to each row."""


def next_step(
    horizon: Horizon,
    policy: Bound,
    timestamp: Timestamp,
    state: PolicyState,
    signals: Signals = NO_SIGNALS,
) -> tuple[Timestamp, PlannedBatch | None]:
    """Decide the next batch; there is none if the run is over.

    >>> from stretto.batching import Fixed
    >>> horizon = Horizon("1ep", dataset_num_samples=20)
    >>> policy = Fixed(16).bind(horizon)
    >>> now, step = next_step(horizon, policy, Timestamp(), policy.start)
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
    if policy.unit is TimeUnit.TOKEN and horizon.lengths is None:
        most = cut(horizon, timestamp, decided)  # only reading tells how many samples these are
        return timestamp, PlannedBatch(timestamp, most, Tokens(decided), 0, 0, decided_state)
    before = timestamp.sample
    if outgrows_epoch(horizon, timestamp, decided):
        if timestamp.sample_in_epoch == 0:
            raise larger_than_epoch(horizon, decided)
        timestamp = next_epoch(horizon, timestamp)
        if horizon.is_done(timestamp):
            return timestamp, None
        # The batch starts at a later position, so the policy decides again.
        decided, decided_state = policy.decide(timestamp, state, signals)
        if outgrows_epoch(horizon, timestamp, decided):
            raise larger_than_epoch(horizon, decided)
    size = cut(horizon, timestamp, decided)
    ends = advance(horizon, timestamp, size).epoch - timestamp.epoch
    skipped = timestamp.sample - before
    step = PlannedBatch(timestamp, size, decided, skipped, ends, decided_state)
    return timestamp, step if policy.row_at is None else step._replace(row=policy.row_at(timestamp))


def larger_than_epoch(horizon: Horizon, size: int) -> BatchSizeError:
    """Return the error for a batch larger than an epoch."""
    most = horizon.dataset_num_samples
    return BatchSizeError.cannot(
        f"take a batch of {size} samples with last_batch='drop'",
        why=f"an epoch has only {most}, so each would be dropped",
        instead=f"write AtMost(policy, {most}) or last_batch='carry'",
    )


def on_data(horizon: Horizon, policy: BatchSizePolicy) -> BatchSizePolicy:
    """Return a policy that decides in samples if equal samples allow it, else as it is."""
    each = horizon.tokens_per_sample
    is_equal = policy.unit is TimeUnit.TOKEN and each is not None
    return InSamples(policy, each) if is_equal and each else policy


def bind_sizes(horizon: Horizon, policy: BatchSizePolicy) -> Bound:
    """Resolve the times of a policy for one run, and the unit of its sizes for its data.

    Raises:
        ConversionError: a time needs a fact that is not known.
        BatchSizeError: the times are out of order on this run, or a size is less than a sample.
    """
    bound = on_data(horizon, policy).bind(horizon)
    if bound.bounds is None or bound.unit is TimeUnit.SAMPLE:
        return bound
    return replace(bound, bounds=(Tokens(bound.bounds[0]), Tokens(bound.bounds[1])))


def walk(
    horizon: Horizon,
    policy: Bound,
    *,
    timestamp: Timestamp | None = None,
    state: PolicyState | None = None,
) -> Generator[PlannedBatch, None, Timestamp]:
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
    state = policy.start if state is None else state
    while True:
        now, step = next_step(horizon, policy, now, state)
        if step is None:
            return now
        state = step.state
        yield step
        now = advance(horizon, now, step.size)


def check_plannable(horizon: Horizon, policy: Bound) -> None:
    """Refuse a policy whose sizes are not known before the run.

    Raises:
        PlanError: it follows measurements, the wall clock, or counts that are not known before.
    """
    unknown = unknown_count(horizon, {horizon.axis(unit).unit for unit in policy.units})
    if unknown is not None:
        raise _unplannable(f"they follow {unknown}, which only the run can count", _STATE[unknown])
    if policy.unit is TimeUnit.TOKEN and horizon.lengths is None:
        raise _unplannable(
            "they are in tokens, and how many each sample has is not known",
            f"set {fact_text('tokens_per_sample')}, or pass DataSpec(data, lengths=...)",
        )
    if not policy.is_static:
        instead = "run it without a plan"
        if policy.bounds is not None:
            instead += ", or plan it once with batches of {} and once of {}".format(*policy.bounds)
        raise _unplannable("they follow what the run measures", instead)


def _unplannable(why: str, instead: str) -> PlanError:
    return PlanError.cannot("know the batch sizes before the run", why=why, instead=instead)


def unknown_count(horizon: Horizon, units: Iterable[TimeUnit]) -> str | None:
    """Return in words which unit is known only during the run; None: all are known before.

    >>> unknown_count(Horizon("1ep"), [TimeUnit.SAMPLE, TimeUnit.SECOND])
    'the wall clock'
    """
    return next((_COUNTS[unit] for unit in sorted(units) if not is_countable(horizon, unit)), None)


_COUNTS = {TimeUnit.EPOCH: "epochs", TimeUnit.TOKEN: "tokens", TimeUnit.SECOND: "the wall clock"}
_STATE = {
    "epochs": f"set {fact_text('dataset_num_samples')}, or write the times in 'sp' or 'ba'",
    "tokens": f"set {fact_text('tokens_per_sample')}, or write the times in 'sp' or 'ba'",
    "the wall clock": "write the times in 'sp', 'ep' or 'ba'",
}


_MOST_DECISIONS = 4096  # 0.1 s; the limit for a run of unknown length whose sizes never settle


class FirstLast(NamedTuple):
    """A hyper-parameter over a stage."""

    first: float
    """Its value for the first batch."""
    last: float | None
    """Its value for the last batch; None if unknown before the run."""


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a run with one batch size."""

    number: int
    """From 1."""
    equal: EqualBatches
    """Where its batches begin."""
    batches: int | None
    """How many; None if unknown before the run."""
    end: Timestamp | None
    """The clock after its last batch; None if unknown before the run."""
    skipped: int
    """Samples skipped right before it because its first batch did not fit into the epoch."""
    world_size: int = 1
    micro_batch_size: int | None = None
    values: Mapping[str, FirstLast] = field(default_factory=dict)
    """The hyper-parameters; only in a plan."""
    row: int = 1
    """How many samples are joined to each row."""
    asked: int | None = None
    """The size that the policy decided, if that is not in whole rows; None: it is."""

    @property
    def size(self) -> int:
        """Samples of each batch over all ranks; fewer if an epoch or the run ends inside it."""
        return self.equal.size

    @property
    def rows(self) -> int:
        """The rows of a batch that the policy decided: samples, if none are joined."""
        return max(1, (self.asked or self.size) // self.row)

    @property
    def first(self) -> Timestamp:
        """The clock at the start of its first batch."""
        return self.equal.first

    @property
    def samples(self) -> int | None:
        """The samples of all its batches, without skipped ones."""
        if self.end is None or self.batches is None:
            return None
        if self.cut_sizes:
            return self.end.sample - self.first.sample
        return self.batches * self.size

    @property
    def shares(self) -> tuple[int, int]:
        """The fewest and the most samples of a full batch on one rank."""
        rows, world_size, row = self.size // self.row, self.world_size, self.row
        return rows // world_size * row, -(-rows // world_size) * row

    @property
    def accumulation(self) -> int | None:
        """Micro-batches per rank and batch.

        With a budget of tokens, those of the first batch; None if lengths are not known.
        """
        return num_passes(
            self.size,
            self.first.sample,
            self.world_size,
            self.micro_batch_size,
            lengths=self.equal.horizon.lengths,
            row=self.row,
        )

    @property
    def cut_sizes(self) -> tuple[int, ...]:
        """The sizes of batches that are cut at the end of an epoch or of the run."""
        equal, end = self.equal, self.end
        horizon = equal.horizon
        found: dict[int, None] = {}
        ends_epoch = end is None or end.epoch > self.first.epoch
        if horizon.dataset_num_samples is not None and horizon.last_batch == "keep" and ends_epoch:
            # The last batches of its first two epochs; later epochs end like the second.
            for epoch in (self.first.epoch + 1, self.first.epoch + 2):
                number = equal.count_before(epoch * horizon.dataset_num_samples) - 1
                if self.batches is None or number < self.batches:
                    found[equal.size_of(number)] = None
        if end is not None and self.batches and horizon.last_batch != "drop":
            found[end.sample - equal.position(self.batches - 1)] = None
        found.pop(self.size, None)
        return tuple(found)

    def count_before(self, sample: int) -> int:
        """Return how many of its batches begin before a position."""
        return least(self.equal.count_before(sample), self.batches) or 0


def find_stages(
    horizon: Horizon, policy: Bound, most_stages: int | None
) -> tuple[list[Stage], Timestamp | None]:
    """Return the stages of the run, and the clock at its end, if that is known.

    It makes the same decisions as `walk`, but one per possible change of size instead of one per
    batch.

    Raises:
        PlanError: the sizes are not known before the run, or they keep changing and the end of
            the run is not known.
        BatchSizeError: under `drop`, a batch is larger than an epoch; or there are more than
            `most_stages` stages.
    """
    check_plannable(horizon, policy)
    found: list[Stage] = []
    now, state, decisions = Timestamp(), policy.start, 0
    run_axis, run_end = horizon.end
    while True:
        before = state
        now, step = next_step(horizon, policy, now, state)
        if step is None:
            return found, now
        state = step.state
        asked = step.decided if policy.asked is None else policy.asked(now, before, NO_SIGNALS)[0]
        batches = EqualBatches(horizon, now, step.decided)
        until_end, decisions = batches.count_until(run_axis, run_end), decisions + 1
        if until_end is None and decisions > _MOST_DECISIONS:
            raise _unplannable(
                "they may change at any time, and the end of the run is unknown",
                "write max_duration in 'ep', 'sp' or 'ba', or run it without a plan",
            )
        count = least(_count(batches, policy.holds_until(now, state)), until_end)
        after = None if count is None else _after(horizon, batches, count)
        if found and _is_like(found[-1], step):
            # The arithmetic of the first batches covers the later ones, too.
            total = None if count is None else (found[-1].batches or 0) + count
            found[-1] = replace(found[-1], batches=total, end=after)
        elif len(found) == most_stages:  # a stage takes about 30 us to plan
            raise BatchSizeError.cannot(
                "plan this run",
                why=f"its batch size changes more than {most_stages:,} times",
                instead="write a larger 'increment', or 'planned: false' beside a function",
            )
        else:
            stage = Stage(len(found) + 1, batches, count, after, step.skipped, row=step.row)
            found.append(stage if asked == stage.size else replace(stage, asked=asked))
        if after is None:
            return found, None
        now = after


def _is_like(stage: Stage, step: PlannedBatch) -> bool:
    """Return whether a batch continues a stage."""
    return stage.size == step.decided and stage.row == step.row and not step.skipped


def _count(batches: EqualBatches, hold: Hold | None) -> int | None:
    """Count the equal batches until the hold ends; None: it lasts to the end of the run."""
    if hold is None:
        return 1
    found = None
    for axis, tick in hold.limits:
        count = batches.count_until(axis, tick)
        if count is None:
            raise _unplannable(
                f"the policy follows a count of '{axis.unit}' that is not known before",
                f"name '{axis.unit}' among the units of the bound policy",
            )
        found = least(found, count)
    return None if found is None else max(1, found)


def least(one: int | None, other: int | None) -> int | None:
    """Return the smaller count; None means unlimited."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _after(horizon: Horizon, batches: EqualBatches, count: int) -> Timestamp:
    """Return the clock after `count` batches; the last is cut if the run ends inside it."""
    end, after = horizon.end_sample, batches.timestamp(count)
    if end is None or horizon.last_batch == "drop" or after.sample <= end:
        return after
    last = batches.timestamp(count - 1)
    return advance(horizon, last, cut(horizon, last, batches.size))


@final
@dataclass(frozen=True, slots=True, init=False)
class PlannedSizes:
    """Where every batch begins under a policy whose sizes are known before the run.

    A horizon needs it to convert between batches and samples while the batch size changes.

    >>> from stretto.batching import DoublingRamp
    >>> sizes = PlannedSizes(Horizon("40sp"), DoublingRamp(4, 16, "50%"))
    >>> [sizes.sample_at_batch(batch) for batch in range(7)]
    [0, 4, 8, 12, 20, 36, 40]
    >>> sizes.batch_at_sample(13)
    4

    Args:
        horizon: the run.
        policy: its batch sizes.
        bound: the same policy, bound to the run; None: it is bound here.
        most_stages: refuse sizes that change more often.

    Raises:
        PlanError: the sizes are not known before the run.
        BatchSizeError: under `drop`, a batch is larger than an epoch; or there are too many stages.
    """

    horizon: Horizon
    """The run, without batch sizes."""
    policy: BatchSizePolicy
    bound: Bound = field(compare=False, repr=False)
    """The same, bound to the run."""
    stages: tuple[Stage, ...] = field(compare=False, repr=False)
    end: Timestamp | None = field(compare=False, repr=False)
    """The clock at the end of the run; None if unknown before the run."""
    _sections: list[EqualBatches] = field(compare=False, repr=False)
    _batches: list[int] = field(compare=False, repr=False)
    _samples: list[int] = field(compare=False, repr=False)

    def __init__(
        self,
        horizon: Horizon,
        policy: PolicyLike,
        *,
        bound: Bound | None = None,
        most_stages: int | None = None,
    ) -> None:
        run, policy = horizon.with_batch_sizes(None), as_policy(policy)
        bound = bind_sizes(run, policy) if bound is None else bound
        stages, end = find_stages(run, bound, most_stages)
        sections = [stage.equal for stage in stages]
        if end is not None:
            sections.append(_beyond(run, stages[-1], end))
        fill(
            self,
            horizon=run,
            policy=policy,
            bound=bound,
            stages=tuple(stages),
            end=end,
            _sections=sections,
            _batches=[section.first.batch for section in sections],
            _samples=[stage.first.sample for stage in stages],
        )

    @property
    def num_batches(self) -> int | None:
        """The number of batches in the run; None if unknown before the run."""
        return None if self.end is None else self.end.batch

    @property
    def is_exact(self) -> bool:
        """Whether every batch is known. Not if an epoch of unknown length may end inside one."""
        return self.horizon.dataset_num_samples is not None or self.horizon.last_batch == "carry"

    def sample_at_batch(self, batch: int, /) -> int:
        """Return the position at which batch number `batch` (from 0) begins.

        Batches after the end of the run have its last size.

        Raises:
            PlanError: the number is negative.
        """
        if self.end is not None and batch == self.end.batch:
            return self.end.sample
        batches = self._section(batch)
        return batches.position(batch - batches.first.batch)

    def batch_at_sample(self, sample: int, /) -> int:
        """Return the number of batches after which position `sample` has been reached."""
        if sample <= 0:
            return 0
        if self.end is not None and sample > self.end.sample:
            return self.end.batch + max(1, self._sections[-1].count_before(sample))
        stage = self.stages[bisect_left(self._samples, sample) - 1]
        return stage.first.batch + stage.count_before(sample)

    def timestamp_at_batch(self, batch: int) -> Timestamp:
        """Return the clock at the start of batch number `batch`; after the last, at the end.

        >>> PlannedSizes(Horizon("1ep", dataset_num_samples=20), 8).timestamp_at_batch(2).sample
        16

        Raises:
            PlanError: the number is negative.
        """
        if self.end is not None and batch >= self.end.batch:
            return self.end
        batches = self._section(batch)
        return batches.timestamp(batch - batches.first.batch)

    def _section(self, batch: int) -> EqualBatches:
        """Return the equal batches that a batch is one of."""
        if batch < 0:
            raise PlanError.bad("batch", batch, "batches are counted from 0", "write 0 or more")
        return self._sections[bisect_right(self._batches, batch) - 1]


def _beyond(horizon: Horizon, last: Stage, end: Timestamp) -> EqualBatches:
    """Return the batches after the end of the run; a batch cut there counts as whole."""
    if last.end == end and last.batches is not None:
        end = last.equal.timestamp(last.batches)
    return EqualBatches(horizon, end, last.size)


@final
@dataclass(frozen=True, slots=True)
class UnknownSizes:
    """The batch sizes of a run that decides them as it goes: conversions are refused.

    Those of a run that was resumed are known up to the resume.

    >>> UnknownSizes("they follow what the run measures").sample_at_batch(10)
    Traceback (most recent call last):
    ...
    stretto.errors.ConversionError: cannot convert between batches and samples: \
the batch sizes are not known, as they follow what the run measures; \
write the time in 'sp', 'ep' or 'dur' like those it goes with
    """

    why: str
    instead: str = "write the time in 'sp', 'ep' or 'dur' like those it goes with"

    past: PlannedSizes | None = None
    """The batches that it had before it was resumed; None: they are unknown, too."""
    until: Timestamp = field(default_factory=Timestamp)
    """Where it was resumed."""

    def sample_at_batch(self, batch: int, /) -> int:
        """Return the position of a past batch; refuse any other."""
        if self.past is not None and batch <= self.until.batch:
            return self.past.sample_at_batch(batch)
        raise self._refused()

    def batch_at_sample(self, sample: int, /) -> int:
        """Return the number of batches up to a past position; refuse any other."""
        if self.past is not None and sample <= self.until.sample:
            return self.past.batch_at_sample(sample)
        raise self._refused()

    def _refused(self) -> ConversionError:
        return ConversionError.cannot(
            "convert between batches and samples",
            why=f"the batch sizes are not known, as {self.why}",
            instead=self.instead,
        )


def horizon_of(sizes: PlannedSizes) -> Horizon:
    """Return the horizon of planned sizes, which converts as far as these are exact."""
    if sizes.is_exact:
        return sizes.horizon.with_batch_sizes(sizes)
    instead = f"set {fact_text('dataset_num_samples')}, or write last_batch='carry'"
    why = "an epoch of unknown length may end inside one of them"
    return sizes.horizon.with_batch_sizes(UnknownSizes(why, instead))
