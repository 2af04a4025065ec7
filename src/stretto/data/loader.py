"""`StepLoader`: yields the batches of a run, step by step, and moves its clock."""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, final

from stretto._foreign import knows_foreign
from stretto.batching import NO_SIGNALS, PolicyLike, Signals, Tokens
from stretto.batching.metrics import one_metric
from stretto.batching.pack import checked_micro_batch
from stretto.batching.rows import LengthsLike
from stretto.data.decisions import Decisions, other_order, reading_state
from stretto.data.described import OWN_OF_A_RANK, described_run, samples_mark
from stretto.data.fetch import FetchedStep, RankShare, pinned
from stretto.data.source import BatchSource, make_source, prepared_for
from stretto.data.spec import DataSpec, uncountable
from stretto.data.step import MicroBatch, Step
from stretto.data.tokens import counts_padding
from stretto.errors import CheckpointError, DataError
from stretto.planning import Prepared, resumed
from stretto.planning.sizes import next_size
from stretto.runtime.agreement import check_agreement, plain
from stretto.runtime.packing import as_json
from stretto.runtime.ranks import Ranks, all_same, marks
from stretto.settings import Loading, read_settings
from stretto.timing import TimeLike, Timer, Timestamp, TimeUnit

_VERSION = 1
_SAMPLES = "first, middle and last sample"
_CHECKED_BATCHES = 8
"""How many of the first batches have their own count compared with the lengths."""


