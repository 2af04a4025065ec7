"""Where batches of one size begin, against a run counted sample by sample."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.timing.by_hand import count_by_hand
from tests.timing.strategies import horizons

from stretto.errors import BatchSizeError
from stretto.timing import BatchSizes, Horizon, LastBatch, Time, Timestamp
from stretto.timing.batches import EqualBatches


def constant_batches(
    size: int,
    num_samples: int | None = None,
    last_batch: LastBatch = "keep",
    end_sample: int | None = None,
) -> EqualBatches:
    """Return the batches of a run of samples, or of one that has no end among the samples."""
    horizon = Horizon(
        "1s" if end_sample is None else Time(end_sample, "sp"),
        dataset_num_samples=num_samples,
        batch_sizes=size,
        last_batch=last_batch,
    )
    assert isinstance(horizon.batch_sizes, int)
    return EqualBatches(horizon, Timestamp(), horizon.batch_sizes)


MODES: st.SearchStrategy[LastBatch] = st.sampled_from(get_args(LastBatch))


@given(horizons(has_batch_size=True), st.data())
def test_the_start_of_each_batch_is_that_of_the_run(horizon: Horizon, data: st.DataObject) -> None:
    assert isinstance(horizon.batch_sizes, int)
    sizes = EqualBatches(horizon, Timestamp(), horizon.batch_sizes)
    counted = count_by_hand(horizon, sizes.size, batches=60)
    for batch, now in enumerate(counted):
        assert sizes.sample_at_batch(batch) == now.sample
        assert sizes.batch_at_sample(now.sample) == batch
    sample = data.draw(st.integers(0, counted[-1].sample))
    first = next(batch for batch, now in enumerate(counted) if now.sample >= sample)
    assert sizes.batch_at_sample(sample) == first


@st.composite
def constant_sizes(draw: st.DrawFn) -> EqualBatches:
    num_samples = draw(st.none() | st.integers(1, 50))
    mode = draw(MODES)
    size = draw(st.integers(1, num_samples if mode == "drop" and num_samples else 70))
    end = None if mode == "drop" else draw(st.none() | st.integers(1, 300))
    return constant_batches(size, num_samples, mode, end)


@given(constant_sizes(), st.integers(0, 400))
def test_there_and_back(sizes: EqualBatches, number: int) -> None:
    assert sizes.batch_at_sample(sizes.sample_at_batch(number)) == number
    batch = sizes.batch_at_sample(number)
    assert sizes.sample_at_batch(batch) >= number
    assert batch == 0 or sizes.sample_at_batch(batch - 1) < number


@given(constant_sizes())
def test_batches_follow_each_other(sizes: EqualBatches) -> None:
    starts = [sizes.sample_at_batch(batch) for batch in range(80)]
    assert starts[0] == 0
    assert all(before < after for before, after in pairwise(starts))
    is_cut_or_drops = sizes.horizon.end_sample is not None or sizes.horizon.last_batch == "drop"
    steps = {after - before for before, after in pairwise(starts)}
    assert is_cut_or_drops or max(steps) <= sizes.size


@given(constant_sizes(), st.integers(10**18, 10**30))
def test_exact_beyond_floats(sizes: EqualBatches, batch: int) -> None:
    assert sizes.batch_at_sample(sizes.sample_at_batch(batch)) == batch


def test_the_last_batch_of_a_run_is_cut_at_its_end() -> None:
    sizes = constant_batches(32, end_sample=50)
    assert [sizes.sample_at_batch(batch) for batch in range(4)] == [0, 32, 50, 96]
    assert [sizes.batch_at_sample(sample) for sample in (32, 33, 50, 51, 96, 97)] == [
        1, 2, 2, 3, 3, 4,
    ]  # fmt: skip


def test_a_run_that_ends_between_two_batches_cuts_none() -> None:
    assert constant_batches(32, end_sample=64).sample_at_batch(3) == 96


def test_drop_needs_epochs_that_hold_a_batch() -> None:
    assert constant_batches(100, 100, "drop").sample_at_batch(2) == 200
    with pytest.raises(BatchSizeError, match="samples"):
        constant_batches(101, 100, "drop")
    assert constant_batches(101, 100, "keep").sample_at_batch(2) == 200


def test_a_constant_size_is_one_of_batch_sizes() -> None:
    assert isinstance(constant_batches(32), BatchSizes)
    assert not isinstance(32, BatchSizes)
