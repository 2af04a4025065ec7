"""Counts in closed form, against a walk over all steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import BatchSizePolicy, Bound, Signals
from stretto.errors import StrettoError
from stretto.integrations.counts import (
    micro_batches_in_epoch,
    smallest_step,
    steps_in_epoch,
    steps_left,
)
from stretto.settings import Loading
from stretto.timing import Timestamp
from stretto.training import Run, prepare


class LossDecides(BatchSizePolicy):
    def bind(self, horizon: Any) -> Bound:
        return Bound(decide=self.decide, bounds=(3, 17), reads=frozenset({"loss"}))

    def decide(self, timestamp: Any, state: Any, signals: Signals) -> tuple[int, Any]:
        return (3 if signals.loss is None else int(signals.loss)), state


def make(**settings: Any) -> Run:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    places = {name: settings.pop(name) for name in ("rank", "world_size")}
    data, batch_size = range(settings.pop("num_samples")), settings.pop("batch_size")
    loading = Loading(shuffle=False, last_batch=settings.pop("last_batch"))
    return prepare(data, batch_size, loading=loading, **settings).bind(optimizer, **places)


RUNS = st.fixed_dictionaries(
    {
        "num_samples": st.integers(5, 60),
        "max_duration": st.sampled_from(["1ep", "3ep", "2.5ep", "70sp", "11ba"]),
        "last_batch": st.sampled_from(["keep", "drop", "carry"]),
        "micro_batch_size": st.sampled_from([None, 1, 3]),
        "rank": st.just(0),
        "world_size": st.integers(1, 3),
    }
)


@pytest.mark.filterwarnings("ignore::stretto.errors.PlanWarning")
@given(
    RUNS,
    st.lists(st.tuples(st.integers(1, 90), st.integers(3, 20)), max_size=3),
    st.integers(3, 20),
)
def test_planned_steps_are_counted_exactly(
    settings: dict[str, Any], changes: list[tuple[int, int]], first: int
) -> None:
    sizes = {"0sp": first} | {f"{at}sp": size for at, size in changes}
    try:
        run = make(**settings, batch_size=sizes)
    except StrettoError:  # a batch larger than an epoch
        return
    steps: Counter[int] = Counter()
    micro_batches: Counter[int] = Counter()
    left = []
    while not run.is_done:
        for step in run.steps():
            left.append(steps_left(run).exact)
            steps[step.timestamp.epoch] += 1
            micro_batches[step.timestamp.epoch] += len(step)
            run.finish()
    assert steps_left(run, Timestamp()).exact == steps.total()
    assert left == list(range(steps.total(), 0, -1))
    for epoch in range(max(steps) + 2):
        assert steps_in_epoch(run, epoch).exact == steps[epoch]
        assert micro_batches_in_epoch(run, epoch) == micro_batches[epoch]


@given(RUNS, st.lists(st.integers(3, 17), min_size=1, max_size=10))
def test_decided_steps_are_at_most_those_of_the_smallest_size(
    settings: dict[str, Any], losses: list[int]
) -> None:
    settings |= {"num_samples": max(settings["num_samples"], 20)}
    run = make(**settings, batch_size=LossDecides())
    steps: Counter[int] = Counter()
    bounds = []
    while not run.is_done:
        for step in run.steps():
            bounds.append(steps_left(run))
            steps[step.timestamp.epoch] += 1
            run.finish(Signals(loss=losses[steps.total() % len(losses)]))
    for before, left in enumerate(bounds):
        assert left.most is not None
        assert left.most >= steps.total() - before
        assert left.exact in (None, steps.total() - before)
    for epoch in range(max(steps) + 1):
        count = steps_in_epoch(run, epoch)
        assert count.most is not None
        assert steps[epoch] <= count.most
        assert count.exact in (None, steps[epoch])
        assert micro_batches_in_epoch(run, epoch) is None


def test_a_run_that_the_clock_ends_has_no_count() -> None:
    run = make(
        num_samples=20, max_duration="1h", batch_size=4, last_batch=None, micro_batch_size=None,
        rank=0, world_size=1,
    )  # fmt: skip
    assert steps_left(run, Timestamp()) == (None, False)
    assert steps_in_epoch(run, 2).most == 5


@pytest.mark.parametrize("epoch", [0, 10**12])
def test_counting_takes_no_walk(epoch: int) -> None:
    run = make(
        num_samples=10**9, max_duration="1e13ep", batch_size="0ep:512 1ep:4096", last_batch="keep",
        micro_batch_size=256, rank=0, world_size=1,
    )  # fmt: skip
    size = 4096 if epoch else 512
    assert steps_in_epoch(run, epoch).exact == -(-(10**9) // size)


@pytest.mark.parametrize(
    ("policy", "least"), [("0ep:8 1ep:16", 8), ("0ep:16 1ep:24", 16), (48, 16)]
)
def test_the_smallest_step_is_that_of_a_stage_or_of_a_cut(policy: Any, least: int) -> None:
    assert smallest_step(prepare(range(64), policy, max_duration="2ep")) == least
