"""The strategies give what they say, and the run counted by hand is right where it can be seen."""

from __future__ import annotations

import pytest
from tests.timing.by_hand import count_by_hand

from stretto.timing import Horizon, LastBatch


@pytest.mark.parametrize(
    ("last_batch", "clock"),
    [
        ("keep", "0.0.0 1.0.4 2.0.8 3.1.10 4.1.14 5.1.18 6.2.20 7.2.24 8.2.25"),
        ("drop", "0.0.0 1.0.4 2.1.10 3.1.14 4.2.20 5.2.24 6.3.30"),
        ("carry", "0.0.0 1.0.4 2.0.8 3.1.12 4.1.16 5.2.20 6.2.24 7.2.25"),
    ],
)
def test_a_run_of_two_and_a_half_epochs_by_hand(last_batch: LastBatch, clock: str) -> None:
    """Batch, epoch and sample after each batch of 4, with 10 samples in an epoch."""
    horizon = Horizon("2.5ep", dataset_num_samples=10, tokens_per_sample=7, last_batch=last_batch)
    counted = count_by_hand(horizon, 4)
    assert " ".join(f"{now.batch}.{now.epoch}.{now.sample}" for now in counted) == clock
    assert all(now.token == 7 * now.sample for now in counted)
    assert all(now.sample == 10 * now.epoch + now.sample_in_epoch for now in counted)


@pytest.mark.parametrize(("run", "batches"), [("5ba", 5), ("5s", 5), ("50tok", 2), ("1ep", 9)])
def test_runs_of_other_lengths_by_hand(run: str, batches: int) -> None:
    counted = count_by_hand(Horizon(run, tokens_per_sample=7), 4, batches=9)
    assert counted[-1].batch == batches
