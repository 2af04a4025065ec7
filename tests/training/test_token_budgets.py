"""Training in micro-batches with a budget of tokens: the step is that of one big batch."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from stretto.batching import Tokens
from stretto.config.run import RunConfig, dump_run_file
from stretto.data import DataSpec
from stretto.errors import BatchSizeError, TrainingError
from stretto.training import Evaluation, Loading, Stepping, Trainer
from stretto.training.algorithms import NoiseReport

LENGTHS = [3 + 7 * place % 23 for place in range(60)]


def texts() -> DataSpec:
    """Return samples of unequal length, with targets of which some do not count."""
    chance = torch.Generator().manual_seed(5)
    samples = []
    for length in LENGTHS:
        ids = torch.randint(1, 17, (length,), generator=chance)
        labels = torch.where(torch.rand(length, generator=chance) < 0.7, ids, -100)
        labels[0] = ids[0]
        samples.append({"input_ids": ids, "labels": labels})
    return DataSpec(samples, lengths=LENGTHS)


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join samples in rows; padding has no target."""
    return {
        name: pad_sequence([one[name] for one in samples], batch_first=True, padding_value=fill)
        for name, fill in (("input_ids", 0), ("labels", -100))
    }


def targets(batch: dict[str, Tensor]) -> int:
    """Return how many targets count."""
    return int((batch["labels"] != -100).sum())


class Memory:
    """A loss that runs out of memory where a micro-batch has too many tokens, with padding."""

    def __init__(self, room: int, *, over_tokens: bool) -> None:
        self.room, self.over_tokens, self.tokens = room, over_tokens, list[int]()

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if batch["input_ids"].numel() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.tokens.append(batch["input_ids"].numel())
        counts = batch["labels"] != -100
        logits = model(batch["input_ids"])
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="none", ignore_index=-100
        )
        if self.over_tokens:
            return losses.sum() / counts.sum()
        return (losses.view_as(counts).sum(1) / counts.sum(1)).mean()


def trainer_of(
    budget: Any, room: int = 10**6, *, over_tokens: bool = True, **more: Any
) -> tuple[Trainer, Memory]:
    """Return a trainer in float64."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(17, 8), nn.Tanh(), nn.Linear(8, 17)).double()
    memory = Memory(room, over_tokens=over_tokens)
    trainer = Trainer(
        model,
        texts(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        loss=memory,
        max_duration="2ep",
        batch_size="0sp:16 40sp:25",
        micro_batch_size=budget,
        loading=Loading(collate_fn=padded),
        stepping=Stepping(loss_weight=targets if over_tokens else "samples"),
        **more,
    )
    return trainer, memory


def weights(trainer: Trainer) -> list[Tensor]:
    """Return the weights."""
    return [*trainer.model.state_dict().values()]


@pytest.mark.parametrize("over_tokens", [False, True], ids=["samples", "tokens"])
def test_the_step_is_that_of_one_big_batch(over_tokens: bool) -> None:
    whole, _ = trainer_of(None, over_tokens=over_tokens)
    whole.fit()
    cut, memory = trainer_of("60tok", over_tokens=over_tokens)
    cut.fit()
    assert max(memory.tokens) <= 60
    torch.testing.assert_close(weights(cut), weights(whole), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:memory ran out:RuntimeWarning")
def test_a_budget_is_halved_where_memory_runs_out() -> None:
    whole, _ = trainer_of(None)
    whole.fit()
    short, memory = trainer_of("200tok", room=70)
    short.fit()
    retry = short._loop.stepper.retry
    assert retry.splits >= 1
    assert isinstance(retry.size, Tokens)
    assert max(memory.tokens) <= 70
    torch.testing.assert_close(weights(short), weights(whole), rtol=1e-12, atol=1e-12)
    saved = json.loads(json.dumps(retry.state_dict()))
    again, _ = trainer_of("200tok")
    again._loop.stepper.retry.load_state_dict(saved)
    assert again._loop.stepper.retry.size == retry.size
    other, _ = trainer_of(200)
    other._loop.stepper.retry.load_state_dict(saved)
    assert repr(other._loop.stepper.retry.size) == "200"  # as it is now configured


@pytest.mark.filterwarnings("ignore:memory ran out:RuntimeWarning")
def test_one_sample_that_does_not_fit_ends_the_run() -> None:
    trainer, _ = trainer_of("200tok", room=20)
    with pytest.raises(TrainingError, match="with one sample"):
        trainer.fit()


def test_an_evaluation_keeps_to_the_budget() -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch["input_ids"].numel())
        return model(batch["input_ids"]).square().mean()

    for data in (texts(), DataSpec(texts().data)):
        trainer, _ = trainer_of("60tok", evaluate=Evaluation(data, every="1ep", loss=loss))
        trainer.fit()
        assert max(seen) <= 60
        seen.clear()


def test_a_sample_above_the_budget_is_refused_when_the_trainer_is_made() -> None:
    with pytest.raises(BatchSizeError, match="of 25 tokens"):
        trainer_of("24tok")


def test_noise_of_sorted_micro_batches_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="chosen by length"):
        trainer_of("60tok", callbacks=[NoiseReport()])


def test_a_run_file_has_a_budget() -> None:
    file = {"max_duration": "1ep", "data": {"target": "my.data:make"}, "batch_size": 8}
    config = RunConfig.parse({**file, "micro_batch_size": "8_192tok"})
    assert repr(config.micro_batch_size) == repr(Tokens(8192))
    assert "micro_batch_size: 8192tok" in dump_run_file(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RunConfig.parse({**file, "micro_batch_size": 8}).micro_batch_size == 8
