"""Token budgets: every micro-batch of at most so many tokens fits, and no much larger one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from stretto.batching import Tokens
from stretto.data import DataSpec, StepLoader
from stretto.errors import FitError
from stretto.memory import UnequalSamples, find_batch_size
from stretto.memory.examples import unequal_samples
from stretto.runtime import SupervisedStep

LENGTHS = [7, 300, 512, 90, 20, 410]


class Attention(nn.Module):
    """Needs bytes for each token and each pair of tokens of a row; runs out of memory above."""

    def __init__(self, capacity: float, each_row: float = 0.0, each_pair: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 4), nn.Linear(4, 16)
        self.capacity, self.each_row, self.each_pair = capacity, each_row, each_pair
        self.shapes: list[tuple[int, int]] = []

    def need(self, rows: int, length: int) -> float:
        return rows * (length + self.each_row + self.each_pair * length * length)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        self.shapes.append((len(ids), ids.size(1)))
        if self.need(len(ids), ids.size(1)) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        logits = self.head(self.embedding(ids[:1, :2]))
        return functional.cross_entropy(logits.flatten(0, 1), ids[:1, :2].flatten())


def step_of(model: nn.Module) -> SupervisedStep:
    return SupervisedStep(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x))


def rows_of(rows: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(rows, length, dtype=torch.long)}


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    return {"input_ids": nn.utils.rnn.pad_sequence(samples, batch_first=True)}


def data() -> DataSpec:
    samples = [torch.zeros(length, dtype=torch.long) for length in LENGTHS]
    return DataSpec(samples, lengths=LENGTHS)


@given(
    budget=st.integers(1, 10**5),
    weights=st.tuples(*[st.sampled_from([0.0, 0.01, 1.0, 40.0])] * 3),
    lengths=st.sets(st.integers(1, 600), min_size=1, max_size=40),
)
def test_no_micro_batch_of_a_budget_needs_much_more_than_those_that_are_tried(
    budget: int, weights: tuple[float, ...], lengths: set[int]
) -> None:
    def need(rows: int, length: int) -> float:
        return rows * sum(weight * length**power for power, weight in enumerate(weights))

    budget = max(budget, *lengths)
    samples = UnequalSamples(lambda rows, length: (rows, length), [*lengths])
    tried = samples.batches(budget)
    assert all(rows * length <= budget for rows, length in tried)
    assert max(length for _, length in tried) == max(lengths)
    most = max(need(budget // length, length) for length in lengths)
    is_pure = sum(weight > 0 for weight in weights) < 2
    assert max(need(*shape) for shape in tried) >= most * (1.0 if is_pure else 0.9)


@pytest.mark.parametrize(("each_row", "each_pair"), [(0.0, 0.0), (40.0, 0.0), (0.0, 0.01)])
def test_any_micro_batch_of_the_budget_fits_and_some_of_a_larger_one_does_not(
    each_row: float, each_pair: float
) -> None:
    model, lengths = Attention(60_000, each_row, each_pair), [9, 200, 300, 333, 512]
    answer = find_batch_size(step_of(model), UnequalSamples(rows_of, lengths))
    assert isinstance(answer.size, Tokens)
    assert max(model.need(answer.size // one, one) for one in lengths) <= 60_000
    assert isinstance(answer.too_large, Tokens)
    assert max(model.need(answer.too_large // one, one) for one in lengths) > 60_000
    assert answer.too_large - answer.size <= max(16, 0.02 * answer.size)


def test_the_shapes_of_a_data_set_are_those_of_its_samples() -> None:
    loader = StepLoader(data(), 1, max_duration="1ep", loading={"collate_fn": padded})
    samples = unequal_samples(loader)
    assert samples.lengths == [7, 300, 410, 512]  # the rest are less than half of the longest
    shapes = [tuple(one["input_ids"].shape) for one in samples.batches(1000)]
    assert shapes == [(1, 512), (142, 7), (2, 410)]


def test_packed_samples_fill_one_row() -> None:
    def joined(samples: list[Tensor]) -> dict[str, Tensor]:
        return {"input_ids": torch.cat(samples)[None]}

    loader = StepLoader(data(), 1, max_duration="1ep", loading={"collate_fn": joined})
    samples = unequal_samples(loader, packed=True)
    shapes = [tuple(one["input_ids"].shape) for one in samples.batches(1000)]
    assert shapes == [(1, 512), (1, 994), (1, 820)]


def test_an_answer_prints_in_tokens() -> None:
    answer = find_batch_size(
        step_of(Attention(4100)), UnequalSamples(rows_of, [16, 512]), multiple_of=512
    )
    assert answer.size == 4096
    assert str(answer).startswith("largest micro-batch that fits: 4096tok (tried)")
    assert "4608tok would not fit" in str(answer)
    assert "4096tok, the largest that fits" in answer.summary()


@pytest.mark.parametrize(
    ("lengths", "how", "word"),
    [
        ([], {}, "lengths"),
        ([0, 5], {}, "at least 1"),
        ([2.5], {}, "whole"),
        ([8, 512], {"maximum": 256}, "longest sample has 512"),
    ],
)
def test_questions_that_are_refused(lengths: Any, how: dict[str, Any], word: str) -> None:
    with pytest.raises(FitError, match=word):
        find_batch_size(step_of(Attention(4096)), UnequalSamples(rows_of, lengths), **how)


def test_a_budget_of_one_sample_that_does_not_fit() -> None:
    with pytest.raises(FitError, match="512tok"):
        find_batch_size(step_of(Attention(300)), UnequalSamples(rows_of, [8, 512]))
