"""Batches in tokens over samples of known lengths, against a plain walk over the order."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from stretto import plan, prepare
from stretto.batching import (
    NO_SIGNALS,
    DoublingRamp,
    Fixed,
    NoiseScale,
    PiecewiseConstant,
    Signals,
    as_policy,
)
from stretto.batching.policy import Tokens
from stretto.data import DataSpec, StepLoader
from stretto.data import lengths as lengths_module
from stretto.errors import PlanError
from stretto.planning import next_step
from stretto.planning.sizes import bind_sizes
from stretto.schedules import Cosine
from stretto.timing import LastBatch, Timestamp, TimeUnit
from stretto.training import Loading

POLICIES = [
    as_policy("17tok"),
    PiecewiseConstant("0tok:9tok 60tok:30tok 1ep:14tok"),
    PiecewiseConstant("0ba:12tok 4ba:40tok 1.5ep:9tok"),
    PiecewiseConstant("0sp:25tok 50%:50tok"),
    PiecewiseConstant("0tok:3 70tok:5"),
    DoublingRamp("8tok", "32tok", "50%"),
    Fixed(4),
]
RUNS = ["1ep", "2.5ep", "30sp", "11ba", "150tok"]


class Case(NamedTuple):
    spec: DataSpec
    loading: Loading
    policy: Any
    run: str

    def loader(self, world_size: int = 1, rank: int = 0) -> StepLoader:
        return StepLoader(
            self.spec,
            self.policy,
            max_duration=self.run,
            loading=self.loading,
            rank=rank,
            world_size=world_size,
            idle_ranks=True,
            clock=int,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(3, 12), min_size=24, max_size=30))
    last_batch: LastBatch = draw(st.sampled_from(["keep", "drop", "carry"]))
    loading = Loading(seed=draw(st.integers(0, 9)), last_batch=last_batch)
    spec = DataSpec(TensorDataset(torch.arange(len(lengths))), lengths=lengths)
    return Case(spec, loading, draw(st.sampled_from(POLICIES)), draw(st.sampled_from(RUNS)))


class Row(NamedTuple):
    """A batch of the model: where the clock is before it, its samples, and the decided size."""

    sample: int
    token: int
    epoch: int
    in_epoch: tuple[int, int, int]
    size: int


class Model:
    """A run as a walk over its order, one sample after the other."""

    def __init__(self, case: Case) -> None:
        horizon = case.spec.horizon(case.run, loading=case.loading)
        self.bound = case.loader().prepared.bound_policy
        self.mode, self.order = case.loading.last_batch, case.spec.order(case.loading)
        self.lengths, self.num_samples = case.spec.lengths.tolist(), len(case.spec.dataset)
        self.amount, self.unit = int(horizon.max_duration.amount), horizon.max_duration.unit
        self.end = horizon.end_sample
        self.at = self.batch = self.batch_in_epoch = 0
        self.rows: list[Row] = []
        self.tokens = [0]

    def token(self, position: int) -> int:
        while len(self.tokens) <= position:
            self.tokens.append(self.tokens[-1] + self.lengths[self.order[len(self.tokens) - 1]])
        return self.tokens[position]

    def size(self, decided: int) -> int:
        """The samples of a decided size, whatever ends inside."""
        if type(decided) is int:
            return decided
        count = 1
        while self.token(self.at + count + 1) - self.token(self.at) <= decided:
            count += 1
        return count

    def row(self, size: int) -> Row:
        epoch, within = divmod(self.at, self.num_samples)
        token = self.token(self.at)
        in_epoch = (self.batch_in_epoch, within, token - self.token(self.at - within))
        return Row(self.at, token, epoch, in_epoch, size)

    def is_over(self) -> bool:
        if self.end is not None:
            return self.at >= self.end
        done = self.batch if self.unit == "ba" else self.token(self.at)
        return done >= self.amount

    @property
    def rest(self) -> int:
        """The samples up to the end of the epoch."""
        return self.num_samples - self.at % self.num_samples

    def decide(self, state: Any) -> tuple[int, int, Any]:
        row = self.row(0)
        now = Timestamp(row.epoch, self.batch, row.sample, row.token, *row.in_epoch)
        decided, after = self.bound.decide(now, state, NO_SIGNALS)
        decided = Tokens(decided) if self.bound.unit is TimeUnit.TOKEN else decided
        return self.size(decided), decided, after

    def skip(self) -> None:
        self.at, self.batch_in_epoch = self.at + self.rest, 0

    def cut(self, size: int) -> int:
        if self.mode == "keep":
            size = min(size, self.rest)
        if self.mode == "drop" or self.end is None:
            return size
        return min(size, self.end - self.at)

    def walk(self) -> tuple[list[Row], Row]:
        """Return the batches of the run, and the clock at its end."""
        state = self.bound.start
        while not self.is_over():
            size, decided, after = self.decide(state)
            if self.mode == "drop" and size > self.rest:
                self.skip()
                continue
            size, state = self.cut(size), after
            self.rows.append(self.row(size))
            epoch = self.at // self.num_samples
            self.at, self.batch = self.at + size, self.batch + 1
            self.batch_in_epoch += 1
            if (
                self.mode == "drop"
                and self.at % self.num_samples
                and self.size(decided) > self.rest
            ):
                self.skip()
            if self.at // self.num_samples > epoch:
                self.batch_in_epoch = 0
        return self.rows, self.row(0)


def as_row(now: Timestamp, size: int) -> Row:
    within = (now.batch_in_epoch, now.sample_in_epoch, now.token_in_epoch)
    return Row(now.sample, now.token, now.epoch, within, size)


@given(case=cases())
@settings(max_examples=40)
def test_plan_and_run_are_those_of_a_walk(case: Case) -> None:
    expected, end = Model(case).walk()
    loader = case.loader()
    ran = [as_row(step.timestamp, step.num_samples) for step in loader]
    assert ran == expected
    assert as_row(loader.timer.timestamp, 0) == end
    planned = plan(case.spec.horizon(case.run, loading=case.loading), case.policy)
    assert [as_row(one.timestamp, one.size) for one in planned.batches()] == expected
    assert planned.end is not None
    assert as_row(planned.end, 0) == end
    assert (planned.num_batches, len(loader)) == (len(expected), len(expected))
    assert planned.num_samples == sum(row.size for row in expected)


@given(case=cases(), data=st.data())
@settings(max_examples=40)
def test_places_of_a_plan_are_found_in_any_order(case: Case, data: st.DataObject) -> None:
    expected, end = Model(case).walk()
    sizes = case.loader().prepared.planned_sizes()
    starts = [row.sample for row in expected] + [end.sample]
    for _ in range(4):
        batch = data.draw(st.integers(0, len(expected)))
        sample = data.draw(st.integers(0, end.sample))
        assert sizes.sample_at_batch(batch) == starts[batch]
        assert sizes.batch_at_sample(sample) == sum(start < sample for start in starts[:-1])
        if batch < len(expected):
            now = sizes.timestamp_at_batch(batch)
            assert as_row(now, expected[batch].size) == expected[batch]
    assert sum(stage.batches or 0 for stage in sizes.stages) == len(expected)


@given(case=cases(), data=st.data())
@settings(max_examples=25)
def test_a_resume_anywhere_goes_on_as_if_nothing_had_been(case: Case, data: st.DataObject) -> None:
    whole = case.loader()
    steps, states = [], [whole.state_dict()]
    for step in whole:
        steps.append((step.timestamp, [batch[0].tolist() for batch, *_ in micros(step)]))
        whole.finish(step)
        states.append(whole.state_dict())
    at = data.draw(st.integers(0, len(steps) - 1))
    world_size = data.draw(st.integers(1, 3))
    again = [case.loader(world_size, rank) for rank in range(world_size)]
    for one in again:
        one.load_state_dict(states[at])
    for number in range(at, len(steps)):
        shares = [next(one) for one in again]
        own = [
            sample for step in shares for batch, *_ in micros(step) for sample in batch[0].tolist()
        ]
        assert {step.timestamp for step in shares} == {steps[number][0]}
        assert sorted(own) == sorted(sample for some in steps[number][1] for sample in some)
        assert sum(step.num_tokens for step in shares) == sum(
            int(case.spec.lengths[sample]) for sample in own
        )
        for one, step in zip(again, shares, strict=True):
            one.finish(step, tokens=0, seconds=0.0)
    assert all(next(one, None) is None for one in again)
    assert {one.timer.timestamp for one in again} == {whole.timer.timestamp}
    sizes = again[0].prepared.planned_sizes()
    assert [sizes.sample_at_batch(number) for number in range(len(steps))] == [
        now.sample for now, _ in steps
    ]
    assert sizes.end is not None
    assert sizes.end[:7] == whole.timer.timestamp[:7]
    assert sum(stage.batches or 0 for stage in sizes.stages) == len(steps)


def micros(step: Any) -> list[Any]:
    return [(micro.batch,) for micro in step if micro.num_samples]


@given(case=cases())
@settings(max_examples=20)
def test_each_sample_comes_once_in_an_epoch(case: Case) -> None:
    if case.loading.last_batch == "drop":
        return
    seen = [
        sample
        for step in case._replace(run="2ep").loader()
        for batch, *_ in micros(step)
        for sample in batch[0].tolist()
    ]
    num_samples = len(case.spec.dataset)
    for epoch in (seen[:num_samples], seen[num_samples:]):
        assert sorted(epoch) == list(range(num_samples))


@pytest.mark.parametrize("run", ["2ep", "30sp", "150tok", "11ba"])
@pytest.mark.parametrize("far", ["10Ttok", "10Tsp", "1_000_000_000ep"])
def test_a_time_long_after_the_run_is_not_searched_for(run: str, far: str) -> None:
    spec = DataSpec([0] * 20, lengths=[1 + one % 7 for one in range(20)])
    horizon = spec.horizon(run)
    plain = plan(horizon, "17tok")
    planned = plan(horizon, f"0tok:17tok {far}:30tok", triggers={"x": far})
    assert (planned.num_batches, planned.num_samples) == (plain.num_batches, plain.num_samples)
    assert not planned.events[0].first
    with pytest.raises(PlanError, match="begun its last batch"):
        planned.at(far)
    assert len(StepLoader(spec, f"0tok:17tok {far}:30tok", max_duration=run)) == plain.num_batches


def test_a_step_is_decided_without_a_walk() -> None:
    case = Case(DataSpec(range(9), lengths=[5] * 9), Loading(), as_policy("17tok"), "2ep")
    horizon = case.spec.horizon("2ep")
    _, step = next_step(horizon, bind_sizes(horizon, case.policy), Timestamp(sample=3), {})
    assert step is not None
    assert (step.size, step.decided, repr(step.decided)) == (3, 17, "'17tok'")


def collate(samples: list[Any]) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def texts(lengths: list[int]) -> DataSpec:
    return DataSpec([torch.ones(one, dtype=torch.long) for one in lengths], lengths=lengths)


LENGTHS = [7, 3, 12, 5, 9, 4, 4, 11, 6, 8, 3, 10]


def test_a_policy_that_follows_the_noise_decides_in_tokens() -> None:
    loading = Loading(collate_fn=collate)
    policy = NoiseScale("8tok", "40tok")
    loader = StepLoader(texts(LENGTHS), policy, max_duration="3ep", loading=loading)
    sizes = []
    for step in loader:
        sizes.append((step.num_tokens, step.batch_size))
        measured = Signals(noise_numerator=100.0 * len(sizes), noise_denominator=1.0)
        loader.finish(step, signals=measured)
    assert all(tokens <= max(size, 12) for tokens, size in sizes)
    assert {repr(size) for _, size in sizes} >= {"'8tok'", "'40tok'"}
    assert loader.timer.token == 3 * sum(LENGTHS)


def test_a_resume_may_change_the_unit() -> None:
    spec, loading = texts(LENGTHS), Loading(collate_fn=collate, seed=2)

    def loader(size: Any) -> StepLoader:
        return StepLoader(spec, size, max_duration="2ep", loading=loading)

    first, second, third = loader(2), loader("20tok"), loader(3)
    for one, after in ((first, second), (second, third)):
        for _ in range(3):
            one.finish(next(one))
        after.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert third.state_dict()["past"] == [[0, 2, 0], [3, "20tok", 6]]
    sizes = third.prepared.planned_sizes()
    assert [(repr(stage.size), stage.batches) for stage in sizes.stages[:2]] == [
        ("2", 3),
        ("'20tok'", 3),
    ]
    assert sizes.timestamp_at_batch(6)[:7] == third.timer.timestamp[:7]
    assert len([*third]) == len(third) - 6


@pytest.mark.parametrize("wrong", [1, -1])
def test_lengths_that_are_not_those_of_the_batches_are_told(wrong: int) -> None:
    lengths = [one + wrong for one in LENGTHS]
    spec = DataSpec(texts(LENGTHS).data, lengths=lengths)
    loader = StepLoader(spec, "30tok", max_duration="1ep", loading=Loading(collate_fn=collate))
    with pytest.warns(UserWarning, match="the clock and sizes in tokens follow the lengths"):
        next(loader)
    assert len([*loader]) == len(loader) - 1  # told once


def test_padding_without_a_mask_is_no_mistake() -> None:
    def padded(samples: list[Any]) -> dict[str, Any]:
        return {"input_ids": collate(samples)["input_ids"]}

    loading = Loading(collate_fn=padded)
    loader = StepLoader(texts(LENGTHS), "30tok", max_duration="1ep", loading=loading)
    assert sum(step.num_tokens for step in loader) == sum(LENGTHS)


def test_a_start_and_a_resume_read_only_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    num_samples, read = 800_000, []
    kept = lengths_module.OrderedLengths._read

    def counted(self: Any, begin: int, end: int) -> Any:
        read.append(begin)
        return kept(self, begin, end)

    lengths = torch.full((num_samples,), 3, dtype=torch.uint8)
    spec, schedule = DataSpec(range(num_samples), lengths=lengths), Cosine(1, 0.1, warmup="9ba")
    whole = plan(spec.horizon("3ep"), "3000tok", schedules={"lr": schedule})
    assert whole.num_batches == 2400
    monkeypatch.setattr(lengths_module.OrderedLengths, "_read", counted)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = prepare(spec, "3000tok", max_duration="3ep", schedules={"lr": schedule})
    run.bind(optimizer, rank=0, world_size=2)
    state = run.loader.state_dict()
    clock = whole.timestamp_at_batch(1000).to_state()
    state |= {"clock": state["clock"] | clock, "past": [[0, "3000tok"]]}
    assert run.begin() is not None
    assert len(read) <= 2
    run.loader.load_state_dict(state)
    step = next(run.loader)
    assert (step.timestamp.batch, len(read) <= 4) == (1000, True)
    assert run.loader.prepared.planned_sizes().sample_at_batch(5) == 5000
    assert len(read) <= 5
    assert len(run.loader) == 2400


@pytest.mark.parametrize(("size", "warns"), [("50tok", True), ("60tok", False)])
def test_a_size_below_the_longest_sample_is_warned_of(*, size: str, warns: bool) -> None:
    spec = DataSpec([*range(10)], lengths=[40] * 9 + [60])
    planned = plan(spec.horizon("1ep"), size)
    assert any("cannot hold the longest sample" in line for line in planned.warnings) == warns
