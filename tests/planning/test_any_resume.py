"""The plan of a resumed run is what the run does: any data, any sizes, and any stop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import stretto
from stretto.batching import DoublingRamp, Hysteresis, LinearRamp, PolicyLike, SizeFunction
from stretto.data import DataSpec
from stretto.errors import BatchSizeError
from stretto.integrations.counts import steps_left
from stretto.timing import LastBatch, Timestamp

NUM_SAMPLES = 35
SAMPLES = TensorDataset(torch.arange(NUM_SAMPLES))
LENGTHS = {"known": [3 + at * 7 % 10 for at in range(NUM_SAMPLES)], "equal": [8] * NUM_SAMPLES}
SPECS = {
    "none": DataSpec(SAMPLES),
    "each": DataSpec(SAMPLES, tokens_per_sample=8),
    **{name: DataSpec(SAMPLES, lengths=lengths) for name, lengths in LENGTHS.items()},
}


def shrinking(timestamp: Timestamp, current: Any) -> int:
    """Outgrow an epoch at sample 20, and be small again in the next."""
    return 16 if timestamp.sample == 20 else 10 if timestamp.sample < 20 else 6


def by_batches(timestamp: Timestamp, current: Any) -> int:
    return 2 + timestamp.batch * 5 % 13


IN_SAMPLES = [
    *(2, 5, 7, 9, 20, "0sp:5 5sp:7", "0ba:4 5ba:16", "0ep:10 1ep:12 2ep:3"),
    *(LinearRamp(3, 18, "50%"), Hysteresis(LinearRamp(4, 32, "50%"), 1.5)),
    *(SizeFunction(shrinking), SizeFunction(by_batches)),
]
IN_TOKENS = [
    *("24tok", "60tok", "110tok", "0tok:30tok 200tok:90tok"),
    *(DoublingRamp("20tok", "80tok", "50%"), "0ba:70tok 4ba:25tok"),
    SizeFunction(lambda now, _: f"{10 * shrinking(now, 0)}tok", "100tok", in_tokens=True),
]
EVERY = {"a": "13sp", "b": "3ba", "c": "25%", "d": "10ba", "e": "1ep"}


def prepared(spec: DataSpec, sizes: PolicyLike, length: str, last: LastBatch) -> stretto.Run:
    return stretto.prepare(
        spec,
        sizes,
        max_duration=length,
        optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0),
        schedules={"lr": stretto.Cosine()},
        loading={"last_batch": last, "seed": 3},
        every=EVERY,
    )


class Ran:
    """What a run did."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self.ids: list[int] = []
        self.due: dict[str, list[int]] = {name: [] for name in EVERY}

    def go(self, run: stretto.Run, count: int = 1000) -> None:
        """Run up to `count` more steps."""
        for _ in range(count):
            step = run.begin()
            if step is None:
                return
            rate = run.optimizers[0].param_groups[0]["lr"]
            self.steps.append((*step.timestamp[:3], step.num_samples, str(step.batch_size), rate))
            self.ids += [int(one) for micro in step for one in micro.batch[0]]
            run.optimizers[0].step()
            for name in run.finish(seconds=0.0):
                self.due[name].append(run.timer.batch)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    data = draw(st.sampled_from([*SPECS]))
    sizes = st.sampled_from(IN_SAMPLES if data == "none" else IN_SAMPLES + IN_TOKENS)
    length = draw(st.sampled_from(["2ep", "3.3ep", "17ba", "8sp", "118sp"]))
    last = draw(st.sampled_from(["drop", "drop", "keep", "carry"]))
    return data, length, last, draw(sizes), draw(sizes), draw(st.integers(0, 14))


@pytest.mark.filterwarnings("ignore::stretto.errors.PlanWarning")
@given(cases())
@example(("known", "4ep", "drop", IN_TOKENS[-1], IN_TOKENS[-1], 4))
@example(("known", "4ep", "drop", 5, 7, 3))
@example(("equal", "4ep", "drop", "60tok", "110tok", 3))
@example(("none", "8sp", "drop", "0sp:5 5sp:7", "0sp:5 5sp:7", 1))
@example(("none", "2ep", "carry", "0ba:4 5ba:16", IN_SAMPLES[-3], 3))
@settings(max_examples=60)
def test_the_plan_of_a_resumed_run_is_what_it_does(case: tuple[Any, ...]) -> None:
    data, length, last, before, after, stop = case
    ran = Ran()
    try:
        first = prepared(SPECS[data], before, length, last)
        ran.go(first, stop)
        again = prepared(SPECS[data], after, length, last)
    except BatchSizeError:  # larger than an epoch
        assume(False)
    again.load_state_dict(first.state_dict())
    try:
        ran.go(again)
    except BatchSizeError:
        assume(False)
    planned, order = again.plan, SPECS[data].order(stretto.Loading(seed=3))
    assert planned is not None
    batches = [*planned.batches()]
    assert [
        (*one.timestamp[:3], one.size, str(one.decided), pytest.approx(one.values["lr"]))
        for one in batches
    ] == ran.steps
    assert planned.num_batches == len(ran.steps)
    assert planned.end is not None
    assert planned.end[:7] == again.timer.timestamp[:7]
    assert ran.ids == [
        order[place]
        for one in batches
        for place in range(one.timestamp.sample, one.timestamp.sample + one.size)
    ]
    assert {event.name: event.count for event in planned.events} == {
        name: len(at) for name, at in ran.due.items()
    }
    for event in planned.events:
        assert [one.batch for one in event.first] == ran.due[event.name][:5]
    assert steps_left(again, Timestamp()).exact == len(batches)
    for number, one in enumerate(batches):
        now = one.timestamp
        assert planned.timestamp_at_batch(number)[:7] == now[:7]
        assert (planned.sample_at_batch(number), planned.batch_at_sample(now.sample)) == (
            now.sample,
            number,
        )
        assert planned.at(f"{now.sample}sp")[:3] == one[:3]
        assert (
            planned.stage_of(number).batch(number - planned.stage_of(number).first.batch)[:5]
            == one[:5]
        )
