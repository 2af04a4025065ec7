"""Timestamps that have no counts that only the run knows."""

from __future__ import annotations

import pytest

from stretto.timing import Horizon, Timer, Timestamp
from stretto.timing.epochs import KnownCounts, UnknownCountError, unknown_counters

WALL = {"run_nanoseconds", "job_nanoseconds", "epoch_nanoseconds", "batch_nanoseconds"}
TOKENS = {"token", "token_in_epoch"}
EPOCHS = {"epoch", "batch_in_epoch", "sample_in_epoch", "token_in_epoch"}


@pytest.mark.parametrize(
    ("facts", "unknown"),
    [
        ({}, WALL | TOKENS | EPOCHS),
        ({"dataset_num_samples": 9}, WALL | TOKENS),
        ({"dataset_num_samples": 9, "tokens_per_sample": 2}, WALL),
    ],
)
def test_what_only_the_run_knows(facts: dict[str, int], unknown: set[str]) -> None:
    assert unknown_counters(Horizon("9ba", **facts)) == unknown  # type: ignore[arg-type]


def test_a_hidden_count_cannot_be_read_by_name_or_by_a_timer() -> None:
    known = KnownCounts.of(Timestamp(sample=3, token=9), frozenset(TOKENS))
    assert (known.sample, Timer.at(known).sample) == (3, 3)
    for read in (lambda: known.token, lambda: Timer.at(known).get("tok")):
        with pytest.raises(UnknownCountError) as caught:
            read()
        assert (caught.value.name, caught.value.unit) == ("token", "tok")


def test_one_that_is_moved_on_hides_nothing() -> None:
    assert KnownCounts.of(Timestamp(token=9), frozenset(TOKENS))._replace(sample=1).token == 9