@final
class TokenCounter:
    """Counts tokens; multiplies if every sample has equally many.

    Args:
        source: the data.
        run: the run.
        timer: its clock.

    Raises:
        DataError: tokens are needed, and the data cannot count them.
    """

    def __init__(self, source: BatchSource, run: Prepared, timer: Timer) -> None:
        self._spec = spec = source.spec
        self._source = source
        self._run = run
        self._timer = timer
        self._is_needed = TimeUnit.TOKEN in run.bound_policy.units | {run.facts.max_duration.unit}
        self._reads_seconds = any(TimeUnit.SECOND in units for units in run.reads.values())
        # Sizes that are not known before the run may follow the wall clock undeclared.
        self._may_read_seconds = not run.bound_policy.is_static
        counts = spec.counts
        self.each = counts["tokens_per_sample"]
        """The tokens of every sample, 0 if none are tracked; None: they must be counted."""
        self.lengths = run.facts.lengths
        """The tokens of each sample in the order of the run, if they are known."""
        is_counted = self.each is None and self.lengths is None
        self._stated = counts["dataset_num_tokens"] if is_counted else None
        self._unchecked = 0 if self.lengths is None else _CHECKED_BATCHES
        self._tells: bool | None = None
        if not is_counted or spec.get_num_tokens_in_batch is not None:
            self._tells = True
        if self._is_needed and not self.is_tracked:
            raise uncountable()

    @property
    def is_tracked(self) -> bool:
        """Whether the tokens of a batch are known.

        May read one sample to find out; an iterable is assumed to count until its first batch.
        """
        if self._tells is None and self._source.map_source is not None:
            batch = self._source.example_batch([0])
            self._note(tells=self._spec.count_tokens(batch) is not None)
        return self._tells is not False

    def __call__(self, batch: Any, num_samples: int) -> int:
        """Return the tokens of a batch; 0 if they are not tracked."""
        if self.each is not None:
            return num_samples * self.each
        if num_samples == 0 and self._tells:
            return 0
        tokens = self._spec.count_tokens(batch)
        # A dummy is enough to find out: every rank must know after its first batch.
        self._note(tells=tokens is not None)
        if tokens is None and self._is_needed:
            raise uncountable()
        return tokens if tokens and num_samples else 0

    def of_micro_batches(self, fetched: FetchedStep) -> Sequence[int]:
        """Return the tokens of each micro-batch, from the lengths of this rank's samples."""
        assert self.lengths is not None, "known"
        tokens = fetched.tokens
        if tokens is None:
            ranks, start = self._source.part.ranks, self._timer.sample
            world, stop = ranks.dp_world_size, start + fetched.size
            own = iter(self.lengths.of(start, stop)[(ranks.dp_rank - start) % world :: world])
            tokens = [sum(islice(own, count)) for _, count in fetched.micro_batches]
        if self._unchecked:
            self._unchecked -= 1
            self._check(fetched, tokens)
        return tokens

    def _check(self, fetched: FetchedStep, tokens: Sequence[int]) -> None:
        """Warn once if a batch counts other tokens than the lengths of its samples.

        Raises:
            DataError: it has more than the budget.
        """
        budget = self._source.part.micro_batch_size
        for (batch, count), known in zip(fetched.micro_batches, tokens, strict=True):
            found = self._spec.count_tokens(batch) if count else None
            # Rows may be padded to a multiple of 64.
            if found and isinstance(budget, Tokens) and found > budget + 64 * count:
                why = f"a micro-batch of {count} samples has {found:,} tokens"
                instead = "pass the lengths of these samples, as collate_fn returns them"
                raise DataError.cannot(f"keep to a budget of {budget}", why=why, instead=instead)
            may_pad = self._spec.get_num_tokens_in_batch is None and counts_padding(batch)
            if found is not None and (found < known or (found > known and not may_pad)):
                self._unchecked = 0
                warnings.warn(
                    f"a micro-batch of {count} samples from sample {self._timer.sample:,} on has "
                    f"{found:,} tokens, and their lengths are {known:,}: the clock and sizes in "
                    "tokens follow the lengths; pass those of the samples as they are collated, "
                    "for example cut to the longest that the model takes",
                    UserWarning,
                    stacklevel=4,  # the loop that asks the loader for steps
                )
                return

    def _note(self, *, tells: bool) -> None:
        self._tells = tells
        if not tells:
            self.each = 0

    def agreed(
        self, step: Step, tokens: int | None, seconds: float | None, signals: Signals
    ) -> tuple[int | None, float | None]:
        """Return the tokens of all ranks and the seconds of one, if needed and not given.

        A caller who passes both has made the ranks agree. Otherwise the signals are compared.
        """
        ranks, is_open = self._source.part.ranks, tokens is None or seconds is None
        counts = tokens is None and self.each is None and self.lengths is None
        may_read = self._may_read_seconds and ranks.are_all_dp
        measures = seconds is None and (self._reads_seconds or may_read)
        follows = self._run.bound_policy.reads or self._run.metrics
        if counts or measures or (is_open and follows and ranks.are_all_dp):
            passed = self._timer.seconds_since_update()
            decision = (step.timestamp.sample, step.batch_size, signals)
            total, passed = agreed(ranks, step.num_tokens, passed, decision)
            return (total if counts else tokens), (passed if measures else seconds)
        return tokens, seconds

    def cross(self, fetched: FetchedStep, step: Step, tokens: int, seconds: float | None) -> None:
        """Move the clock over a batch in which epochs may end."""
        timer, now, size = self._timer, self._timer.timestamp, fetched.size
        of_last = partial(self._of_last, step, tokens)
        is_whole = now.sample_in_epoch + size == self._run.horizon.dataset_num_samples
        if is_whole or fetched.crossings == (0,):  # nothing carried or dropped
            self._compare(now.token_in_epoch + tokens)
        timer.update(
            size,
            tokens=tokens,
            seconds=seconds,
            tokens_of_last=of_last,
            next_size=next_size(self._run.facts, now.sample + size, fetched.plan.decided),
        )
        for carried in fetched.crossings:  # only in epochs of unknown length
            timer.end_epoch(carried=carried, tokens=of_last(carried))

    def _compare(self, counted: int) -> None:
        """Warn once if the `counted` tokens of an epoch differ from the stated number."""
        stated, self._stated = self._stated, None
        if stated is not None and counted and counted != stated:
            warnings.warn(
                f"an epoch of these data has {counted} tokens, and num_tokens is {stated}: times "
                "in tokens and in other units do not convert as planned; state num_tokens="
                f"{counted}, or leave it out",
                UserWarning,
                stacklevel=5,  # the loop that asks the loader for steps
            )

    def _of_last(self, step: Step, tokens: int, samples: int) -> int:
        """Return how many of the `tokens` of a step its last `samples` have.

        Counted if this rank has the whole step; otherwise their share, rounded down.
        """
        if self.each is None and step.local_num_samples == step.num_samples:
            try:
                return self._counted(step.micro_batches, samples)
            except DataError:  # packed batches cannot be cut
                pass
        return tokens * samples // step.num_samples

    def _counted(self, micros: Sequence[MicroBatch], samples: int) -> int:
        total = 0
        for micro in reversed(micros):
            if samples < micro.num_samples:
                part = slice(micro.num_samples - samples, micro.num_samples)
                batch = self._spec.take_samples(micro.batch, part, micro.num_samples)
                return total + (self(batch, samples) if samples else 0)
            total += micro.num_tokens
            samples -= micro.num_samples
        return total


