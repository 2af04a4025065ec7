"""Where epochs and runs end inside a batch; `tests/planning/test_clock.py` walks whole runs."""

from __future__ import annotations

from typing import get_args

import pytest

from stretto.timing import Horizon, LastBatch, Timer, Timestamp, tick
from stretto.timing.epochs import cut, repeats_before, rollover

MODES: tuple[LastBatch, ...] = get_args(LastBatch)


def test_tokens_of_a_carried_batch_are_shared_between_its_epochs() -> None:
    horizon = Horizon("4ep", dataset_num_samples=10, last_batch="carry")
    timer = Timer(horizon, clock=lambda: 0)
    tick(timer, horizon, 5, tokens=7)
    tick(timer, horizon, 8, tokens=81)
    assert (timer.token, timer.token_in_epoch, timer.sample_in_epoch) == (88, 30, 3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize("run", ["2ep", "33sp", "9ba"])
def test_a_batch_repeats_until_it_would_be_cut_or_end_an_epoch(
    mode: LastBatch, size: int, run: str
) -> None:
    horizon = Horizon(run, dataset_num_samples=20, last_batch=mode)
    first = Timestamp(epoch=1, sample=23, sample_in_epoch=3)
    limit = repeats_before(horizon, first, size)
    assert limit is not None
    for passed in range(20 - first.sample_in_epoch - size + 1):
        at = first._replace(sample=23 + passed, sample_in_epoch=3 + passed)
        is_whole = cut(horizon, at, size) == size
        ends = rollover(horizon, at.sample_in_epoch + size, size).epochs
        assert (at.sample < limit) == (is_whole and not ends)


def test_without_an_end_a_batch_repeats_for_ever() -> None:
    assert repeats_before(Horizon("9ba"), Timestamp(), 8) is None
