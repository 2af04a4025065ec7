"""Sizes of packed batches are found in samples, as the data specification counts them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto import Trainer
from stretto.batching import IncreaseFunction
from stretto.data import DataSpec, StepLoader
from stretto.memory import find_batch_size
from stretto.memory.examples import example_batches, resizable
from stretto.runtime import SupervisedStep
from stretto.training import Loading

LENGTHS = [20, 50, 64, 30]
MOST = 300 * max(LENGTHS)
"""Tokens for which there is memory: of 300 of the longest samples."""


def pack(samples: list[Tensor]) -> dict[str, Tensor]:
    """Return all samples in one row, and where each begins."""
    lengths = torch.tensor([0, *(len(sample) for sample in samples)])
    longest = int(lengths.max())  # values are read
    return {
        "input_ids": torch.cat(samples)[None],
        "starts": lengths.cumsum(0),
        "positions": torch.cat([torch.arange(len(one)) % longest for one in samples])[None],
    }


def num_packed(batch: dict[str, Tensor]) -> int:
    return len(batch["starts"]) - 1


def data() -> DataSpec:
    samples = [torch.zeros(LENGTHS[i % len(LENGTHS)], dtype=torch.long) for i in range(4000)]
    return DataSpec(samples, get_num_samples_in_batch=num_packed)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if batch["input_ids"].numel() > MOST:
            raise torch.OutOfMemoryError("CUDA out of memory")
        logits = self.head(self.embedding(batch["input_ids"]))
        return functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())


def training_step() -> SupervisedStep:
    torch.manual_seed(0)
    model = Packed()
    return SupervisedStep(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x))


def test_a_collate_function_that_packs_gets_as_many_samples_as_are_asked_about() -> None:
    loader = StepLoader(data(), 4, max_duration="1ep", loading={"collate_fn": pack})
    batches = example_batches(loader)
    for size in (2, 3, 100):
        assert num_packed(batches(size)) == size
        assert batches(size)["input_ids"].shape == (1, size * max(LENGTHS))  # each is the longest


def test_the_largest_packed_batch_is_counted_in_samples() -> None:
    loader = StepLoader(data(), 4, max_duration="1ep", loading={"collate_fn": pack})
    batches = example_batches(loader)
    assert 296 < find_batch_size(training_step(), batches).size <= 300


def test_a_trainer_finds_sizes_of_packed_batches() -> None:
    def train(**settings: Any) -> Trainer:
        model = Packed()
        return Trainer(
            model,
            data(),
            optimizer=torch.optim.AdamW(model.parameters()),
            loss=lambda model, batch: model(batch),
            max_duration="1ep",
            loading=Loading(collate_fn=pack),
            **settings,
        )

    found = train(batch_size=2000, micro_batch_size="auto").run.loader.micro_batch_size
    assert found is not None
    assert 296 < found <= 300
    grows = IncreaseFunction(lambda epoch, size: 64, 64, "auto")
    policy = train(batch_size=grows).run.prepared.policy
    assert isinstance(policy, IncreaseFunction)
    largest = policy.max_batch_size
    assert isinstance(largest, int)
    assert 296 < largest <= 300


def test_packed_batches_of_an_iterable_are_counted_in_samples() -> None:
    batch = pack([torch.zeros(64, dtype=torch.long)] * 32)
    spec = DataSpec(iter([batch]), get_num_samples_in_batch=num_packed)
    answer = find_batch_size(training_step(), resizable(spec, batch), multiple_of=32)
    assert answer.size == 288
