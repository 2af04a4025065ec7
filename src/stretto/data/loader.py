"""`StepLoader`: yields the batches of a run, step by step, and moves its clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, final

from stretto.batching import NO_SIGNALS, BatchSizePolicy, PolicyLike, Signals
from stretto.data import state as saved
from stretto.data.decisions import Decisions
from stretto.data.fetching.feed import FetchedStep
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

    The policy decides each size at its step, even if workers fetch ahead. The loader owns the
    run's clock: it counts a step when you call `finish` or ask for the next one.

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
        shuffle: whether each epoch has its own order; None: yes, or what the given `DataLoader`
            does. An iterable has its own order.
        last_batch: what happens if an epoch ends inside a batch: `keep` the smaller batch, `drop`
            it, or `carry` it on into the next epoch; None: `drop` for a `DataLoader` with
            `drop_last=True`, else `keep`.
        rank: this process among those that share each batch; None: torch.distributed's.
        world_size: how many processes share each batch; None: torch.distributed's.
        num_workers: processes that fetch; None: as the `DataLoader`, or 0.
        prefetch_factor: elements that each worker fetches ahead.
        pin_memory: whether batches are copied to pinned memory, if there is an accelerator.
        collate_fn: makes a batch of a list of samples; None: torch's default.
        keyed_randomness: whether randomness inside each sample depends on (seed, epoch, sample)
            alone, so it is the same for any number of workers and ranks and any batch sizes.
        chunk_size: samples that a worker fetches at once if sizes are decided during the run.
        clock: a monotonic clock in nanoseconds.

    Raises:
        StrettoError: the arguments do not fit; the message says what to write instead.
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
        # If only the clock can tell when the run is over, it is checked before each step.
        self._asks_clock = (
            self.horizon.end_sample is None and self.horizon.max_duration.unit != "ba"
        )
        self._reads_seconds = _reads(self.horizon, bound.units, TimeUnit.SECOND)
        self._fetched_steps: Iterator[FetchedStep] | None = None
        self._pending: tuple[Step, FetchedStep] | None = None
        self._decisions = Decisions(self.horizon, bound, self.timer)
        self.reads = bound.reads
        """The signals that the policy reads (see `BoundPolicy.reads`)."""
        self.has_dropped_state = False
        """Whether the loaded state belongs to another policy, so this one starts anew."""

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

        Not if sizes follow measurements, the wall clock or counted tokens, or if an epoch of
        unknown length may end inside a batch.
        """
        return self.prepared.is_planned

    @property
    def tracks_tokens(self) -> bool:
        """Whether the tokens of a batch are known; may read one sample to find out."""
        return self._tokens.is_tracked

    def __iter__(self) -> Iterator[Step]:
        return self

    def __len__(self) -> int:
        """Return the number of steps in the whole run, finished ones included.

        >>> len(StepLoader(range(10), 4, max_duration="2ep"))
        6

        Raises:
            TypeError: the number is not known before the run; see `is_planned`.
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
            if fetched.micro_batches:
                break
            self.timer.skip(samples=fetched.size)
            self.timer.end_epoch()
        size, world, each = fetched.size, self._part.world_size, self._tokens.each
        micro_batches = []
        for batch, samples in fetched.micro_batches:
            tokens = self._tokens(batch, samples) if each is None else samples * each
            micro_batches.append(MicroBatch(batch, samples, tokens, samples * world / size))
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
            raise DataError.cannot(
                "finish a step that is not the one in hand",
                why="each is finished once, before the next is asked for",
                instead="call finish() once for the step that was yielded last",
            )
        open_step, fetched = self._pending
        self._pending = None
        if self._part.world_size > 1:
            tokens, seconds = self._agreed(open_step, tokens, seconds, signals)
        plan, timer, each = fetched.plan, self.timer, self._tokens.each
        if tokens is None:
            tokens = open_step.num_tokens if each is None else fetched.size * each
        if plan.ends_epochs or fetched.crossings:
            self._cross(fetched, open_step, tokens, seconds)
        else:
            timer.update(samples=fetched.size, tokens=tokens, seconds=seconds)
        if plan is not self._decisions.last or signals is not self._decisions.signals:
            self._decisions.finish(plan, signals, fetched.size)
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
        return self._decisions.log_values()

    def note_metric(self, value: float) -> None:
        """Give the policy a metric measured since the last step."""
        self._decisions.signals = replace(self._decisions.signals, metric=value)

    def take_back(self) -> None:
        """Yield the open step once more: it could not be run.

        >>> loader = StepLoader([1, 2, 3, 4], 2, max_duration="1ep", shuffle=False)
        >>> next(loader).timestamp.sample
        0
        >>> loader.take_back()
        >>> next(loader).timestamp.sample
        0
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

    def set_micro_batch_size(self, size: int | None) -> None:
        """Cut later batches into micro-batches of at most `size` samples.

        The batches and their samples do not change.

        >>> loader = StepLoader([1, 2, 3, 4], 4, max_duration="1ep", shuffle=False)
        >>> loader.set_micro_batch_size(3)
        >>> [micro.batch.tolist() for micro in next(loader)]
        [[1, 2], [3, 4]]

        Raises:
            DataError: the data are an iterable, or a step is open.
            BatchSizeError: `size` is not a batch size.
        """
        if not self.spec.is_map_style or self._pending is not None:
            is_open = self._pending is not None
            raise DataError.cannot(
                f"change the micro-batch size to {size}",
                why="a step is open" if is_open else "the data are an iterable",
                instead="call finish() first" if is_open else "pass it when the loader is made",
            )
        self._part = part_of(self._part.rank, self._part.world_size, size)
        self._reading = replace(self._reading, part=self._part)
        self.close()
        self._source = make_source(self._reading, self.horizon, is_planned=self.is_planned)
        self._tokens = TokenCounter(self._reading.spec, self._source, is_needed=self._needs_tokens)

    def close(self) -> None:
        """Stop the workers. Iterating again continues from the clock."""
        self._fetched_steps = None
        self._decisions.restart(self._decisions.state, self._decisions.signals)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON: clock, policy, order, and the source's own state.

        It matches the clock and changes nothing: an unfinished step comes again after a resume.
        Call `finish()` first if the step has updated the weights. Except for wall times, the record
        is the same on every rank, and you can resume with another number of ranks, workers or
        micro-batches. If each rank has its own stream, the record holds the place of each: then
        every rank must call this, and you must resume with as many ranks.

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
        """Continue from where `state_dict` was called, with the first unseen sample.

        A policy of another kind starts anew from there.

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
        self._source.load_state_dict(source)  # outside `read`: errors of the data are not damage

    def _open(self) -> Iterator[FetchedStep]:
        if self._part.world_size > 1:
            now, decide = self.timer.timestamp, self._decisions.decide
            check_shares(self._part, self.prepared, now, decide)
            self._source.check_streams()
        self.timer.start()  # time before the first step does not count
        decisions = self._decisions
        is_ahead = self._source.looks_ahead
        return self._source.feed.steps(decisions.ahead() if is_ahead else decisions.at_each_step())

    def _arrive(self) -> None:
        """Skip what `drop` leaves out at the end of the run."""
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
        """Return the tokens of all ranks and the seconds of one, if needed and not given.

        A caller who passes both has made the ranks agree. Otherwise the signals are compared.
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

    def _cross(self, fetched: FetchedStep, step: Step, tokens: int, seconds: float | None) -> None:
        """Move the clock over a batch in which epochs end."""
        timer, size = self.timer, fetched.size

        def of_last(samples: int) -> int:
            return self._tokens.last(step, samples, tokens)

        is_whole = timer.sample_in_epoch + size == self.horizon.dataset_num_samples
        if is_whole or fetched.crossings == (0,):  # nothing carried or dropped
            self._tokens.compare(timer.token_in_epoch + tokens)
        if fetched.plan.ends_epochs:
            tick(timer, self.horizon, size, tokens=tokens, seconds=seconds, tokens_of_last=of_last)
            return
        timer.update(samples=size, tokens=tokens, seconds=seconds)
        for carried in fetched.crossings:
            timer.end_epoch(samples=carried, tokens=of_last(carried))


def _reads(run: Horizon, units: frozenset[TimeUnit], unit: TimeUnit) -> bool:
    return run.max_duration.unit == unit or unit in units
