"""Where each batch of a run begins: cut, carried or skipped at the end of an epoch.

Plans, the data loader and the trainer all take their batches from here, so they agree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, final

from stretto.batching import BatchSizePolicy, Hold, PolicyLike, as_policy
from stretto.batching.pack import num_passes
from stretto.batching.policy import (
    NO_SIGNALS,
    Bound,
    PolicyState,
    Signals,
    Tokens,
    batches_of,
    is_same,
    size_text,
    whole_size,
)
from stretto.batching.wrappers import InSamples
from stretto.errors import (
    BatchSizeError,
    ConversionError,
    PlanError,
    StrettoError,
    fact_text,
)
from stretto.schedules.fields import fill
from stretto.timing import Horizon, Timestamp, TimeUnit, advance
from stretto.timing.batches import Batches
from stretto.timing.epochs import (
    cut,
    is_countable,
    next_epoch,
    outgrows_epoch,
)

_TOKEN = TimeUnit.TOKEN
_NO_VALUES: Mapping[str, float] = MappingProxyType({})


class PlannedBatch(NamedTuple):
    """One batch before it is run."""

    timestamp: Timestamp
    """The clock at its start."""
    size: int
    """Its samples: those of the decided size, cut if the epoch or the run ends inside it."""
    decided: int
    """The size that the policy decided, in samples or as `Tokens`; learning rate rules use this."""
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
    if policy.unit is _TOKEN:
        if horizon.lengths is None:  # only reading tells how many samples these are
            most = cut(horizon, timestamp, decided)
            return timestamp, PlannedBatch(timestamp, most, Tokens(decided), 0, 0, decided_state)
        decided = Tokens(decided)
    before = timestamp.sample
    whole = decided if type(decided) is int else whole_size(horizon, before, decided)
    if outgrows_epoch(horizon, timestamp, whole):
        if timestamp.sample_in_epoch == 0:
            raise larger_than_epoch(horizon, decided)
        timestamp = next_epoch(horizon, timestamp)
        if horizon.is_done(timestamp):
            return timestamp, None
        # The batch starts at a later position, so the policy decides again.
        decided, decided_state = policy.decide(timestamp, state, signals)
        if policy.unit is _TOKEN:
            decided = Tokens(decided)
        whole = whole_size(horizon, timestamp.sample, decided)
        if outgrows_epoch(horizon, timestamp, whole):
            raise larger_than_epoch(horizon, decided)
    size = cut(horizon, timestamp, whole)
    ends = _moved(horizon, timestamp, size, decided).epoch - timestamp.epoch
    skipped = timestamp.sample - before
    step = PlannedBatch(timestamp, size, decided, skipped, ends, decided_state)
    return timestamp, step if policy.row_at is None else step._replace(row=policy.row_at(timestamp))


def next_size(horizon: Horizon, position: int, decided: int) -> int | None:
    """Return the samples of a batch of the same decision at a position, if it matters.

    Under `drop` an epoch ends if that does not fit; None: it has as many as the batch before.
    """
    if type(decided) is int or horizon.last_batch != "drop":
        return None
    return whole_size(horizon, position, decided)


def after_batch(horizon: Horizon, step: PlannedBatch) -> Timestamp:
    """Return the clock after a planned batch."""
    return _moved(horizon, step.timestamp, step.size, step.decided)


def _moved(horizon: Horizon, now: Timestamp, size: int, decided: int) -> Timestamp:
    if type(decided) is int:
        return advance(horizon, now, size)
    following = next_size(horizon, now.sample + size, decided)
    return advance(horizon, now, size, next_size=following)


def larger_than_epoch(horizon: Horizon, size: int) -> BatchSizeError:
    """Return the error for a batch larger than an epoch."""
    most: object = horizon.dataset_num_samples
    if isinstance(size, Tokens):
        most = Tokens(horizon.dataset_num_tokens or 0)
    return BatchSizeError.cannot(
        f"take a batch of {size_text(size)} with last_batch='drop'",
        why=f"an epoch has only {most}, so each would be dropped",
        instead=f"write AtMost(policy, {most!r}) or last_batch='carry'",
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
        now = _moved(horizon, now, step.size, step.decided)


def check_plannable(horizon: Horizon, policy: Bound) -> None:
    """Refuse a policy whose sizes are not known before the run.

    Raises:
        PlanError: it follows measurements, the wall clock, or counts that are not known before.
    """
    if policy.unit is TimeUnit.TOKEN and horizon.lengths is None:
        raise _unplannable(
            "they are in tokens, and how many each sample has is not known",
            f"set {fact_text('tokens_per_sample')}, or pass DataSpec(data, lengths=...)",
        )
    unknown = unknown_count(horizon, {horizon.axis(unit).unit for unit in policy.units})
    if unknown is not None:
        raise _unplannable(f"they follow {unknown}, which only the run can count", _STATE[unknown])
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
    """A part of a run with one batch size; in a plan, also with one formula for each value."""

    number: int
    """From 1."""
    equal: Batches
    """Where its batches begin; all have the same decided size."""
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
    begins: tuple[str, ...] = ()
    """The values whose schedule changes its formula at the start; only in a plan."""
    row: int = 1
    """How many samples are joined to each row."""
    asked: int | None = None
    """The size that the policy decided, if that is not in whole rows; None: it is."""

    @property
    def size(self) -> int:
        """The decided size of each batch over all ranks, in samples or as `Tokens`.

        A batch has less if an epoch or the run ends inside it.
        """
        return self.equal.size

    @property
    def rows(self) -> int:
        """The rows of a batch that the policy decided: samples, if none are joined."""
        return max(1, (self.asked or self.whole_sizes[1]) // self.row)

    @property
    def first(self) -> Timestamp:
        """The clock at the start of its first batch."""
        return self.equal.first

    def size_of(self, number: int) -> int:
        """Return the samples of batch `number` (from 0): fewer if an epoch or the run cuts it."""
        is_last = self.end is not None and number + 1 == self.batches
        if self.end is None or not is_last or self.equal.horizon.last_batch == "drop":
            return self.equal.size_of(number)
        return self.end.sample - self.equal.position(number)

    def batch(self, number: int) -> PlannedBatch:
        """Return batch `number` (from 0), without the policy's state."""
        now, is_last = self.equal.timestamp(number), number + 1 == self.batches
        after = self.end if is_last and self.end else self.equal.timestamp(number + 1)
        skipped, ends = 0 if number else self.skipped, after.epoch - now.epoch
        return PlannedBatch(now, self.size_of(number), self.size, skipped, ends, {}, row=self.row)

    @property
    def samples(self) -> int | None:
        """The samples of all its batches, without skipped ones."""
        if self.end is None or self.batches is None:
            return None
        if self.equal.horizon.last_batch == "drop":
            return self.equal.samples(self.batches)
        return self.end.sample - self.first.sample

    @property
    def tokens(self) -> int | None:
        """The tokens of these samples, and of those that `drop` skips among them.

        None if unknown before the run, 0 if tokens are not known.
        """
        return None if self.end is None else self.end.token - self.first.token

    @property
    def whole_sizes(self) -> tuple[int, int]:
        """The fewest and the most samples of a batch that is not cut."""
        return self.equal.spread(self.batches)

    @property
    def shares(self) -> tuple[int, int]:
        """The fewest and the most samples of a full batch on one rank."""
        fewest, most = (size // self.row for size in self.whole_sizes)
        return fewest // self.world_size * self.row, -(-most // self.world_size) * self.row

    @property
    def accumulation(self) -> int | None:
        """Micro-batches per rank and batch, of the largest batch.

        With a budget of tokens, those of the first batch; None if lengths are not known.
        """
        return max(self.accumulations, default=None)

    @property
    def accumulations(self) -> list[int]:
        """The same for each size that its batches have, cut ones included.

        Of unequal batches, for the smallest and the largest that are not cut.
        """
        if isinstance(self.micro_batch_size, Tokens):
            found = [self.passes(self.first.sample, self.equal.size_of(0))]
        else:
            whole = [] if self._is_cut else dict.fromkeys(self.whole_sizes)
            found = [self.passes(self.first.sample, one) for one in (*whole, *self.cut_sizes)]
        return [one for one in found if one is not None]

    def passes(self, start: int, size: int) -> int | None:
        """Return the micro-batches per rank of a batch; None if they follow unknown lengths."""
        batch = range(start, start + size)
        lengths = self.equal.horizon.lengths
        return num_passes(batch, self.world_size, self.micro_batch_size, lengths, row=self.row)

    @property
    def _is_cut(self) -> bool:
        """Whether every batch is cut: by an epoch that is shorter, or as there is only one."""
        num_samples, last = self.equal.horizon.dataset_num_samples, self.cut_sizes
        is_short = num_samples is not None and self.whole_sizes[1] > num_samples
        is_short = is_short and self.equal.horizon.last_batch == "keep"
        return bool(last) and (is_short or self.batches == 1)

    @property
    def cut_sizes(self) -> tuple[int, ...]:
        """The sizes of batches that are cut at the end of an epoch or of the run."""
        equal, end, numbers = self.equal, self.end, list[int]()
        if equal.horizon.dataset_num_samples is not None and equal.horizon.last_batch == "keep":
            # The last batches of its first two epochs; later epochs end like the second.
            for epoch in (self.first.epoch + 1, self.first.epoch + 2):
                if end is None or epoch <= end.epoch:
                    number = equal.count_before(epoch * equal.horizon.dataset_num_samples) - 1
                    numbers.append(number)
        if self.batches:
            numbers = [*(one for one in numbers if one < self.batches), self.batches - 1]
        fewest, most = self.whole_sizes
        found = dict.fromkeys(map(self.size_of, numbers))
        return tuple(size for size in found if not fewest <= size <= most)

    def count_before(self, sample: int) -> int:
        """Return how many of its batches begin before a position."""
        return least(self.equal.count_before(sample), self.batches) or 0


class Had(NamedTuple):
    """Batches of one size that a run has had."""

    first: int
    """The number of the first."""
    size: int
    """The size that was decided, in samples or as `Tokens`."""
    sample: int | None = None
    """Where it began; None: where those before it lead to."""


Open: TypeAlias = tuple[int, Hold | None]
"""How many batches of the last stage are counted, and how long its size holds from there."""


def find_stages(
    horizon: Horizon,
    policy: Bound,
    found: list[Stage],
    most_stages: int | None,
    *,
    first: tuple[Timestamp, PolicyState] | None = None,
) -> Generator[Open, None, Timestamp | None]:
    """Add the stages of the run to `found`; return the clock at its end, if that is known.

    It makes the same decisions as `walk`, but one per possible change of size instead of one per
    batch. Each is yielded before its batches are counted; then the last stage is filled in.

    Args:
        horizon: the run.
        policy: the batch size policy, bound to it.
        found: where the stages go.
        most_stages: refuse sizes that change more often.
        first: the clock of the first batch and the state of the policy there; None: the start.

    Raises:
        PlanError: the sizes keep changing and the end of the run is not known.
        BatchSizeError: under `drop`, a batch is larger than an epoch; or there are more than
            `most_stages` stages.
    """
    (now, state), decisions = first or (Timestamp(), policy.start), 0
    run_axis, run_end = horizon.end
    while True:
        before = state
        now, step = next_step(horizon, policy, now, state)
        if step is None:
            return now
        state = step.state
        batches, hold = batches_of(horizon, now, step.decided), policy.holds_until(now, state)
        done = 0
        if found and _is_like(found[-1], step):
            # The arithmetic of the first batches covers the later ones, too.
            done = found[-1].batches or 0
            fill(found[-1], batches=None, end=None)
        else:
            if len(found) == most_stages:  # a stage takes about 30 us to plan
                raise BatchSizeError.cannot(
                    "plan this run",
                    why=f"its batch size changes more than {most_stages:,} times",
                    instead="write a larger 'increment', or 'planned: false' beside a function",
                )
            asked = policy.asked and policy.asked(now, before, NO_SIGNALS)[0]
            asked = None if asked == step.decided else asked
            found.append(
                Stage(len(found) + 1, batches, None, None, step.skipped, row=step.row, asked=asked)
            )
        yield done, hold
        until_end, decisions = batches.count_until(run_axis, run_end), decisions + 1
        if until_end is None and decisions > _MOST_DECISIONS:
            raise _unplannable(
                "they may change at any time, and the end of the run is unknown",
                "write max_duration in 'ep', 'sp' or 'ba', or run it without a plan",
            )
        count = least(_count(batches, hold), until_end)
        if count is None:
            return None
        now = _after(horizon, batches, count)
        fill(found[-1], batches=done + count, end=now)


def past_stages(
    horizon: Horizon, policy: Bound, found: list[Stage], past: Sequence[Had]
) -> Generator[Open, None, Timestamp]:
    """Add the stages that a run has had to `found`, as `find_stages`; return the clock after them.

    The last one of `past` is the next batch.

    Raises:
        PlanError: its sizes lead elsewhere on this data.
    """
    after, batch_axis = Timestamp(), horizon.axis(TimeUnit.BATCH)
    for had, following in pairwise(past):
        before, first = after.sample, after
        if had.sample is None and outgrows_epoch(
            horizon, first, whole_size(horizon, first.sample, had.size)
        ):
            first = next_epoch(horizon, first)  # a record of a version that did not say so
        elif had.sample is not None:
            first = _placed(horizon, found, first, had.sample)
        batches = batches_of(horizon, first, had.size)
        row = 1 if policy.row_at is None else policy.row_at(first)
        skipped = max(0, first.sample - before)
        found.append(Stage(len(found) + 1, batches, None, None, skipped, row=row))
        yield 0, Hold(((batch_axis, following.first),))
        count = following.first - had.first
        after = batches.timestamp(count)
        fill(found[-1], batches=count, end=after)
        _add(found, found.pop())
    return _placed(horizon, found, after, past[-1].sample or 0)


def _add(found: list[Stage], stage: Stage) -> None:
    """Add a stage, to the last one if the arithmetic of that covers it."""
    last = found[-1] if found else stage
    is_one = (last.row, last.asked, 0) == (stage.row, stage.asked, stage.skipped)
    is_one = is_one and bool(found) and is_same(last.size, stage.size)
    if is_one and last.equal.timestamp(last.batches or 0)[:7] == stage.first[:7]:
        total = None if stage.batches is None else (last.batches or 0) + stage.batches
        found[-1] = replace(last, batches=total, end=stage.end)
    else:
        found.append(replace(stage, number=len(found) + 1))


def _placed(horizon: Horizon, found: list[Stage], now: Timestamp, sample: int) -> Timestamp:
    """Return the clock at a place in the past: after a cut batch, or after skipped samples."""
    if sample < now.sample and found and found[-1].batches:
        last = found[-1].equal.timestamp(found[-1].batches - 1)
        if sample > last.sample:  # the run had ended there
            now = advance(horizon, last, sample - last.sample)
            fill(found[-1], end=now)
    elif sample > now.sample and horizon.last_batch == "drop":
        now = next_epoch(horizon, now)
    if sample != now.sample:
        raise PlanError.cannot(
            "know where the batches of the run begin",
            why="the batch sizes in the checkpoint lead elsewhere with these data",
            instead="resume with the data of that run, and the lengths of its samples",
        )
    return now


def _is_like(stage: Stage, step: PlannedBatch) -> bool:
    """Return whether a batch continues a stage."""
    return is_same(stage.size, step.decided) and stage.row == step.row and not step.skipped


def _count(batches: Batches, hold: Hold | None) -> int | None:
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


def _after(horizon: Horizon, batches: Batches, count: int) -> Timestamp:
    """Return the clock after `count` batches; the last is cut if the run ends inside it."""
    end, after = horizon.end_sample, batches.timestamp(count)
    if end is None or horizon.last_batch == "drop" or after.sample <= end:
        return after
    last = batches.timestamp(count - 1)
    return advance(horizon, last, cut(horizon, last, batches.size_of(count - 1)))


@final
class _Search:
    """The stages of a run, found one after the other as far as they are asked for."""

    def __init__(
        self,
        horizon: Horizon,
        steps: Callable[[list[Stage]], Generator[Open, None, Timestamp | None]],
    ) -> None:
        self.stages: list[Stage] = []
        """Those found; the last one may not be counted yet."""
        self.end: Timestamp | None = None
        self.is_over = False
        self._horizon, self._steps = horizon, steps(self.stages)
        self._done = 0
        self._hold: Hold | None = None
        self._error: StrettoError | None = None
        self._go_on()

    def find(self, number_in: Callable[[Batches], int] | None = None) -> None:
        """Find the stages up to that with a batch, which has a number in the open one; or all."""
        while not self.is_over and (number_in is None or not self._has(number_in)):
            self._go_on()

    def _has(self, number_in: Callable[[Batches], int]) -> bool:
        batches = self.stages[-1].equal
        number = number_in(batches)
        if number <= self._done:
            return True
        then, hold = batches.timestamp(number), self._hold
        return hold is not None and hold.covers(then) and not self._horizon.is_done(then)

    def _go_on(self) -> None:
        """Count the last stage, and open the next one."""
        if self._error is not None:
            raise self._error
        try:
            self._done, self._hold = next(self._steps)
        except StopIteration as over:
            self.is_over, self.end = True, over.value
        except StrettoError as error:
            self._error = error
            raise

    def later(self, end: Timestamp) -> Batches:
        """Return the batches after the end of the run; one that is cut there counts as whole."""
        if self.stages and self.stages[-1].end == end:
            return self.stages[-1].equal
        size = self.stages[-1].size if self.stages else 1  # a run that is resumed at its end
        return batches_of(self._horizon, end, size)


@final
@dataclass(frozen=True, slots=True, init=False)
class PlannedSizes:
    """Where every batch begins under a policy whose sizes are known before the run.

    A horizon needs it to convert between batches and samples while the batch size changes. Over
    samples of known lengths, stages are found as far as they are asked for: a loader that starts
    needs none of them.

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
        first: where it continues and the state of the policy there; None: the start of the run.
        past: the same run until then.
        had: the batches that it had, and where the next one begins; not those of the policy.

    Raises:
        PlanError: the sizes are not known before the run.
        BatchSizeError: under `drop`, a batch is larger than an epoch; or there are too many stages.
    """

    horizon: Horizon
    """The run, without batch sizes."""
    policy: BatchSizePolicy
    bound: Bound = field(compare=False, repr=False)
    """The same, bound to the run."""
    _first: Timestamp = field(compare=False, repr=False)
    _past: PlannedSizes | None = field(compare=False, repr=False)
    _search: _Search = field(compare=False, repr=False)

    def __init__(
        self,
        horizon: Horizon,
        policy: PolicyLike,
        *,
        bound: Bound | None = None,
        most_stages: int | None = None,
        first: tuple[Timestamp, PolicyState] | None = None,
        past: PlannedSizes | None = None,
        had: Sequence[Had] | None = None,
    ) -> None:
        run, policy = horizon.with_batch_sizes(None), as_policy(policy)
        bound = bind_sizes(run, policy) if bound is None else bound
        now = Timestamp() if first is None else first[0]
        if had is None:
            check_plannable(run, bound)
            search = _Search(
                run, lambda found: find_stages(run, bound, found, most_stages, first=first)
            )
        else:
            search = _Search(run, lambda found: past_stages(run, bound, found, had))
        if run.lengths is None or (had is None and _may_outgrow(run, bound)):
            search.find()
        fill(self, horizon=run, policy=policy, bound=bound, _first=now, _past=past, _search=search)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The parts of the run with one decided size."""
        self._search.find()
        if self._past is None:
            return tuple(self._search.stages)
        found = [*self._past.stages]
        for stage in self._search.stages:
            _add(found, stage)
        return tuple(found)

    def after_batch(self, batch: int) -> Timestamp:
        """Return the clock after so many batches, before the next one skips any samples.

        >>> horizon = Horizon("2ep", dataset_num_samples=10, last_batch="drop")
        >>> sizes = PlannedSizes(horizon, "0sp:5 5sp:7")
        >>> sizes.after_batch(1).sample, sizes.timestamp_at_batch(1).sample
        (5, 10)
        """
        if self._past is not None and batch <= self._first.batch:
            return self._past.after_batch(batch)
        start, stages = self.timestamp_at_batch(batch), self._search.stages
        number = bisect_left(stages, batch, key=_first_batch) - 1
        end = stages[number].end if number >= 0 else None
        return end if end is not None and end.batch <= batch else start

    @property
    def end(self) -> Timestamp | None:
        """The clock at the end of the run; None if unknown before the run."""
        self._search.find()
        return self._search.end

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
        if self._past is not None and batch < self._first.batch:
            return self._past.sample_at_batch(batch)
        batches, end = self._batches_with(batch), self._search.end
        if end is not None and batch == end.batch:
            return end.sample
        return batches.position(batch - batches.first.batch)

    def batch_at_sample(self, sample: int, /) -> int:
        """Return the number of batches after which position `sample` has been reached."""
        if sample <= 0:
            return 0
        if self._past is not None and sample <= self._first.sample:
            return self._past.batch_at_sample(sample)
        search = self._search
        search.find(lambda batches: batches.count_before(sample) - 1)
        end, stages = search.end, search.stages
        if end is not None and sample > end.sample:
            later = search.later(end)
            return max(end.batch + 1, later.first.batch + later.count_before(sample))
        number = bisect_left(stages, sample, key=lambda one: one.first.sample) - 1
        if number < 0:  # skipped before the first batch after a resume
            return self._first.batch
        return stages[number].first.batch + stages[number].count_before(sample)

    def timestamp_at_batch(self, batch: int) -> Timestamp:
        """Return the clock at the start of batch number `batch`; after the last, at the end.

        >>> PlannedSizes(Horizon("1ep", dataset_num_samples=20), 8).timestamp_at_batch(2).sample
        16

        Raises:
            PlanError: the number is negative.
        """
        if self._past is not None and batch < self._first.batch:
            return self._past.timestamp_at_batch(batch)
        batches, end = self._batches_with(batch), self._search.end
        if end is not None and batch >= end.batch:
            return end
        return batches.timestamp(batch - batches.first.batch)

    def _batches_with(self, batch: int) -> Batches:
        """Return the batches that a batch is one of."""
        if batch < 0:
            raise PlanError.bad("batch", batch, "batches are counted from 0", "write 0 or more")
        search = self._search
        search.find(lambda batches: batch - batches.first.batch)
        if search.end is not None and batch >= search.end.batch:
            return search.later(search.end)
        return search.stages[bisect_right(search.stages, batch, key=_first_batch) - 1].equal


def _first_batch(stage: Stage) -> int:
    return stage.first.batch


def _may_outgrow(horizon: Horizon, bound: Bound) -> bool:
    """Return whether a batch may be larger than an epoch that drops it, which only a walk tells."""
    most = horizon.dataset_num_samples
    if bound.unit is TimeUnit.TOKEN:
        most = horizon.dataset_num_tokens
    is_known = bound.bounds is not None and most is not None and bound.bounds[1] < most
    return horizon.last_batch == "drop" and not is_known


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
    instead = f"set {fact_text('dataset_num_samples')}, or last_batch='carry' as Horizon.endless"
    why = "an epoch of unknown length may end inside one of them"
    return sizes.horizon.with_batch_sizes(UnknownSizes(why, instead))