def agreed(ranks: Ranks, tokens: int, seconds: float, decision: object) -> tuple[int, float]:
    """Return the tokens of all ranks, and the seconds of rank 0. Every process must call it.

    If several processes hold parts of one model, every data-parallel rank has equally many.

    Args:
        ranks: those that share the batch.
        tokens: the tokens of this one's share.
        seconds: the seconds that it measured.
        decision: what decides the next batch size; its `repr` must be the same on every rank.

    Raises:
        DataError: the ranks are not connected or would decide differently, or the processes do not
            divide evenly into ranks. All of them raise it.
    """
    ranks.check_connected()
    copies, odd = divmod(ranks.world_size, ranks.dp_world_size)
    if odd or not copies:
        why = f"torch.distributed has {ranks.world_size} processes"
        instead = "call loader.finish(tokens=..., seconds=...) with those of all ranks"
        raise DataError.bad("world_size", ranks.dp_world_size, why, instead)
    mark = marks(zlib.crc32(repr(decision).encode()))
    total, measured, *sums = ranks.agree([tokens, seconds if ranks.is_first else 0.0, *mark])
    if ranks.are_all_dp and not all_same(sums, ranks.world_size):
        raise DataError.cannot(
            "follow signals that are not the same on every rank",
            why="each would decide another batch size",
            instead="sum them over the ranks before finish() and note_metric()",
        )
    return int(total) // copies, measured


