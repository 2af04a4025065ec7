"""Hypothesis strategies for times, horizons and timestamps."""

from __future__ import annotations

from fractions import Fraction
from typing import get_args

from hypothesis import strategies as st

from stretto.timing import Horizon, LastBatch, Time, Timestamp, TimeUnit
from stretto.timing.batches import EqualBatches
from stretto.timing.grammar import WHOLE, parse_unit

_BEYOND_FLOATS = 2**70
"""Well above 2^53, from where on a float no longer holds every whole number."""

_DIGITS = st.integers(-(10**5), 10**5)


def units() -> st.SearchStrategy[TimeUnit]:
    """Any unit of time."""
    return st.sampled_from(TimeUnit)


def times(unit: str | None = None) -> st.SearchStrategy[Time]:
    """Any time, of `unit` or of any: negative, zero, fractional, beyond what a float holds."""
    if unit is None:
        return units().flatmap(times)
    found = parse_unit(unit)
    amounts: st.SearchStrategy[int | Fraction] = st.one_of(
        st.integers(-100, 100),
        st.integers(-_BEYOND_FLOATS, _BEYOND_FLOATS),
        st.builds(lambda digits, power: digits * 10**power, _DIGITS, st.integers(0, 15)),
    )
    if found not in WHOLE:
        thousandths = st.integers(-(10**9), 10**9).map(lambda count: Fraction(count, 1000))
        amounts = st.one_of(amounts, thousandths, st.fractions(max_denominator=10**6))
    return amounts.map(lambda amount: Time(amount, found))


def lengths(unit: str | None = None) -> st.SearchStrategy[Time]:
    """Any positive time: an interval or a duration."""
    return times(unit).map(abs).filter(bool)


@st.composite
def horizons(
    draw: st.DrawFn,
    *,
    run_unit: str | None = None,
    is_sized: bool | None = None,
    has_batch_size: bool | None = None,
) -> Horizon:
    """Any horizon of a short run with consistent facts.

    Args:
        draw: passed by hypothesis.
        run_unit: the unit of the run's length; by default, any but `dur`.
        is_sized: whether the number of samples is known; by default, either.
        has_batch_size: whether all batches have one known size; by default, either.
    """
    run_units = [unit for unit in TimeUnit if unit is not TimeUnit.DURATION]
    unit = draw(st.sampled_from(run_units)) if run_unit is None else parse_unit(run_unit)
    num_samples = None
    if draw(st.booleans()) if is_sized is None else is_sized:
        num_samples = draw(st.integers(1, 60))
    each = draw(st.none() | st.integers(1, 9))
    num_tokens = None
    if each is None and draw(st.booleans()):
        num_tokens = draw(st.integers(1, 500))
    last_batch = draw(st.sampled_from(get_args(LastBatch)))
    size = None
    if draw(st.booleans()) if has_batch_size is None else has_batch_size:
        most = num_samples if last_batch == "drop" and num_samples else 80
        size = draw(st.integers(1, most))
    return Horizon(
        draw(_run_lengths(unit, is_whole=num_samples is None)),
        dataset_num_samples=num_samples,
        dataset_num_tokens=num_tokens,
        tokens_per_sample=each,
        batch_sizes=size,
        last_batch=last_batch,
    )


def _run_lengths(unit: TimeUnit, *, is_whole: bool) -> st.SearchStrategy[Time]:
    if unit is TimeUnit.EPOCH and not is_whole:
        amounts = st.fractions(Fraction(1, 50), 5, max_denominator=50)
        return amounts.map(lambda amount: Time(amount, unit))
    most = {TimeUnit.EPOCH: 5, TimeUnit.BATCH: 40, TimeUnit.TOKEN: 2_000}.get(unit, 300)
    return st.integers(1, most).map(lambda amount: Time(amount, unit))


@st.composite
def timestamps(draw: st.DrawFn, horizon: Horizon) -> Timestamp:
    """Any timestamp of a run over `horizon`, with consistent counters.

    Args:
        draw: passed by hypothesis.
        horizon: the run; if its batch sizes are known, the timestamp lies between two batches.
    """
    sizes, num_samples = horizon.batch_sizes, horizon.dataset_num_samples
    if isinstance(sizes, int):
        sizes = EqualBatches(horizon, Timestamp(), sizes)
    if sizes is None:
        sample = draw(st.integers(0, horizon.end_sample or 500))
        batch = draw(st.integers(1 if sample else 0, sample))
    else:
        most = 100 if horizon.end_sample is None else sizes.batch_at_sample(horizon.end_sample)
        batch = draw(st.integers(0, most))
        sample = sizes.sample_at_batch(batch)
    if num_samples is None:
        epoch, within = draw(st.integers(0, 9)), draw(st.integers(0, sample))
    else:
        epoch, within = divmod(sample, num_samples)
    begun = 0 if sizes is None else sizes.batch_at_sample(sample - within)
    each = horizon.tokens_per_sample
    token = draw(st.integers(0, 10 * sample)) if each is None else sample * each
    run, job, this_epoch, last = sorted(
        draw(st.tuples(*[st.integers(0, 10**13)] * 4)), reverse=True
    )
    return Timestamp(
        epoch=epoch,
        batch=batch,
        sample=sample,
        token=token,
        batch_in_epoch=max(0, batch - begun),
        sample_in_epoch=within,
        token_in_epoch=min(token, within * (each or 1)),
        run_nanoseconds=run,
        job_nanoseconds=job,
        epoch_nanoseconds=this_epoch,
        batch_nanoseconds=last,
    )
