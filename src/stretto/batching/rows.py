"""Sequence length on the clock: batches of whole rows, each of several consecutive samples.

A row of `k` samples begins at a multiple of `k`. Each length divides the longer ones, so after
longer rows shorter ones may begin at once. Before longer rows, the last batch of shorter ones is
cut, or filled up if it is too small for that.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

from stretto.batching.policy import NO_SIGNALS, Bound, Decision, Hold, PolicyState, Signals
from stretto.batching.steps import PiecewiseConstant, StepsLike
from stretto.errors import BatchSizeError
from stretto.schedules import Custom, Schedule
from stretto.timing import Horizon, Timer, Timestamp, TimeUnit

LengthsLike: TypeAlias = PiecewiseConstant | int | StepsLike
"""Tokens of a sequence: a number, a text such as `"0tok:4096 252Mtok:8192"`, or a mapping."""
LENGTH = "sequence_length"
"""The name of the length among the values of a run."""


def as_lengths(value: LengthsLike) -> PiecewiseConstant:
    """Return sequence lengths as steps.

    >>> as_lengths(8192)
    PiecewiseConstant('0sp:8192')

    Raises:
        BatchSizeError: a length is not an integer of at least 1, or the times are out of order.
        TimeError: a time cannot be read.
    """
    if isinstance(value, PiecewiseConstant):
        return value
    is_one = isinstance(value, int) or (isinstance(value, str) and ":" not in value)
    return PiecewiseConstant(f"0sp:{value}" if is_one else value)  # type: ignore[arg-type]


def as_rows(lengths: LengthsLike, tokens_per_sample: int | None) -> PiecewiseConstant:
    """Return sequence lengths in samples.

    >>> as_rows("0tok:4096 2Mtok:8192", 2048)
    PiecewiseConstant('0tok:2 2Mtok:4')

    Args:
        lengths: in tokens.
        tokens_per_sample: the tokens of each sample; None: samples differ, or it is not known.

    Raises:
        BatchSizeError: samples differ, or a length is not a multiple of all shorter ones.
        TimeError: a time cannot be read.
    """
    steps, each = as_lengths(lengths), tokens_per_sample
    if each is None:
        why = "samples are not known to have equally many tokens"
        instead = "pass DataSpec(data, tokens_per_sample=...) with the shortest length"
        raise BatchSizeError.bad("sequence_length", str(steps), why, instead)
    for shorter, longer in pairwise([each, *sorted(length for _, length in steps.steps)]):
        if longer % shorter:
            why = f"it is no multiple of {shorter} tokens, those of a shorter row or of a sample"
            near = max(1, round(longer / shorter)) * shorter
            raise BatchSizeError.bad("sequence_length", longer, why, f"write {near}")
    return PiecewiseConstant({time: length // each for time, length in steps.steps})


def whole_rows(policy: Bound, rows: PiecewiseConstant, horizon: Horizon) -> Bound:
    """Return a bound policy whose sizes are whole rows, at least one.

    >>> horizon = Horizon("1ep", dataset_num_samples=64).in_groups(4)
    >>> from stretto.batching import Fixed
    >>> bound = whole_rows(Fixed(6).bind(horizon), PiecewiseConstant("0sp:1 10sp:4"), horizon)
    >>> [bound.decide(Timestamp(sample=at), {}, Signals())[0] for at in (0, 6, 12, 14, 16)]
    [6, 6, 4, 6, 4]

    Args:
        policy: sizes in samples.
        rows: how many samples are joined to a row.
        horizon: the run.
    """
    lengths, sizes = rows.bind(horizon), [size for _, size in rows.steps]

    def rows_at(timestamp: Timestamp) -> tuple[int, int]:
        """Return the samples of a row, and of the one that is due."""
        due, _ = lengths.decide(timestamp, {}, NO_SIGNALS)
        fit = (one for one in sizes if one <= due and not timestamp.sample % one)
        return max(fit, default=1), due

    def decide(timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
        size, state = policy.decide(timestamp, state, signals)
        (row, due), start = rows_at(timestamp), timestamp.sample
        size = max(1, size // row) * row
        if row < due:  # ends where the due row can begin
            size = max((start + size) // due, start // due + 1) * due - start
        return size, state

    def holds_until(timestamp: Timestamp, state: PolicyState) -> Hold | None:
        row, due = rows_at(timestamp)
        hold, same = policy.holds_until(timestamp, state), lengths.holds_until(timestamp, {})
        return hold & same if hold and same and row == due else None

    longest = max(sizes)
    least, most = policy.bounds or (0, 0)
    return replace(
        policy,
        decide=decide,
        holds_until=holds_until,
        is_static=policy.is_static and lengths.is_static,
        units=policy.units | lengths.units,
        bounds=policy.bounds and (max(least // longest * longest, min(sizes)), max(most, longest)),
        row_at=lambda timestamp: rows_at(timestamp)[0],
        asked=policy.decide,
    )


def length_of(policy: Bound, lengths: LengthsLike, tokens_per_sample: int | None) -> Schedule:
    """Return the sequence length of a policy in rows, as a value of the run."""

    def length(timer: Timer) -> int:
        assert policy.row_at is not None, "in rows"
        return policy.row_at(timer.timestamp) * (tokens_per_sample or 0)

    # What a description of the run shows, so that a resume tells what changed.
    length.__qualname__ = str(as_lengths(lengths))
    return Custom(length, reads=" ".join(policy.units | {TimeUnit.SAMPLE}))
