"""`StepLoader`: one optimizer step after the other, cut to size, on the clock that it moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, final

from stretto.batching import NO_SIGNALS, BatchSizePolicy, PolicyLike, Signals
from stretto.data import state as saved
from stretto.data.decisions import Decisions
from stretto.data.fetching.feed import Draw
from stretto.data.fetching.workers import Workers
from stretto.data.prepared import prepared_for
from stretto.data.ranks import agreed, check_shares, is_all, part_of
from stretto.data.source import Reading, Source, make_source
from stretto.data.spec import Collate, DataSpec
from stretto.data.step import MicroBatch, Step
from stretto.data.token_counter import TokenCounter
from stretto.errors import DataError, cannot
from stretto.planning import PlannedSizes, Prepared
from stretto.timing import Horizon, LastBatch, TimeLike, Timer, Timestamp, TimeUnit, tick


@final
class StepLoader(Iterator[Step]):
    """Yields the micro-batches of one optimizer step after the other, to the end of the run.

    The size of each step is the policy's at that very step, whatever workers fetch ahead. The
    loader owns the run's clock: when the next step is asked for, or `finish` is called, the one
    before is counted.

    >>> loader = StepLoader([1, 2, 3, 4, 5, 6], "0sp:1 50%:2", max_duration="1ep", shuffle=False)
    >>> for step in loader:
    ...     print(step.timestamp.sample, [micro.batch.tolist() for micro in step])
    0 [[1]]
    1 [[2]]
    2 [[3]]
    3 [[4, 5]]
    5 [[6]]
    >>> loader.timer.epoch, loader.timer.batch
    (1, 5)

    Args:
        data: a map-style data set, a `DataLoader`, an iterable of collated batches, or a
            `DataSpec` of one of them.
        batch_size: samples of one step over all ranks: a number, a text such as
            `"0tok:768 250Btok:1536"`, a function, or a policy. Or a run that `prepare` has bound,
            without `max_duration` and `last_batch`.
        max_duration: how long the run is, in any unit but `dur`.
        micro_batch_size: the most samples of one micro-batch; None: a rank's whole share.
        seed: the seed of the order (and of keyed randomness); nothing else depends on it.
        shuffle: whether each epoch has an order of its own; None: yes, or as the `DataLoader` that
            was given. An iterable has its own order.
        last_batch: where an epoch ends inside a batch: `keep` the smaller one, `drop` it, or
            `carry` on into the next epoch; None: `keep`, or `drop` as a `DataLoader` with
            `drop_last=True`.
        rank: this process among those that share each batch; None: torch.distributed's.
        world_size: how many processes do; None: torch.distributed's.
        num_workers: processes that fetch; None: as the `DataLoader`, or 0.
        prefetch_factor: elements that each worker fetches ahead.
        pin_memory: whether batches are copied to pinned memory, where there is an accelerator.
        collate_fn: makes a batch of a list of samples; None: torch's default.
        keyed_randomness: whether the chance inside each sample follows from (seed, epoch, sample)
            alone, so that it is the same for any workers, ranks and batch sizes.
        chunk_size: samples that a worker fetches at once where sizes are decided during the run.
        clock: a monotonic clock in nanoseconds.

    Raises:
        StrettoError: something cannot be; the message says what to write instead.
    """

    def __init__(
        self,
        data: Any,
        batch_size: PolicyLike | Prepared,
        *,
        max_duration: TimeLike | None = None,
        micro_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        last_batch: LastBatch | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        collate_fn: Collate | None = None,
        keyed_randomness: bool = False,
        chunk_size: int | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        spec = DataSpec.of(data)
        self.prepared = prepared_for(spec, batch_size, max_duration, last_batch)
        self._part = part_of(rank, world_size, micro_batch_size)
        self.policy: BatchSizePolicy = self.prepared.policy
        self.horizon = self.prepared.horizon
        self.timer = Timer(self.horizon, clock=clock)
        bound = self.prepared.bound_policy
        self._reading = Reading(
            spec,
            Workers(
                num_workers=num_workers,
                prefetch_factor=prefetch_factor,
                pin_memory=pin_memory,
                collate_fn=collate_fn,
            ),
            self._part,
            seed=seed,
            shuffle=shuffle,
            is_keyed=keyed_randomness,
            chunk_size=chunk_size,
        )
        self._needs_tokens = _reads(self.horizon, bound.units, TimeUnit.TOKEN)
        self._source: Source = make_source(self._reading, self.horizon, is_planned=self.is_planned)
        self._tokens = TokenCounter(spec, self._source, is_needed=self._needs_tokens)
        # Where only the clock can tell when the run is over, it is asked before each step.
        self._asks_clock = (
            self.horizon.end_sample is None and self.horizon.max_duration.unit != "ba"
        )
        self._reads_seconds = _reads(self.horizon, bound.units, TimeUnit.SECOND)
        self._draws: Iterator[Draw] | None = None
        self._pending: tuple[Step, Draw] | None = None
        self._decisions = Decisions(self.horizon, bound, self.timer)
        self.reads = bound.reads
        """The signals that the policy reads (see `BoundPolicy.reads`)."""
        self.has_dropped_state = False
        """Whether the state that was loaded is of another policy, and this one begins afresh."""

    @property
    def rank(self) -> int:
        """This process among those that share each batch."""
        return self._part.rank

    @property
    def world_size(self) -> int:
        """How many processes share each batch."""
        return self._part.world_size

    @property
    def micro_batch_size(self) -> int | None:
        """The most samples of one micro-batch; None: a rank's whole share."""
        return self._part.micro_batch_size

    @property
    def spec(self) -> DataSpec:
        """The data."""
        return self._reading.spec

    @property
    def is_planned(self) -> bool:
        """Whether every batch is known before the run.

        Not if sizes follow measurements, the wall clock, or tokens that have to be counted; nor if
        an epoch of unknown length may end inside a batch.
        """
        return self.prepared.is_planned

    @property
    def tracks_tokens(self) -> bool:
        """Whether the data tell how many tokens a batch has; may read one sample to find out."""
        return self._tokens.is_tracked

    def __iter__(self) -> Iterator[Step]:
        return self

    def __len__(self) -> int:
        """Return how many steps the whole run has, those that are done included.

        >>> len(StepLoader(range(10), 4, max_duration="2ep"))
        6

        Raises:
            TypeError: only the run itself can tell; see `is_planned`.
        """
        run, sizes = self.horizon.max_duration, self.horizon.batch_sizes
        if run.unit is TimeUnit.BATCH:
            return int(run.amount)
        count = sizes.num_batches if isinstance(sizes, PlannedSizes) else None
        if count is None:
            message = cannot(
                f"tell how many steps a run of {run} has",
                why="only the run itself can tell, with these batch sizes and data",
                instead="write max_duration in 'ba', or count what loader.timer.batch says",
            )
            raise TypeError(str(message))
        return count

    def __bool__(self) -> bool:
        return True  # whether it is there, as of any iterator; not whether it has a length

    def __next__(self) -> Step:
        if self._pending is not None:
            self.finish()
        if self._draws is None:
            self._draws = self._open()
        while True:
            if self._asks_clock and self.horizon.is_done(self.timer.timestamp):
                self.close()
                raise StopIteration
            try:
                draw = next(self._draws, None)
            except BaseException:
                self.close()  # whoever asks again gets the same step, not the end of the run
                raise
            if draw is None:
                self._arrive()
                raise StopIteration
            if draw.plan.skipped:
                self.timer.end_epoch()
            if draw.pieces:
                break
            self.timer.skip(samples=draw.size)
            self.timer.end_epoch()
        size, world, each, micro_batches = draw.size, self._part.world_size, self._tokens.each, []
        for batch, samples in draw.pieces:
            tokens = self._tokens(batch, samples) if each is None else samples * each
            micro_batches.append(MicroBatch(batch, samples, tokens, samples * world / size))
        step = Step(self.timer.timestamp, size, draw.plan.decided, micro_batches)
        self._pending = step, draw
        return step

    def finish(
        self,
        step: Step | None = None,
        *,
        tokens: int | None = None,
        seconds: float | None = None,
        signals: Signals = NO_SIGNALS,
    ) -> Timestamp:
        """Count the step that was yielded last, and return the clock behind it.

        Asking for the next step does this, too. On several ranks all must do it, as counted tokens
        and the wall clock are agreed on, and signals are compared, unless both are given.

        Args:
            step: the step, to be sure that it is the one.
            tokens: its tokens over all ranks; None: counted.
            seconds: the wall time since the one before, the same on all ranks; None: measured.
            signals: what the step measured, for the policy; the same on all ranks.

        Raises:
            DataError: no step, or another one, is open; or the signals are not the same.
        """
        if self._pending is None or (step is not None and step is not self._pending[0]):
            raise DataError(
                cannot(
                    "finish a step that is not the one in hand",
                    why="each is finished once, before the next is asked for",
                    instead="call finish() once for the step that was yielded last",
                )
            )
        open_step, draw = self._pending
        self._pending = None
        if self._part.world_size > 1:
            tokens, seconds = self._agreed(open_step, tokens, seconds, signals)
        plan, timer, each = draw.plan, self.timer, self._tokens.each
        if tokens is None:
            tokens = open_step.num_tokens if each is None else draw.size * each
        if plan.ends_epochs or draw.crossings:
            self._cross(draw, open_step, tokens, seconds)
        else:
            timer.update(samples=draw.size, tokens=tokens, seconds=seconds)
        if plan is not self._decisions.last or signals is not self._decisions.signals:
            self._decisions.finish(plan, signals, draw.size)
        if self._source.chunks is not None:
            self._source.chunks.keep()
        return timer.timestamp

    @property
    def extent(self) -> dict[str, object]:
        """How far the step that was yielded last reaches, by name: the same on every rank."""
        if self._pending is None:
            return {}
        _, draw = self._pending
        return {
            "batch size": draw.plan.decided,
            "number of samples": draw.size,
            "samples after the end of the epoch": draw.crossings,
        }

    def told(self) -> Mapping[str, float]:
        """Return what the policy went by when it decided the last batch, by name."""
        return self._decisions.told()

    def note_metric(self, value: float) -> None:
        """Give the policy a metric that was measured since the last step."""
        self._decisions.signals = replace(self._decisions.signals, metric=value)

    def take_back(self) -> None:
        """Yield the step in hand once more, if there is one: it could not be taken.

        >>> loader = StepLoader([1, 2, 3, 4], 2, max_duration="1ep", shuffle=False)
        >>> next(loader).timestamp.sample
        0
        >>> loader.take_back()
        >>> next(loader).timestamp.sample
        0
        """
        if self._pending is None:
            return
        (_, draw), self._pending = self._pending, None
        if self._draws is None or self.spec.is_map_style:
            self.close()
        else:  # an iterable does not give its samples twice
            again = draw._replace(plan=draw.plan._replace(skipped=0))
            self._draws = chain((again,), self._draws)

    def example_batch(self, indices: list[int]) -> Any:
        """Return the batch of these samples of a map-style data set.

        Nothing is counted, and random state stays as it is.

        >>> StepLoader(range(100), 4, max_duration="1ep").example_batch([0, 25, 99]).tolist()
        [0, 25, 99]
        """
        return self._source.example_batch(indices)

    def set_micro_batch_size(self, size: int | None) -> None:
        """Cut the batches that come from here on into micro-batches of at most `size` samples.

        The batches themselves, and the samples in them, stay what they are.

        >>> loader = StepLoader([1, 2, 3, 4], 4, max_duration="1ep", shuffle=False)
        >>> loader.set_micro_batch_size(3)
        >>> [micro.batch.tolist() for micro in next(loader)]
        [[1, 2], [3, 4]]

        Raises:
            DataError: the data are an iterable, or a step is open.
            BatchSizeError: it is not a size.
        """
        if not self.spec.is_map_style or self._pending is not None:
            is_open = self._pending is not None
            raise DataError(
                cannot(
                    f"change the micro-batch size to {size}",
                    why="a step is open" if is_open else "the data are an iterable",
                    instead="call finish() first" if is_open else "pass it when the loader is made",
                )
            )
        self._part = part_of(self._part.rank, self._part.world_size, size)
        self._reading = replace(self._reading, part=self._part)
        self.close()
        self._source = make_source(self._reading, self.horizon, is_planned=self.is_planned)
        self._tokens = TokenCounter(self._reading.spec, self._source, is_needed=self._needs_tokens)

    def close(self) -> None:
        """Stop the workers. Iterating again goes on from where the clock stands."""
        self._draws = None
        self._decisions.restart(self._decisions.state, self._decisions.signals)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON: clock, policy, order, and the source's own state.

        It agrees with the clock and changes nothing: a step that is not finished yet comes again
        after a resume. Call `finish()` first if the step's weights have been updated. Wall times
        aside, the record is the same on every rank, and another number of ranks, workers or
        micro-batches may go on from it. Where each rank has a stream of its own it holds the place
        of each, so every rank must call it, and as many ranks must go on from it.

        >>> loader = StepLoader([1, 2, 3, 4], 2, max_duration="1ep", shuffle=False)
        >>> step = next(loader)
        >>> loader.state_dict()["clock"]["sample"], loader.finish().sample
        (0, 2)
        >>> loader.state_dict()["clock"]["sample"]
        2
        """
        return {
            "version": saved.VERSION,
            "clock": self.timer.state_dict(),
            "policy": saved.policy_record(self.policy, self._decisions.state),
            "signals": saved.signals_record(self._decisions.signals),
            "size": self._decisions.size,
            "order": saved.order_record(self._source.order, is_sharded=bool(self.spec.sharded)),
            "source": self._source.state_dict(self.timer.timestamp),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was called, with the first unseen sample.

        A policy of another kind starts afresh from there.

        Raises:
            CheckpointError: it was saved from data of another length or in another order, or it is
                damaged.
        """
        self.close()
        self._pending = None
        with saved.read():
            saved.check_version(state)
            saved.check_order(
                state["order"],
                saved.order_record(self._source.order, is_sharded=bool(self.spec.sharded)),
            )
            self.timer.load_state_dict(state["clock"])
            bound = self.prepared.bound_policy
            own = saved.policy_state(self.policy, bound, state["policy"])
            saved.check_state(bound, self.timer.timestamp, own or {})
            self.has_dropped_state = bool(state["policy"]["state"]) and own is None
            signals, source = saved.signals_of(state["signals"]), state["source"]
            self._decisions.resume(bound.start() if own is None else own, signals)
            self._decisions.size = state.get("size")
        self._source.load_state_dict(source)  # which reads the data, whose errors are their own

    def _open(self) -> Iterator[Draw]:
        if self._part.world_size > 1:
            now, decide = self.timer.timestamp, self._decisions.decide
            check_shares(self._part, self.prepared, now, decide)
            self._source.check_streams()
        self.timer.start()  # what was done before the first step is not the run's time
        decisions = self._decisions
        is_ahead = self._source.looks_ahead
        return self._source.feed.draws(decisions.ahead() if is_ahead else decisions.at_each_step())

    def _arrive(self) -> None:
        """Pass over what `drop` leaves out at the end of the run."""
        end = self._decisions.end
        if end is not None and end.sample > self.timer.sample:
            self.timer.end_epoch()

    def _agreed(
        self,
        step: Step,
        tokens: int | None,
        seconds: float | None,
        signals: Signals,
    ) -> tuple[int | None, float | None]:
        """The tokens of all ranks and the seconds of one, where they matter and are not given.

        Who gives both has made the ranks agree; else what sizes follow must be the same on each.
        """
        counts = tokens is None and self._tokens.is_counted
        measures = seconds is None and self._reads_seconds
        is_open = tokens is None or seconds is None
        if counts or measures or (is_open and self.reads and is_all(self._part)):
            passed = self.timer.seconds_since_update()
            decision = (step.timestamp.sample, step.batch_size, signals)
            total, passed = agreed(self._part, step.num_tokens, passed, decision)
            return (total if counts else tokens), (passed if measures else seconds)
        return tokens, seconds

    def _cross(self, draw: Draw, step: Step, tokens: int, seconds: float | None) -> None:
        """Move the clock over a batch in which epochs end."""
        timer, size = self.timer, draw.size

        def of_last(samples: int) -> int:
            return self._tokens.last(step, samples, tokens)

        is_whole = timer.sample_in_epoch + size == self.horizon.dataset_num_samples
        if is_whole or draw.crossings == (0,):  # nothing is carried, and nothing dropped
            self._tokens.compare(timer.token_in_epoch + tokens)
        if draw.plan.ends_epochs:
            tick(timer, self.horizon, size, tokens=tokens, seconds=seconds, tokens_of_last=of_last)
            return
        timer.update(samples=size, tokens=tokens, seconds=seconds)
        for carried in draw.crossings:
            timer.end_epoch(samples=carried, tokens=of_last(carried))


def _reads(run: Horizon, units: frozenset[TimeUnit], unit: TimeUnit) -> bool:
    return run.max_duration.unit == unit or unit in units