@final
class StepLoader(Iterator[Step]):
    """Yields the micro-batches of one optimizer step after the other, to the end of the run.

    The policy decides each size at its step, even if workers fetch ahead. The loader owns the
    run's clock: it counts a step when you call `finish` or ask for the next one.

    >>> loader = StepLoader(
    ...     [1, 2, 3, 4, 5, 6], "0sp:1 50%:2", max_duration="1ep", loading=Loading(shuffle=False)
    ... )
    >>> [(step.timestamp.sample, step.num_samples) for step in loader]
    [(0, 1), (1, 1), (2, 1), (3, 2), (5, 1)]

    Args:
        data: a map-style data set, a `DataLoader`, an iterable of collated batches, or a
            `DataSpec` of one of them.
        batch_size: samples of one step over all ranks: a number, a text such as
            `"0tok:768 250Btok:1536"`, a function, or a policy. Or a run that `bind_run` has bound,
            without `max_duration`.
        max_duration: how long the run is, in any unit but `dur`.
        micro_batch_size: the most samples of one micro-batch, or a budget of tokens such as
            `"8Ktok"`, padding included; None: a rank's whole share.
        loading: how samples are ordered and fetched: a `Loading`, or a mapping of its fields.
        rank: this process among those that share each batch; None: torch.distributed's.
        world_size: how many processes share each batch; None: torch.distributed's.
        ranks: the processes of a run, in place of these two numbers.
        idle_ranks: whether a batch may have fewer samples than there are ranks.
        sequence_length: the tokens of a row, as in `prepare`.
        clock: a monotonic clock in nanoseconds.

    Raises:
        StrettoError: the arguments do not fit; the message says what to write instead.
    """

    @knows_foreign
    def __init__(
        self,
        data: Any,
        batch_size: PolicyLike | Prepared,
        *,
        max_duration: TimeLike | None = None,
        micro_batch_size: int | str | None = None,
        loading: Loading | Mapping[str, Any] = Loading(),
        rank: int | None = None,
        world_size: int | None = None,
        ranks: Ranks | None = None,
        idle_ranks: bool = False,
        sequence_length: LengthsLike | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.spec = DataSpec.of(data)
        self._loading = read_settings(Loading, loading, "loading")
        self.prepared = prepared_for(
            self.spec, batch_size, max_duration, self._loading, sequence_length
        )
        self._from_start = self.prepared
        self.horizon = self.prepared.horizon
        self.timer = Timer(self.horizon, clock=clock)
        self.is_planned = self.prepared.is_planned
        """Whether every batch is known before the run. Not if sizes follow measurements, the wall
        clock or counted tokens, or if an epoch of unknown length may end inside a batch."""
        self._idle_ranks = idle_ranks
        self.has_dropped_state = False
        """Whether the loaded state belongs to another policy, so this one starts anew."""
        self.may_reorder = False
        """Whether a state of another order may be loaded; samples may then come twice."""
        self.reads = self.prepared.bound_policy.reads | self.prepared.metrics
        """The signals that the policy or a schedule reads (see `Bound.reads`)."""
        one_metric(self.reads)
        # If only the clock can tell when the run is over, it is checked before each step.
        self._asks_clock = (
            self.horizon.end_sample is None and self.horizon.max_duration.unit != "ba"
        )
        self._decisions = Decisions(self.prepared, self.timer)
        self.measured: Sequence[float] = self._decisions.measured
        """The metric that schedules follow, in each evaluation so far."""
        self._fetched_steps: Iterator[FetchedStep] | None = None
        self._pending: tuple[Step, FetchedStep] | None = None
        self.ranks = Ranks.of(rank, world_size) if ranks is None else ranks
        """The processes that share each batch."""
        self.also_described: Callable[[], Mapping[str, Any]] = dict
        """Returns what the ranks must have alike besides, by name."""
        self._is_compared = False
        self._agrees = max(self.ranks.world_size, self.ranks.dp_world_size) > 1
        self._read(micro_batch_size)

    def _read(self, micro_batch_size: int | str | None) -> None:
        """Read this rank's part of the data in micro-batches of so many samples or tokens."""
        self.micro_batch_size = checked_micro_batch(micro_batch_size, self.prepared.facts)
        part = RankShare(self.ranks, self.micro_batch_size)
        self._source: BatchSource = make_source(self.spec, self._from_start, self._loading, part)
        self._tokens = TokenCounter(self._source, self.prepared, self.timer)
        self._agreed, self._cross = self._tokens.agreed, self._tokens.cross
        # The next batch of so many tokens may fit into an epoch that this one would not.
        in_tokens = self.prepared.bound_policy.unit is TimeUnit.TOKEN
        self._crosses = in_tokens and self.horizon.last_batch == "drop"

    @property
    def rank(self) -> int:
        """The number of this process among those that share each batch."""
        return self.ranks.dp_rank

    @property
    def world_size(self) -> int:
        """How many processes share each batch."""
        return self.ranks.dp_world_size

    @property
    def tracks_tokens(self) -> bool:
        """Whether the tokens of a batch are known; may read one sample to find out."""
        return self._tokens.is_tracked

    def __len__(self) -> int:
        """Return the number of steps in the whole run, finished ones included.

        >>> len(StepLoader(range(10), 4, max_duration="2ep"))
        6

        Raises:
            TypeError: the number is not known before the run; see `is_planned`.
        """
        count = self.prepared.num_batches
        if count is None:
            raise TypeError(f"the steps of {self.horizon.max_duration} are only known in the run")
        return count

    def __bool__(self) -> bool:
        return True  # always true, as for any iterator; `len` may not be known

    def __next__(self) -> Step:
        if self._pending is not None:
            self.finish()
        if self._fetched_steps is None:
            self._fetched_steps = self._open()
        while True:
            if self._asks_clock and self.horizon.is_done(self.timer.timestamp):
                self.close()
                raise StopIteration
            try:
                fetched = next(self._fetched_steps, None)
            except BaseException:
                self.close()  # a caller that asks again gets the same step, not the end of the run
                raise
            if fetched is None:
                self._arrive()
                raise StopIteration
            if fetched.plan.skipped:
                self.timer.end_epoch()
                self._decisions.is_elsewhere = True
            if fetched.micro_batches:
                break
            self.timer.end_epoch(dropped=fetched.size)
        size, world, each = fetched.size, self.ranks.dp_world_size, self._tokens.each
        row = fetched.plan.row
        micro_batches = []
        count: Callable[[Any, int], int] = self._tokens
        if self._tokens.lengths is not None:
            known = iter(self._tokens.of_micro_batches(fetched))
            count = lambda *_: next(known)  # noqa: E731
        for batch, samples in fetched.micro_batches:
            tokens = count(batch, samples) if each is None else samples * each
            micro_batches.append(MicroBatch(batch, samples, tokens, samples * world / size, row))
        step = Step(self.timer.timestamp, size, fetched.plan.decided, micro_batches)
        self._pending = step, fetched
        return step

    def finish(
        self,
        step: Step | None = None,
        *,
        tokens: int | None = None,
        seconds: float | None = None,
        signals: Signals = NO_SIGNALS,
    ) -> Timestamp:
        """Count the last step and return the clock after it.

        Asking for the next step does this, too. All ranks must call it: unless you pass tokens and
        seconds, the ranks agree on both and compare the signals.

        Args:
            step: the step, to check that it is the last one.
            tokens: its tokens over all ranks; None: counted.
            seconds: the wall time since the step before, the same on all ranks; None: measured.
            signals: what the step measured, for the policy; the same on all ranks.

        Raises:
            DataError: no step or another one is open, or the ranks have different signals.
        """
        if self._pending is None or (step is not None and step is not self._pending[0]):
            why = "no step is open, or another one is"
            raise DataError.bad("step", step, why, "call finish() once for the last step")
        open_step, fetched = self._pending
        self._pending = None
        if self._agrees:
            tokens, seconds = self._agreed(open_step, tokens, seconds, signals)
        plan, timer, each = fetched.plan, self.timer, self._tokens.each
        if each is None and self._tokens.lengths is not None:
            tokens = self._tokens.lengths.tokens(timer.sample, timer.sample + fetched.size)
        elif tokens is None:
            tokens = open_step.num_tokens if each is None else fetched.size * each
        if plan.ends_epochs or fetched.crossings or self._crosses:
            self._cross(fetched, open_step, tokens, seconds)
        else:
            timer.update(fetched.size, tokens=tokens, seconds=seconds)
        decided = self._decisions
        if plan is not decided.last or signals is not decided.signals or signals.metric is not None:
            decided.finish(plan, signals, fetched.size, tokens)
        if self._source.chunks is not None:
            self._source.chunks.keep()
        return timer.timestamp

    @property
    def extent(self) -> dict[str, object]:
        """The sizes of the last step, by name: the same on every rank."""
        if self._pending is None:
            return {}
        _, fetched = self._pending
        return {
            "batch size": fetched.plan.decided,
            "number of samples": fetched.size,
            "samples after the end of the epoch": fetched.crossings,
        }

    def log_values(self) -> Mapping[str, float]:
        """Return the values behind the policy's last decision, by name, for the log."""
        return self._from_start.bound_policy.log_values(self._decisions.state)

    def note_metric(self, value: float) -> None:
        """Give the policy, and schedules that follow it, a metric measured since the last step."""
        if self._pending is None:
            self._decisions.note(value)
        else:
            self._decisions.noted = value

    def note_cost(self, ratio: float) -> None:
        """Give the policy the price of a step, `a / b` of `StepCost`, from now on.

        >>> StepLoader([1, 2], 1, max_duration="1ep").note_cost(64.0)
        """
        self._decisions.signals = replace(self._decisions.signals, cost_ratio=ratio)

    def take_back(self) -> None:
        """Yield the open step once more: it could not be run.

        >>> loader = StepLoader([1, 2, 3, 4], 2, max_duration="1ep")
        >>> next(loader).timestamp == (loader.take_back() or next(loader).timestamp)
        True
        """
        if self._pending is None:
            return
        (_, fetched), self._pending = self._pending, None
        if self._fetched_steps is None or self.spec.is_map_style:
            self.close()
        else:  # an iterable cannot be read twice
            again = fetched._replace(plan=fetched.plan._replace(skipped=0))
            self._fetched_steps = chain((again,), self._fetched_steps)

    def example_batch(self, indices: list[int]) -> Any:
        """Return the batch of these samples of a map-style data set.

        It counts nothing and leaves random state unchanged.

        >>> StepLoader(range(100), 4, max_duration="1ep").example_batch([0, 25, 99]).tolist()
        [0, 25, 99]
        """
        return self._source.example_batch(indices)

    def set_micro_batch_size(self, size: int | str | None) -> None:
        """Cut later batches into micro-batches of at most `size` samples, or so many tokens.

        The batches and their samples do not change.

        >>> loader = StepLoader([1, 2, 3, 4], 4, max_duration="1ep")
        >>> loader.set_micro_batch_size(3)
        >>> [micro.num_samples for micro in next(loader)]
        [2, 2]

        Raises:
            DataError: the data are an iterable, or a step is open.
            BatchSizeError: `size` is not a batch size.
        """
        is_open = self._pending is not None
        if is_open or not self.spec.is_map_style:
            why = "a step is open" if is_open else "the data are an iterable"
            instead = "call finish() first" if is_open else "pass it when the loader is made"
            raise DataError.bad("size", size, why, instead)
        self.close()
        self._read(size)

    def close(self) -> None:
        """Stop the workers. Iterating again continues from the clock."""
        self._fetched_steps = None
        self._decisions.restart(self._decisions.state, self._decisions.signals)

    def state_dict(self, *, again: bool = False) -> dict[str, Any]:
        """Return the position as JSON: clock, policy, order, and the source's own state.

        It matches the clock and changes nothing. Call `finish()` first: only you know whether the
        last step was trained, or comes again after a resume. Except for wall times, the record
        is the same on every rank, and you can resume with another number of ranks, workers or
        micro-batches. If each rank has its own stream, the record holds the place of each: then
        every rank must call this, and you must resume with as many ranks.

        >>> loader = StepLoader([1, 2, 3, 4], 2, max_duration="1ep")
        >>> step, after = next(loader), loader.finish()
        >>> loader.state_dict()["clock"]["sample"]
        2

        Args:
            again: whether a step that is not finished comes again after a resume.

        Raises:
            DataError: a step is not finished.
        """
        if self._pending is not None and not again:
            raise DataError.cannot(
                f"save the position in the step at {self.timer.timestamp.get('sp')}",
                why="the step is not finished",
                instead="call finish() first, or write state_dict(again=True) if it must come "
                "again after a resume",
            )
        return as_json(
            {
                "version": _VERSION,
                "clock": self.timer.state_dict(),
                **self._decisions.state_dict(),
                "order": self._source.order_record,
                "source": self._source.state_dict(self.timer.timestamp),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where `state_dict` was called, with the first unseen sample.

        A policy of another kind starts anew from there.

        Raises:
            CheckpointError: it was saved from data of another length or in another order, or it is
                damaged.
        """
        self.close()
        self._pending, self._is_compared = None, False
        with reading_state():
            if state.get("version") != _VERSION:
                why = f"this version of stretto reads {_VERSION}"
                instead = "pass what state_dict() returned"
                raise CheckpointError.bad("version", state.get("version"), why, instead)
            present = self._source.order_record
            if self.may_reorder and "seed" in present:
                present = {**present, "seed": state["order"].get("seed")}
            _check_order(state["order"], present)
            self.timer.load_state_dict(state["clock"])
            self.has_dropped_state = not self._decisions.load_state_dict(state)
            source = state["source"]
        decided, now = self._decisions, self.timer.timestamp
        self.prepared = resumed(self._from_start, now, decided.past, decided.state)
        self.horizon = self.timer.horizon = self.prepared.horizon
        self._source.load_state_dict(source)  # outside `read`: errors of the data are not damage

    def _compare(self) -> None:
        """Compare what the ranks were given, before one of them reads or waits."""
        self._is_compared = True
        run, spec, loading = self._from_start, self.spec, self._loading
        found = described_run(spec, run, loading) | {
            "max_duration": self.horizon.max_duration,
            "micro_batch_size": self.micro_batch_size,
            "idle_ranks": self._idle_ranks,
            "samples so far": self.timer.sample,
            **{
                f"every.{name}": [(str(axis.unit), tick) for axis, tick in one.next(Timestamp())]
                for name, one in run.bound_triggers.items()
            },
            **self.also_described(),
        }
        shared = {name: str(plain(one)) for name, one in found.items() if name not in OWN_OF_A_RANK}
        # Workers would share the files that reading a sample here may open.
        samples = {_SAMPLES: None if loading.num_workers else samples_mark(spec)}
        check_agreement(shared | samples, self.ranks, call="the first step")

    def _open(self) -> Iterator[FetchedStep]:
        source, decisions = self._source, self._decisions
        if self.ranks.can_compare and not self._is_compared:
            self._compare()
        if self.ranks.dp_world_size > 1:
            if not self._idle_ranks:
                decisions.check_shares(self.prepared, source.part)
            source.check_streams()
        self.timer.start()  # time before the first step does not count
        steps = source.steps(decisions.plans(is_ahead=source.looks_ahead))
        return pinned(steps) if source.pins else steps

    def _arrive(self) -> None:
        """Skip what `drop` leaves out at the end of the run."""
        end = self._decisions.end
        if end is not None and end.sample > self.timer.sample:
            self.timer.end_epoch()
            self._decisions.is_elsewhere = True


def _check_order(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse to resume with data of another length or in another order.

    Raises:
        CheckpointError: the saved state belongs to another order.
    """
    if "seed" in saved:  # of a version that joined no samples
        saved = {"longest_row": 1, **saved}
    if set(saved) != set(present):
        if "sharded" in (*saved, *present):
            has = "has" if "sharded" in saved else "does not have"
            raise other_order(f"the saved run {has} sharded=True", "pass the same DataSpec")
        kind = "a map-style data set" if saved else "an iterable"
        raise other_order(f"it was saved from {kind}, and these are other data", "pass the same")
    for name, value in saved.items():
        if value != present[name]:
            why = f"it was saved with {name}={value} and this run has {present[name]}"
            raise other_order(why, "pass the same, or start a new run")
