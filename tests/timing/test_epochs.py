"""Where epochs and runs end inside a batch; `tests/planning/test_clock.py` walks whole runs."""

from __future__ import annotations

from stretto.timing import Horizon, Timer, tick


def test_tokens_of_a_carried_batch_are_shared_between_its_epochs() -> None:
    horizon = Horizon("4ep", dataset_num_samples=10, last_batch="carry")
    timer = Timer(horizon, clock=lambda: 0)
    tick(timer, horizon, 5, tokens=7)
    tick(timer, horizon, 8, tokens=81)
    assert (timer.token, timer.token_in_epoch, timer.sample_in_epoch) == (88, 30, 3)
