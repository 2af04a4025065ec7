"""`TokenCounter`: counts the tokens of steps, if needed, and agrees on them with other ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, final

from stretto.batching import Signals
from stretto.data.fetching.shares import FetchedStep
from stretto.data.ranks import agreed, is_all
from stretto.data.source import Source
from stretto.data.step import MicroBatch, Step
from stretto.errors import DataError
from stretto.planning import Prepared
from stretto.runtime.random_state import kept_generators
from stretto.timing import Timer, TimeUnit, tick


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

    def __init__(self, source: Source, run: Prepared, timer: Timer) -> None:
        self._spec = spec = source.spec
        self._source = source
        self._run = run
        self._timer = timer
        self._units = run.bound_policy.units | {run.facts.max_duration.unit}
        self._is_needed = TimeUnit.TOKEN in self._units
        self.each = spec.known_tokens_per_sample
        """The tokens of every sample, 0 if none are tracked; None: they must be counted."""
        self._stated = spec.known_num_tokens if self.each is None else None
        self._tells: bool | None = None
        if self.each is not None or spec.get_num_tokens_in_batch is not None:
            self._tells = True
        if self._is_needed and not self.is_tracked:
            raise _uncountable()

    @property
    def is_tracked(self) -> bool:
        """Whether the tokens of a batch are known.

        May read one sample to find out; an iterable is assumed to count until its first batch.
        """
        if self._tells is None and self._source.map_source is not None:
            with kept_generators():
                batch = self._source.map_source.fetch([0])
            self._note(tells=self._spec.count_tokens(batch) is not None)
        return self._tells is not False

    @property
    def is_counted(self) -> bool:
        """Whether tokens differ from sample to sample and are counted."""
        return self.each is None

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
            raise _uncountable()
        return tokens if tokens and num_samples else 0

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
        part, is_open = self._source.part, tokens is None or seconds is None
        counts = tokens is None and self.is_counted
        measures = seconds is None and TimeUnit.SECOND in self._units
        if counts or measures or (is_open and self._run.bound_policy.reads and is_all(part)):
            passed = self._timer.seconds_since_update()
            decision = (step.timestamp.sample, step.batch_size, signals)
            total, passed = agreed(part, step.num_tokens, passed, decision)
            return (total if counts else tokens), (passed if measures else seconds)
        return tokens, seconds

    def cross(self, fetched: FetchedStep, step: Step, tokens: int, seconds: float | None) -> None:
        """Move the clock over a batch in which epochs end."""
        timer, horizon, size = self._timer, self._run.horizon, fetched.size
        of_last = partial(self._of_last, step, tokens)
        is_whole = timer.sample_in_epoch + size == horizon.dataset_num_samples
        if is_whole or fetched.crossings == (0,):  # nothing carried or dropped
            self._compare(timer.token_in_epoch + tokens)
        if fetched.plan.ends_epochs:
            tick(timer, horizon, size, tokens=tokens, seconds=seconds, tokens_of_last=of_last)
            return
        timer.update(samples=size, tokens=tokens, seconds=seconds)
        for carried in fetched.crossings:
            timer.end_epoch(samples=carried, tokens=of_last(carried))

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
        if self.is_counted and step.local_num_samples == step.num_samples:
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


def _uncountable() -> DataError:
    return DataError.cannot(
        "count the tokens of these data",
        why="a batch has neither attention_mask nor input_ids, and the run needs its tokens",
        instead="pass DataSpec(data, tokens_per_sample=...) or get_num_tokens_in_batch=...",
    )
